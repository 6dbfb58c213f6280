"""Slots of the log that were trimmed: no coordinator decides them a second time, on any kind of store."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import EntryRead, EntryTrimmed
from elastic_run.core.node.state import LogPosition
from elastic_run.core.protocol import job_keys
from elastic_run.core.protocol.log_start import find_start
from elastic_run.core.protocol.messages import Claim, LogStart, Warn, to_json
from elastic_run.rendezvous.elastic import decision_log
from elastic_run.store.jobstore.file import FileJobStore
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from elastic_run.store.jobstore.signed import SignedStore
from tests.support.job_stores import STORES, WITHOUT_ETCD
from tests.support.system import mark_system
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("kind", mark_system(STORES, but=WITHOUT_ETCD))
def test_a_trimmed_slot_is_never_decided_again(kind: str) -> None:
    """A coordinator that slept through a trim is told so, its entry goes, and no reader takes it for a decision."""
    with STORES[kind]() as opener, opener("job") as store, opener("job") as sleeper:
        first, second = Warn(1, 1), Warn(2, 2)
        assert decision_log.create_entry(store, 3, first) == EntryRead(3, to_json(first))
        assert decision_log.wait_entry(sleeper, 3, DEADLINE) == EntryRead(3, to_json(first))
        decision_log.raise_start(store, LogStart(4, 2))
        store.delete([job_keys.decision_key(3)])
        assert decision_log.create_entry(sleeper, 3, second) == EntryTrimmed(3)
        assert store.get([job_keys.decision_key(3)]) == [None]
        sleeper.create(job_keys.decision_key(3), to_json(second))  # it was stopped before it could look
        assert decision_log.wait_entry(store, 3, 0.0) == EntryTrimmed(3)
        assert decision_log.wait_entry(sleeper, 3, DEADLINE) == EntryTrimmed(3)
        entry = EntryRead(4, to_json(second), to_json(LogStart(4, 2)))
        assert decision_log.create_entry(sleeper, 4, second) == entry
        decision_log.raise_start(sleeper, LogStart(2, 1))
        assert find_start(store.get([job_keys.LOG_START])[0]) == LogStart(4, 2)


@pytest.mark.parametrize("kind", mark_system(STORES, but=WITHOUT_ETCD))
def test_a_coordinator_of_an_earlier_term_leaves_a_log_that_was_begun_anew(kind: str) -> None:
    """Otherwise nobody would see any more that its decisions are void (seed 12082013)."""
    anew = LogStart(1, 3, is_restart=True)
    with STORES[kind]() as opener, opener("job") as store:
        decision_log.raise_start(store, anew)
        assert find_start(decision_log.raise_start(store, LogStart(2, 1))) == anew
        assert find_start(decision_log.raise_start(store, LogStart(5, 4))) == LogStart(5, 4)
        assert find_start(decision_log.raise_start(store, LogStart(6, 3))) == LogStart(6, 3)


class RestoredStore(MemoryJobStore):
    """A store that is restored from a backup right after it has created a key."""

    def __init__(self, space: JobSpace, backup: dict[str, bytes]) -> None:
        super().__init__(space)
        self._backup = backup

    def create_beside(self, key: str, value: bytes, other: str) -> tuple[bytes, bytes | None]:
        """Create the key, and restore the store."""
        answer = super().create_beside(key, value, other)
        self.delete([key, other])
        self.write(self._backup)
        return answer


@pytest.mark.parametrize("start", [None, LogStart(2, 1), LogStart(4, 2)], ids=str)
@pytest.mark.parametrize("there", [Warn(1, 1), Warn(2, 2)], ids=str)
def test_an_entry_stays_in_a_store_that_was_restored_meanwhile(there: Warn, start: LogStart | None) -> None:
    """A coordinator whose slot was trimmed removes its own entry only, and only where the slot is trimmed."""
    backup = {job_keys.decision_key(3): to_json(there)}
    if start is not None:
        backup[job_keys.LOG_START] = to_json(start)
    with RestoredStore(JobSpace(), backup) as store:
        decision_log.raise_start(store, LogStart(4, 2))
        assert decision_log.create_entry(store, 3, Warn(2, 2)) == EntryTrimmed(3)
        is_trimmed_own = (there, start) == (Warn(2, 2), LogStart(4, 2))
        assert store.get([job_keys.decision_key(3)]) == [None if is_trimmed_own else to_json(there)]


def test_the_start_is_written_again_where_a_stranger_has_hidden_it() -> None:
    """With a token, a start that no member has written is no start, and the next trim writes it anew."""
    space = JobSpace()
    plain, store = MemoryJobStore(space), SignedStore(MemoryJobStore(space), b"secret")
    plain.write({job_keys.LOG_START: to_json(LogStart(9, 9)), job_keys.HEAD: b"forged too"})
    head = decision_log.read_head(store)
    assert (head.head, head.log_start) == (decision_log.FORGED, decision_log.FORGED)
    decision_log.raise_start(store, LogStart(4, 2))
    assert find_start(decision_log.read_head(store).log_start) == LogStart(4, 2)


@pytest.mark.parametrize("kind", mark_system(STORES, but=WITHOUT_ETCD))
def test_the_newest_state_is_found_though_the_log_begins_anew_behind_it(kind: str) -> None:
    """A restored store may know more of the job than the nodes that let its log begin anew."""
    with STORES[kind]() as opener, opener("job") as store:
        for slot, decision in ((2, Claim(3, "a")), (3, Warn(3, 1)), (4, Warn(2, 1)), (6, Claim(9, "b"))):
            decision_log.create_entry(store, slot, decision)
        store.write({job_keys.state_key(3, 3): b"state", job_keys.state_key(4, 2): b"void"})
        decision_log.raise_start(store, LogStart(6, 8, is_restart=True))
        assert decision_log.read_newest_state(store, 7) == b"state"
        assert decision_log.read_newest_state(store, 3) is None


def test_an_entry_that_a_stranger_has_hidden_is_not_lost() -> None:
    """In a store that was restored, the log begins anew only where an entry is gone which this node has read."""
    space = JobSpace()
    plain, store = MemoryJobStore(space), SignedStore(MemoryJobStore(space), b"secret")
    key = job_keys.decision_key(1)
    decision_log.create_entry(store, 0, Warn(1, 1))
    plain.write({key: to_json(Warn(1, 2))})
    read = decision_log.wait_entry(store, 1, DEADLINE)
    assert read == EntryRead(1, decision_log.FORGED)
    known = LogPosition(next_slot=2, term=1, former_entry=to_json(Warn(1, 1)), last_entry=decision_log.FORGED)
    assert decision_log.restart_log(store, known) is None
    plain.delete([key])
    assert decision_log.restart_log(store, known) == LogStart(2, 4, is_restart=True)


def test_a_writer_that_was_stopped_lowers_no_start_of_a_stream(tmp_path: Path) -> None:
    """In a directory, a trim that comes late changes nothing, and holds up nobody before it comes."""
    slow, fast = FileJobStore(f"{tmp_path}/", "job"), FileJobStore(f"{tmp_path}/", "job")
    for number in range(5):
        slow.append("facts", b"%d" % number)
    _before_its_next_link(slow, lambda: fast.trim("facts", 5))
    slow.trim("facts", 2)
    slow.append("facts", b"5")
    assert slow.read("facts", 0, 0.0)[0] == [b"5"]


def test_an_entry_that_a_dead_writer_left_below_the_start_holds_up_nobody(tmp_path: Path) -> None:
    """In a directory, a writer that is killed before it takes back an entry below the start stops no other writer."""
    slow, fast = FileJobStore(f"{tmp_path}/", "job"), FileJobStore(f"{tmp_path}/", "job")
    for number in range(5):
        slow.append("facts", b"%d" % number)
    fast.trim("facts", 5)
    Path(slow._entry("facts", 3)).write_bytes(b"late")
    writing = threading.Thread(target=fast.append, args=("facts", b"5"), daemon=True)
    writing.start()
    writing.join(DEADLINE)
    assert not writing.is_alive()
    assert slow.read("facts", 5, 0.0)[0] == [b"5"]


def test_a_writer_that_was_stopped_replaces_nothing(tmp_path: Path) -> None:
    """In a directory, a value that others have replaced since a writer looked stays, however often they have."""
    slow, fast = FileJobStore(f"{tmp_path}/", "job"), FileJobStore(f"{tmp_path}/", "job")
    for times in range(1, 4):
        key, values = f"k{times}", [b"%d" % number for number in range(times + 1)]
        assert slow.replace(key, None, values[0]) == values[0]

        def replace_all(key: str = key, values: list[bytes] = values) -> None:
            for before, after in pairwise(values):
                assert fast.replace(key, before, after) == after

        _before_its_next_link(slow, replace_all)
        assert slow.replace(key, values[0], b"late") == values[-1]
        assert slow.get([key]) == fast.get([key]) == [values[-1]]
    fast.write({"k1": b"written"})
    assert slow.get(["k1"]) == [b"written"]


def _before_its_next_link(store: FileJobStore, act: Callable[[], None]) -> None:
    """Let a writer stand still while others act, just before it puts a file into its place."""
    link = store._link

    def link_late(new: str, place: str) -> bool:
        store._link = link  # type: ignore[method-assign]
        act()
        return link(new, place)

    store._link = link_late  # type: ignore[method-assign]
