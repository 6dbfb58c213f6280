"""What a session tells its user, and how it ends, over a store in memory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Ended, Formed, Unreadable
from elastic_run.core.protocol import job_keys, messages
from elastic_run.rendezvous.elastic.job_session import JobSession
from elastic_run.rendezvous.session import Notice
from elastic_run.store.errors import REFUSED, StoreConnectionError
from elastic_run.store.jobstore.memory import MemoryJobStore
from tests.support.noting_store import NotingBackend, NotingStore, make_node
from tests.support.wait import stretched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.sessions import Node


@pytest.fixture
def backend() -> NotingBackend:
    """A store in memory."""
    return NotingBackend()


@pytest.fixture
def node(backend: NotingBackend) -> Iterator[Node]:
    """The one node of a job over it, not yet started; it is closed afterwards."""
    made = make_node(backend)
    yield made
    made.close()


def test_a_document_that_is_garbage_is_told_once(node: Node) -> None:
    """The coordinator writes it again, but a node may read it a few times before."""
    node.start()
    node.wait_for(Formed)
    assert isinstance(node.session, JobSession)
    for key in ("head", "head", "log_start"):
        node.session._perform(Unreadable(key, "no JSON"))
    texts = [event.text for _, event in node.events if isinstance(event, Notice)]
    assert [text.partition(" ")[0] for text in texts if "can't be read" in text] == ["head", "log_start"]


def test_no_thread_of_a_session_keeps_the_process(node: Node) -> None:
    """A thread that opens a connection can't be woken: a node that was told to go does not wait for its end."""
    node.start()
    node.wait_for(Formed)
    named = [thread for thread in threading.enumerate() if thread.name in ("sender", "log_reader")]
    assert len(named) == 2
    assert all(thread.daemon for thread in named)


def test_a_close_takes_no_more_than_its_time(node: Node, backend: NotingBackend) -> None:
    """The store is gone, so what the node has said last can't be written."""
    node.start()
    node.wait_for(Formed)
    backend.failure = StoreConnectionError("nobody listens", REFUSED)
    backend.empty()
    node.done()
    begun = time.monotonic()
    node.close(0.2)
    assert 0.2 <= time.monotonic() - begun < stretched(4.0)


def test_a_close_ends_with_the_confirmation_of_what_was_said(node: Node, backend: NotingBackend) -> None:
    """The store is slow; the session waits for it, and no longer."""
    node.start()
    node.wait_for(Formed)
    is_written = threading.Event()

    def be_slow(_: NotingStore, what: str, where: str) -> None:
        if (what, where) == ("append", job_keys.FACTS):
            is_written.wait(0.3)
            is_written.set()

    backend.on_use = be_slow
    node.done()
    begun = time.monotonic()
    node.close(60.0)
    assert is_written.is_set()
    assert time.monotonic() - begun < stretched(10.0)


def test_garbage_among_the_facts_is_told_once(
    node: Node, backend: NotingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator ignores it; a stranger may write more."""
    node.start()
    node.wait_for(Formed)
    for _ in range(2):
        MemoryJobStore(backend.space).append(job_keys.FACTS, b"garbage")
    node.done()
    assert node.wait_for(Ended).end.verdict == "success"
    assert ["unreadable messages of nodes" in record.getMessage() for record in caplog.records] == [True]


def test_a_node_that_fails_again_and_again_is_restarted(backend: NotingBackend) -> None:
    """From the second failure on there is a pause, which is drawn."""
    with make_node(backend, max_restarts=2, min_uptime=1000.0) as node:
        for signature in ("first", "second"):
            node.wait_for(Formed)
            node.fail(signature=signature)
        assert node.wait_for(Formed).assignment.restart_count == 2


def test_a_coordinator_that_leaves_ends_its_term(backend: NotingBackend) -> None:
    """The others elect another one at once, and need not wait for a lease."""
    with make_node(backend, max_nodes=2) as first:
        first.wait_for(Formed)
        with make_node(backend, max_nodes=2) as second:
            assert second.wait_for(Formed).assignment.group_world_size == 2
            first.session.leave("signal")
            first.close()
            entries = [backend.space.values.get(job_keys.decision_key(slot)) for slot in range(20)]
            decisions = [messages.read_decision(entry) for entry in entries if entry is not None]
            assert messages.Resign(1, first.session.node) in decisions
