"""What a guardian tells of a dead agent: to which stores, when, how often, and what it makes of a bad record."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.contract import ENV_RECORD_DIR
from elastic_run.core.protocol.codec import decode, encode
from elastic_run.core.protocol.job_keys import FACTS, HEAD, decision_key, state_key
from elastic_run.core.protocol.messages import (
    SEAT_UNTOLD,
    Assignment,
    Head,
    Leave,
    Resign,
    SeatDead,
    StoreAddress,
    read_decision,
    read_fact,
    to_json,
)
from elastic_run.rendezvous.backend_table import make_backend, read_settings
from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.rendezvous.elastic.node_death.notice import send_death_notice
from elastic_run.rendezvous.elastic.node_death.proofs import DeathProofs, find_notice_limit, name_job
from elastic_run.rendezvous.elastic.store_connection import STORE_ID
from elastic_run.store.tcpstore.listener import open_public_listener
from tests.support.etcd import Etcd
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from contextlib import ExitStack

    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.store.jobstore.api import JobStore

TOKEN = b"secret of the nodes"
_SECONDS = 10.0


class Dead:
    """An agent that has a seat in round 3, and its death.

    Args:
        stack: Closes its record.
        kind: Of the job's store.
        endpoint: Where that is.
        secret: Of the job.
        config: The settings of the rendezvous.
        is_told: Whether it was told of the round.
    """

    def __init__(
        self,
        stack: ExitStack,
        kind: str,
        endpoint: str,
        *,
        secret: bytes | None = None,
        config: dict[str, str] | None = None,
        is_told: bool = True,
    ) -> None:
        settings = read_settings(kind, config or {})
        self.backend: Backend = make_backend(kind, endpoint, "job", settings, is_host=False, secret=secret)
        self.deaths = DeathProofs(name_job(self.backend))
        self.deaths.open("victim")
        stack.callback(self.deaths.close, is_over=True)
        store_address = StoreAddress("127.0.0.1", 1)
        if is_told:
            self.deaths.note_round(
                Assignment(3, 1, 3, 1, 3, 1, 3, store_address, 0, 3, incarnation="red", round_id="3/1/c")
            )

    def document(self, seconds: float = _SECONDS) -> dict[str, Any]:
        """Return what its guardian was given."""
        return {
            **self.backend.describe(),
            "node": "victim",
            "job": self.deaths.job,
            "record": self.deaths.path,
            "seconds": seconds,
        }

    def start_notice(self) -> threading.Thread:
        """Let its guardian tell the job, in a thread."""
        thread = threading.Thread(target=send_death_notice, args=(self.document(),), daemon=True)
        thread.start()
        return thread


def kill_at(stack: ExitStack, ports: list[int]) -> Dead:
    """Let an agent die whose job's store is served at these ports of this machine."""
    return Dead(stack, "c10d", ",".join(f"127.0.0.1:{port}" for port in ports))


def serve(stack: ExitStack, port: int, token: bytes | None = None) -> None:
    """Serve a store at a port."""
    stack.callback(HostedStore(open_public_listener(port), token=token).close)


def open_at(stack: ExitStack, port: int, token: bytes | None = None) -> JobStore:
    """Open the store of the job at a port."""
    backend = make_backend("c10d", f"127.0.0.1:{port}", "job", read_settings("c10d", {}), is_host=False, secret=token)
    return stack.enter_context(backend.open(_SECONDS))


def read_all(store: JobStore) -> list[object]:
    """Return the facts that were told."""
    return [read_fact(entry) for entry in store.read(FACTS, 0, 0.0)[0]]


def is_told(facts: list[object]) -> bool:
    """Tell whether the facts name the victim's death and its seat, in this order, any number of times."""
    kinds = [type(fact) for fact in facts]
    seats = [(fact.round_id, fact.rank, fact.status) for fact in facts if isinstance(fact, SeatDead)]
    return kinds[:2] == [Leave, SeatDead] and set(seats) == {("3/1/c", 1, "running")}


def form_newer_round(store: JobStore) -> None:
    """Let the store's log have formed a newer round than the victim's."""
    write_head(store, 4)


def end_notice(notice: threading.Thread, store: JobStore) -> None:
    """Let the store's log form a newer round: the notice ends soon."""
    form_newer_round(store)
    notice.join(_SECONDS / 2)
    assert not notice.is_alive()


def write_head(store: JobStore, number: int) -> None:
    """Let the store's log stand at a round."""
    head = Head(number, 1, "other", number, number, 1, is_running=True, state_slot=-1, state_term=0, incarnation="red")
    store.write({HEAD: to_json(head)})


def test_every_endpoint_is_told(stack: ExitStack) -> None:
    """The store at a later endpoint is told though nobody listens at the first; a newer round there ends the notice."""
    ports = [free_port() for _ in range(3)]
    serve(stack, ports[1])
    store = open_at(stack, ports[1])
    store.create(STORE_ID, b"store second")
    dead = kill_at(stack, ports)
    notice = dead.start_notice()
    assert wait_until(lambda: is_told(read_all(store)))
    end_notice(notice, store)


def test_a_store_that_comes_later_is_told_too(stack: ExitStack) -> None:
    """A store that is served only when the notice has begun, and one that no agent has come to yet, are told then."""
    ports = [free_port() for _ in range(2)]
    dead = kill_at(stack, ports)
    notice = dead.start_notice()
    serve(stack, ports[1])
    store = open_at(stack, ports[1])
    assert read_all(store) == []
    store.create(STORE_ID, b"store late")
    wait_until(lambda: is_told(read_all(store)))
    end_notice(notice, store)


def test_a_log_that_stands_still_is_told_once(stack: ExitStack) -> None:
    """However often the notice looks whether it has gone on."""
    ports = [free_port() for _ in range(2)]
    serve(stack, ports[0])
    store = open_at(stack, ports[0])
    store.create(STORE_ID, b"store first")
    dead = kill_at(stack, ports)
    send_death_notice(dead.document(seconds=1.2))
    assert len(read_all(store)) == 2


def test_a_store_is_told_again_when_its_log_has_come_to_the_round(stack: ExitStack) -> None:
    """A log that did not know of the round when it was told is told once more when it does, and no third time."""
    ports = [free_port() for _ in range(2)]
    serve(stack, ports[0])
    store = open_at(stack, ports[0])
    store.create(STORE_ID, b"store first")
    dead = kill_at(stack, ports)
    notice = dead.start_notice()
    wait_until(lambda: len(read_all(store)) == 2)
    write_head(store, 3)
    wait_until(lambda: len(read_all(store)) == 4)
    end_notice(notice, store)
    assert is_told(read_all(store))


def test_a_round_that_still_runs_may_go_on_in_another_store(stack: ExitStack) -> None:
    """A store that is served only after another one was told is told, too, until a newer round was formed."""
    ports = [free_port() for _ in range(2)]
    serve(stack, ports[0])
    first = open_at(stack, ports[0])
    write_head(first, 3)
    first.create(STORE_ID, b"store first")
    notice = kill_at(stack, ports).start_notice()
    wait_until(lambda: is_told(read_all(first)))
    serve(stack, ports[1])
    second = open_at(stack, ports[1])
    second.create(STORE_ID, b"store second")
    wait_until(lambda: is_told(read_all(second)))
    form_newer_round(second)
    notice.join(_SECONDS / 2)
    assert not notice.is_alive()


def test_a_notice_ends_though_no_agent_comes(stack: ExitStack) -> None:
    """Where no agent comes to a store the notice ends with its time; one endpoint that refuses ends it at once."""
    ports = [free_port() for _ in range(2)]
    serve(stack, ports[1])
    dead = kill_at(stack, ports)
    begun = time.monotonic()
    send_death_notice(dead.document(seconds=1.0))
    assert time.monotonic() - begun >= 1.0
    alone = Dead(stack, "c10d", f"127.0.0.1:{ports[0]}")
    with pytest.raises(ConnectionError):
        send_death_notice(alone.document(seconds=600.0))


def test_a_notice_takes_two_leases_and_ten_seconds() -> None:
    """The limit grows with the lease: the others take as long to find the job's next store."""
    assert find_notice_limit(6.0) == 22.0


def test_a_store_with_a_token_is_told(stack: ExitStack) -> None:
    """With a token the notice proves it and signs what it says, at each endpoint."""
    ports = [free_port() for _ in range(2)]
    serve(stack, ports[1], TOKEN)
    store = open_at(stack, ports[1], TOKEN)
    store.create(STORE_ID, b"store sealed")
    dead = Dead(stack, "c10d", ",".join(f"127.0.0.1:{port}" for port in ports), secret=TOKEN)
    notice = dead.start_notice()
    wait_until(lambda: is_told(read_all(store)))
    end_notice(notice, store)


@pytest.mark.parametrize("kind", ["etcd", "etcd-v3"])
def test_etcd_is_told(stack: ExitStack, kind: str) -> None:
    """An etcd is told once, and the notice ends: it is the only store that the job has."""
    etcd = stack.enter_context(Etcd())
    config = {} if kind == "etcd-v3" else {"protocol": "http"}
    dead = Dead(stack, kind, f"127.0.0.1:{etcd.endpoints[0].port}", config=config)
    store = stack.enter_context(dead.backend.open(_SECONDS))
    store.create(STORE_ID, b"store there")
    send_death_notice(dead.document())
    facts = read_all(store)
    assert len(facts) == 2
    assert is_told(facts)


@pytest.mark.parametrize("coordinator", ["victim", "other"])
def test_the_term_of_a_dead_coordinator_is_ended(stack: ExitStack, tmp_path: Path, coordinator: str) -> None:
    """By the entry behind its last one, with the state as of that; the term of another node goes on."""
    dead = Dead(stack, "c10d", str(tmp_path / "store"), config={"store_type": "file"})
    store = stack.enter_context(dead.backend.open(_SECONDS))
    store.create(STORE_ID, b"store there")
    head = Head(5, 2, coordinator, 3, 5, 2, is_running=True, state_slot=5, state_term=2, incarnation="red")
    store.write({HEAD: to_json(head), state_key(5, 2): encode({"slot": 5, "round": 3})})
    send_death_notice(dead.document())
    entry, before, behind = store.get([decision_key(6), state_key(5, 2), state_key(6, 2)])
    if coordinator == "victim":
        assert entry is not None
        assert behind is not None
        assert (read_decision(entry), before, decode(behind)) == (Resign(2, "victim"), None, {"slot": 6, "round": 3})
    else:
        assert (entry, behind) == (None, None)


def test_a_file_is_told(stack: ExitStack, tmp_path: Path) -> None:
    """So is a store in a file."""
    dead = Dead(stack, "c10d", str(tmp_path / "store"), config={"store_type": "file"})
    store = stack.enter_context(dead.backend.open(_SECONDS))
    store.create(STORE_ID, b"store there")
    send_death_notice(dead.document())
    assert is_told(read_all(store))


def test_an_agent_that_was_told_of_no_round_is_named_as_such(stack: ExitStack) -> None:
    """A round may have been formed with it, which goes on without it then; the first store is told, and once."""
    ports = [free_port() for _ in range(2)]
    serve(stack, ports[1])
    store = open_at(stack, ports[1])
    store.create(STORE_ID, b"store second")
    dead = Dead(stack, "c10d", ",".join(f"127.0.0.1:{port}" for port in ports), is_told=False)
    send_death_notice(dead.document())
    leave, seat = read_all(store)
    assert isinstance(leave, Leave)
    assert isinstance(seat, SeatDead)
    assert (seat.node, seat.status, seat.round_id, seat.store_id) == ("victim", SEAT_UNTOLD, "", "")


def test_without_a_readable_record_only_the_node_is_named(stack: ExitStack, tmp_path: Path) -> None:
    """A record that is garbage, of another node, or gone proves no seat's death; the node's death is told still."""
    dead = Dead(stack, "c10d", str(tmp_path / "store"), config={"store_type": "file"})
    store = stack.enter_context(dead.backend.open(_SECONDS))
    store.create(STORE_ID, b"store there")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x00rubbish")
    other = Path(os.environ[ENV_RECORD_DIR]) / "other"
    other.write_bytes(Path(dead.deaths.path).read_bytes().replace(b"victim", b"wictim"))
    for record in (garbage, other, tmp_path / "gone"):
        send_death_notice({**dead.document(), "record": str(record)})
    facts = read_all(store)
    assert [type(fact) for fact in facts] == [Leave] * 3
    assert {fact.node for fact in facts if isinstance(fact, Leave)} == {"victim"}
