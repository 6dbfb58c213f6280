"""Process groups that a worker forms one after another: which keys get which number."""

from __future__ import annotations

import pytest

from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.groups import Member, ProcessGroups
from elastic_run.store.tcpstore.memory_store import MemoryStore

ADDRESS = b"/default_pg/0//cpu//0/0"


class Worker:
    """A process with its connections, as the server sees them."""

    def __init__(self, groups: ProcessGroups, data: MemoryStore, pid: int, host: str = "127.0.0.1") -> None:
        self._groups, self._data, self._pid, self._host = groups, data, pid, host

    def connect(self, *, opens: bool = True) -> Member:
        """Connect as torch does; without `opens` as a clone does."""
        member = Member(self._host)
        self._groups.rename(member, wire.PING, [self._pid])
        if opens:
            self._groups.rename(member, wire.ADD, [b"init/", 1])
        return member

    def key(self, member: Member, key: bytes = ADDRESS) -> bytes:
        """Set a key over a connection; returns the key that the store got."""
        renamed, value = self._groups.rename(member, wire.SET, [key, b"v"])
        assert isinstance(renamed, bytes)
        assert value == b"v"
        self._data.set(renamed, b"v")
        return renamed

    def form(self) -> bytes:
        """Form a group and part from it; returns the key of its address."""
        member = self.connect()
        key = self.key(member)
        self._groups.leave(member)
        return key


@pytest.fixture
def data() -> MemoryStore:
    """Give an empty store."""
    return MemoryStore()


@pytest.fixture
def groups(data: MemoryStore) -> ProcessGroups:
    """Give a numbering that has seen nobody."""
    return ProcessGroups(data)


def test_the_first_group_is_untouched(groups: ProcessGroups, data: MemoryStore) -> None:
    """The keys of a worker's first group are torch's, so that a plain job is served as by torch."""
    assert [Worker(groups, data, pid).form() for pid in (1, 2, 3)] == [ADDRESS] * 3


def test_later_groups_are_numbered(groups: ProcessGroups, data: MemoryStore) -> None:
    """Each further group of a process has keys of its own, the same as the other processes' group of that number."""
    first, second = Worker(groups, data, 1), Worker(groups, data, 2)
    assert [first.form() for _ in range(3)] == [
        ADDRESS,
        b"/default_pg#2/0//cpu//0/0",
        b"/default_pg#3/0//cpu//0/0",
    ]
    assert [second.form() for _ in range(2)] == [ADDRESS, b"/default_pg#2/0//cpu//0/0"]


def test_other_keys_are_never_touched(groups: ProcessGroups, data: MemoryStore) -> None:
    """Keys outside process groups keep their names, and stores that hold no group are not counted."""
    worker = Worker(groups, data, 1)
    for _ in range(3):
        member = worker.connect()
        assert worker.key(member, b"/mine") == b"/mine"
        groups.leave(member)
    assert worker.form() == ADDRESS
    member = worker.connect()
    worker.key(member)
    assert worker.key(member, b"/mine") == b"/mine"


def test_prefixes_of_attempts_are_groups_too(groups: ProcessGroups, data: MemoryStore) -> None:
    """The prefix that older torch puts before a restarted worker's keys stays before the number."""
    worker = Worker(groups, data, 1)
    worker.form()
    key = b"//worker/attempt_1/default_pg/0//cuda//0"
    assert worker.key(worker.connect(), key) == b"//worker/attempt_1/default_pg#2/0//cuda//0"


def test_lists_are_numbered_key_by_key(groups: ProcessGroups, data: MemoryStore) -> None:
    """In lists and pairs each key is numbered, and no value or count is."""
    worker = Worker(groups, data, 1)
    worker.form()
    member = worker.connect()
    worker.key(member)
    pairs = groups.rename(member, wire.MULTI_SET, [ADDRESS, ADDRESS, b"/k", ADDRESS])
    assert pairs == [b"/default_pg#2/0//cpu//0/0", ADDRESS, b"/k", ADDRESS]
    keys = groups.rename(member, wire.WAIT, [b"/k", ADDRESS])
    assert keys == [b"/k", b"/default_pg#2/0//cpu//0/0"]
    assert groups.rename(member, wire.NUM_KEYS, []) == []


def test_a_clone_belongs_to_the_group_of_its_process(groups: ProcessGroups, data: MemoryStore) -> None:
    """A clone sees the keys of the group under way, and its end is not the group's."""
    worker = Worker(groups, data, 1)
    worker.form()
    member = worker.connect()
    second = worker.key(member)
    clone = worker.connect(opens=False)
    assert worker.key(clone) == second
    groups.leave(clone)
    assert worker.key(worker.connect()) == second


def test_an_open_group_is_not_followed(groups: ProcessGroups, data: MemoryStore) -> None:
    """Where several workers look like one process, as with a pid namespace each, all are in the first group."""
    workers = [Worker(groups, data, 1) for _ in range(4)]
    assert [worker.key(worker.connect()) for worker in workers] == [ADDRESS] * 4


def test_who_sends_no_pid_is_served_as_by_torch(groups: ProcessGroups, data: MemoryStore) -> None:
    """Clients of torch before 2.5, which can't be told apart, get no numbers."""
    worker = Worker(groups, data, 0)
    assert [worker.form() for _ in range(3)] == [ADDRESS] * 3


def test_processes_of_different_machines_are_told_apart(groups: ProcessGroups, data: MemoryStore) -> None:
    """The same pid on another address is another process."""
    assert Worker(groups, data, 1).form() == ADDRESS
    assert Worker(groups, data, 1, "10.0.0.2").form() == ADDRESS


def test_keys_of_past_groups_are_dropped(groups: ProcessGroups, data: MemoryStore) -> None:
    """When the last worker has parted from a group and a later one exists, its keys go; a thousand groups leave two."""
    workers = [Worker(groups, data, pid) for pid in (1, 2)]
    for _ in range(1000):
        members = [worker.connect() for worker in workers]
        for worker, member in zip(workers, members, strict=True):
            worker.key(member)
        for member in members:
            groups.leave(member)
    assert data.num_keys() <= 2


def test_a_group_keeps_its_keys_while_one_is_in_it(groups: ProcessGroups, data: MemoryStore) -> None:
    """A worker that is slow to part still finds its group's keys after another has formed the next group."""
    slow, fast = Worker(groups, data, 1), Worker(groups, data, 2)
    member = slow.connect()
    slow.key(member)
    fast.form()
    fast.form()
    assert data.check([ADDRESS])
    groups.leave(member)
    assert not data.check([ADDRESS])


def test_a_new_round_begins_anew(groups: ProcessGroups, data: MemoryStore) -> None:
    """After clear a process's next group is its first."""
    worker = Worker(groups, data, 1)
    worker.form()
    groups.clear()
    assert worker.form() == ADDRESS
