"""The log reader shares the sender's connection, whatever happens to that."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job import config
from elastic_run.core.node.messages import Ended, Formed, Refused, StoreRestored
from elastic_run.core.protocol import job_keys, messages
from elastic_run.core.protocol.messages import LogStart
from elastic_run.rendezvous.backend_table import read_settings
from elastic_run.rendezvous.elastic import heartbeats
from elastic_run.rendezvous.elastic.exit_barrier import EXIT_BARRIER
from elastic_run.rendezvous.coordination.handler import open_session
from elastic_run.rendezvous.elastic.job_session import JobSession
from elastic_run.rendezvous.elastic.store_connection import STORE_ID, StoreConnection
from elastic_run.rendezvous.session import Notice
from elastic_run.report import wait_notices, wait_texts
from elastic_run.store.errors import FULL, REFUSED, StoreConnectionError
from elastic_run.store.jobstore.memory import MemoryJobStore
from tests.support.configs import plain_setup
from tests.support.noting_store import ATTEMPTS, ELSEWHERE, FIRST_AND_LAST, SLOW, NotingBackend, NotingStore, make_node
from tests.support.sessions import Node
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_run.rendezvous.elastic.context import SessionContext
    from tests.support.noting_store import OnUse


@pytest.fixture
def backend() -> NotingBackend:
    """A store in memory."""
    return NotingBackend()


@pytest.fixture
def node(backend: NotingBackend) -> Iterator[Node]:
    """The one node of a job over it, not yet started; it is closed afterwards, and leaves nothing open."""
    made = make_node(backend)
    yield made
    made.close()
    wait_until(lambda: all(store.is_closed for store in backend.opened), what="all connections closed")


def context_of(node: Node) -> SessionContext:
    """Return what the threads of a node share."""
    assert isinstance(node.session, JobSession)
    return node.session._context


def in_another_thread(function: Callable[[], None]) -> None:
    """Call a function in another thread, as the agent's is for the session's threads, and wait until it returns."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def once(is_now: Callable[[NotingStore, str, str], bool], act: Callable[[NotingStore], None]) -> OnUse:
    """Return what acts at the first use of a kind."""
    acted: list[NotingStore] = []

    def on_use(store: NotingStore, what: str, where: str) -> None:
        if not acted and is_now(store, what, where):
            acted.append(store)
            act(store)

    return on_use


def is_first_wait(_: NotingStore, what: str, where: str) -> bool:
    """Whether the log reader begins to wait for a slot."""
    return what == "wait" and where.startswith(job_keys.decision_key(0)[:2])


def is_joined(_: NotingStore, what: str, where: str) -> bool:
    """Whether the first fact of a node was appended just now."""
    return (what, where) == ("appended", job_keys.FACTS)


# --- nothing breaks --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_host", [False, True])
def test_a_node_has_one_connection(
    node: Node, backend: NotingBackend, monkeypatch: pytest.MonkeyPatch, *, is_host: bool
) -> None:
    """Facts go out over the connection over which the log is followed; the node that serves the store has no other."""
    monkeypatch.setattr(NotingBackend, "is_host", is_host)
    node.start()
    node.wait_for(Formed)
    node.done()
    assert node.wait_for(Ended).end.verdict == "success"
    (only,) = backend.users_of("append", job_keys.FACTS)
    assert backend.users_of("wait") == [only]
    assert [store for store in backend.opened if not store.is_coordinators] == [only]


def test_a_store_without_room_for_more_is_no_hindrance(node: Node, backend: NotingBackend) -> None:
    """A node that has joined needs no other connection to say its next fact."""
    node.start()
    node.wait_for(Formed)
    backend.failure = StoreConnectionError("takes no more connections", FULL)
    node.done()
    assert node.wait_for(Ended).end.verdict == "success"


def test_a_node_that_was_refused_asks_nothing_more(node: Node, backend: NotingBackend) -> None:
    """A job with a token refuses a node that has none, which waits to be closed."""
    backend.space.values[STORE_ID] = b"signed"
    node.start()
    assert "this node was given none" in node.wait_for(Refused).detail
    node.close()
    (only,) = backend.opened
    assert only.uses == [("get", STORE_ID)]


def test_the_coordinator_is_looked_at_one_pause_after_a_round_was_formed(backend: NotingBackend) -> None:
    """All nodes of a large job are told of a round at once; it brings no other question than each one's assignment."""
    looked_at: list[float] = []

    def note(_: NotingStore, what: str, __: str) -> None:
        if what == "heartbeats" and threading.current_thread().name == "sender":
            looked_at.append(time.monotonic())

    backend.on_use = note
    with make_node(backend, {"keep_alive_interval": "2"}) as node:
        formed_at = node.when(node.wait_for(Formed))
        wait_until(lambda: looked_at)
    assert looked_at[0] - formed_at >= 2 / 8


def test_the_coordinator_is_looked_at_between_two_heartbeats(
    backend: NotingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its loss, or that of the store beside it, would be noticed an interval after the lease."""
    monkeypatch.setattr(heartbeats, "_LOOKS", 6000)
    used: list[str] = []

    def note(_: NotingStore, what: str, __: str) -> None:
        if threading.current_thread().name == "sender":
            used.append(what)

    backend.on_use = note
    with make_node(backend) as node:
        node.wait_for(Formed)
        wait_until(lambda: used.count("heartbeats") >= 3)
    assert "heartbeat" not in used, "none was due"


def test_a_node_that_waits_says_again_for_whom(backend: NotingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line comes with the heartbeats, as often as its interval allows."""
    monkeypatch.setattr(wait_notices, "FIRST", 0.0)
    monkeypatch.setattr(wait_notices, "INTERVAL", 0.0)
    monkeypatch.setattr(wait_texts, "INTERVAL", 0.0)
    settings = read_settings("c10d", {**SLOW, "keep_alive_interval": "0.1"})
    setup = plain_setup(min_nodes=2, max_nodes=2)
    with Node(open_session(backend, settings, setup, local_addr="127.0.0.1")) as node:
        wait_until(lambda: [isinstance(event, Notice) for _, event in node.events].count(True) >= 3)
        texts = {event.text.partition(",")[0] for _, event in node.events if isinstance(event, Notice)}
    assert texts == {f"waiting: 1/2 nodes ({socket.gethostname()})"}


# --- the connection breaks -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moment", [is_joined, is_first_wait], ids=["before", "after"])
def test_a_connection_that_breaks_meanwhile_is_replaced(
    node: Node, backend: NotingBackend, moment: Callable[[NotingStore, str, str], bool]
) -> None:
    """The sender opens another one and says again that the node joins; both threads use the new connection."""
    backend.on_use = once(moment, NotingStore.close)
    node.start()
    node.wait_for(Formed)
    node.done()
    assert node.wait_for(Ended).end.verdict == "success"
    assert [type(fact) for fact in backend.facts] == [messages.Join, messages.Join, messages.Ready]
    assert len([store for store in backend.opened if not store.is_coordinators]) == 2
    assert backend.users_of("wait")[-1] is backend.users_of("append", job_keys.FACTS)[-1]


def test_a_connection_that_breaks_while_the_assignment_is_read_costs_no_round(
    node: Node, backend: NotingBackend
) -> None:
    """The node asks for its assignment again over the next connection."""
    prefix = job_keys.assignment_key(0, 0, "")[:2]
    backend.on_use = once(lambda _, what, where: what == "get" and where.startswith(prefix), NotingStore.close)
    node.start()
    node.wait_for(Formed)
    node.done()
    assert node.wait_for(Ended).end.verdict == "success"
    assert len(backend.users_of("get", prefix)) == 2


def test_a_store_that_is_lost_meanwhile_is_tried_until_it_answers(node: Node, backend: NotingBackend) -> None:
    """The sender tries again, and the log reader waits for its connection."""
    node.start()
    node.wait_for(Formed)
    backend.space.set_reachable(is_reachable=False)
    backend.failure = StoreConnectionError("nobody listens", REFUSED)
    node.done()
    wait_until(lambda: backend.failures >= ATTEMPTS)
    backend.space.set_reachable(is_reachable=True)
    backend.failure = None
    assert node.wait_for(Ended).end.verdict == "success"


def test_a_slot_that_another_node_makes_void_is_not_waited_for(backend: NotingBackend) -> None:
    """After a restore, a node that has read more raises the start of the log: no slot below it is ever written."""
    with make_node(backend, {"keep_alive_interval": "0.2"}) as node:
        node.wait_for(Formed)
        context, driver = context_of(node), context_of(node).sender.member_driver
        assert driver is not None
        driver.feed(StoreRestored(None))
        used = len(backend.users_of("wait"))
        for connection in context.connections:
            connection.interrupt()
        wait_until(lambda: len(backend.users_of("wait")) > used)
        log = driver.member.log
        assert log.next_slot is not None
        start = LogStart(log.next_slot + 1, log.term + 9, is_restart=True)
        MemoryJobStore(backend.space).write({job_keys.LOG_START: messages.to_json(start)})
        node.done()
        began = time.monotonic()
        assert node.wait_for(Ended).end.verdict == "success"
        assert time.monotonic() - began <= stretched(5.0)


def test_a_store_that_is_silent_for_the_log_reader_gets_twice_the_time(
    node: Node, backend: NotingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender opens the shared connection again, and does not wait for its next heartbeat with that."""
    monkeypatch.setattr(wait_notices, "FIRST", 300.0)  # nor for the first line
    timeouts: list[float] = []

    def note(store: NotingStore) -> None:
        timeouts.append(store.timeout)
        store.fall_silent()

    backend.on_use = once(is_first_wait, note)
    node.start()
    node.wait_for(Formed)
    node.done()
    assert node.wait_for(Ended).end.verdict == "success"
    assert timeouts == [context_of(node).answer_timeout]
    timeouts += [store.timeout for store in backend.opened if not store.is_coordinators][1:]
    assert timeouts == [context_of(node).answer_timeout, 2 * context_of(node).answer_timeout]


# --- the store is another one ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("moment", [is_joined, is_first_wait], ids=["before", "after"])
def test_a_store_that_is_emptied_meanwhile_is_told_all_again(
    backend: NotingBackend, moment: Callable[[NotingStore, str, str], bool]
) -> None:
    """The next heartbeat finds it out, and nothing else is said there before the node has said that it joins."""
    backend.on_use = once(moment, lambda _: backend.empty())
    with make_node(backend, {"keep_alive_interval": "0.2"}) as node:
        node.wait_for(Formed)
        node.finish()
        assert node.wait_for(Ended).end.verdict == "success"
    assert [type(fact) for fact in backend.facts][:2] == [messages.Join, messages.Join]


def test_a_store_that_was_emptied_later_is_told_all_again(node: Node, backend: NotingBackend) -> None:
    """A node that had nothing to say for a while looks whether the store knows the job before it says the next fact."""
    node.start()
    node.wait_for(Formed)
    backend.empty()
    node.finish()
    assert node.wait_for(Ended).end.verdict == "success"
    assert [type(fact) for fact in backend.facts][:3] == [messages.Join, messages.Join, messages.Ready]


@pytest.mark.parametrize("moment", [is_joined, is_first_wait], ids=["before", "after"])
def test_a_store_that_moves_meanwhile_is_followed(
    node: Node, backend: NotingBackend, moment: Callable[[NotingStore, str, str], bool]
) -> None:
    """The node goes where the host has said, says so, and opens no other connection to the host that leaves."""
    left: list[int] = []

    def move(_: NotingStore) -> None:
        left.append(len(backend.opened))
        context = context_of(node)
        context.signals.failovers.append(ELSEWHERE)
        context.signals.wake.set()

    former = backend.space
    backend.on_use = once(moment, move)
    node.start()
    wait_until(lambda: backend.name == ELSEWHERE)
    node.wait_for(Formed)
    node.finish()
    assert node.wait_for(Ended).end.verdict == "success"
    texts = [event.text for _, event in node.events if isinstance(event, Notice)]
    assert f"the node that serves the store at memory leaves; going on at {ELSEWHERE}" in texts
    # The coordinator's thread, which began before, may have opened its own.
    later = [store for store in backend.opened[left[0] :] if store.space is former]
    assert not [store for store in later if not store.is_coordinators]


# --- the node goes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("moment", [is_joined, is_first_wait], ids=["before", "after"])
def test_a_node_that_leaves_meanwhile_says_so(
    node: Node, backend: NotingBackend, moment: Callable[[NotingStore, str, str], bool]
) -> None:
    """Its last fact goes over the same connection as its first one."""
    backend.on_use = once(moment, lambda _: in_another_thread(lambda: node.session.leave("signal", "SIGTERM came")))
    node.start()
    wait_until(lambda: any(isinstance(fact, messages.Leave) for fact in backend.facts))
    node.close()
    first, last = (next(store for store in backend.opened if kind in map(type, store.facts)) for kind in FIRST_AND_LAST)
    assert first is last


def test_a_session_that_is_closed_meanwhile_ends(
    node: Node, backend: NotingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log reader that waits for the sender's connection ends, though there is none that would be interrupted."""
    backend.on_use = once(is_first_wait, NotingStore.close)
    monkeypatch.setattr(StoreConnection, "identify", lambda *_: None)  # it waits for ever
    node.start()
    wait_until(lambda: any(thread.name == "log_reader" for thread in threading.enumerate()))
    node.close()
    wait_until(lambda: not {"sender", "log_reader"} & {thread.name for thread in threading.enumerate()})


def test_a_log_reader_that_ends_leaves_the_connection_open(node: Node, backend: NotingBackend) -> None:
    """The sender says over it that the node knows the verdict."""
    node.start()
    node.wait_for(Formed)
    node.done()
    assert node.wait_for(Ended).end.verdict == "success"
    wait_until(lambda: not any(thread.name == "log_reader" for thread in threading.enumerate()))
    wait_until(lambda: backend.users_of("append", EXIT_BARRIER))
    assert backend.users_of("append", EXIT_BARRIER) == backend.users_of("append", job_keys.FACTS)


def test_a_waiting_node_finds_at_once_that_its_store_is_gone(
    backend: NotingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection waits for the log; when that breaks the node does not wait for its next heartbeat."""
    monkeypatch.setattr(wait_notices, "FIRST", 300.0)  # nor for the first line
    settings = read_settings("c10d", SLOW)
    node = Node(open_session(backend, settings, plain_setup(min_nodes=2, max_nodes=2), local_addr="127.0.0.1"))
    backend.on_use = once(is_first_wait, lambda _: backend.empty())
    with node:
        wait_until(lambda: len(backend.facts) > 1)
    assert [type(fact) for fact in backend.facts][:2] == [messages.Join, messages.Join]


def test_the_first_heartbeats_of_a_crowd_wait_for_its_round(
    backend: NotingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come a lease later than those of a small job, unless the node coordinates, or the job has its round."""
    monkeypatch.setattr(config, "_CROWD", 3)
    heartbeats: dict[NotingStore, float] = {}

    def note(store: NotingStore, what: str, _: str) -> None:
        if what == "heartbeat":
            heartbeats.setdefault(store, time.monotonic())

    backend.on_use = note
    settings = read_settings("c10d", {**SLOW, "keep_alive_interval": "0.3", "keep_alive_max_attempt": "20"})
    setup = plain_setup(min_nodes=3, max_nodes=3)
    first, second, third = (Node(open_session(backend, settings, setup, local_addr="127.0.0.1")) for _ in range(3))
    with first, second:
        wait_until(lambda: heartbeats)  # the coordinator's
        assert len(heartbeats) == 1
        with third:
            for node in (first, second, third):
                node.wait_for(Formed)
            begun = time.monotonic()
            wait_until(lambda: len(heartbeats) == 3)
    assert time.monotonic() - begun < stretched(4.0)
