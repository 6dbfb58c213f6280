"""Heartbeats that answer: a node that the job has dropped learns it from its next heartbeat, without a clock."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Ended, Formed, Halted
from elastic_run.core.protocol.job_keys import FACTS
from elastic_run.core.protocol.messages import Join, read_fact
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.store.jobstore.c10d import C10dJobStore
from tests.support.configs import plain_setup
from tests.support.etcd import Etcd
from tests.support.sessions import FAST, Node, NodeProcess, free_port, handler_node, tcp_node
from tests.support.slow_way import SlowWay
from tests.support.system import mark_system
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path
    from typing import TypeAlias

    Place: TypeAlias = tuple[str, str]

_SETUP = plain_setup()


@pytest.fixture(params=["c10d", "file", *mark_system(["etcd-v2", "etcd-v3"])])
def place(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path) -> Place:
    """Return a backend and its endpoint."""
    if request.param == "c10d":
        return "", ""
    if request.param == "file":
        return "c10d", str(tmp_path / "store")
    return request.param, str(stack.enter_context(Etcd()).endpoints[0])


@pytest.fixture
def start(stack: ExitStack, place: Place) -> tuple[Callable[..., Node], Callable[..., NodeProcess]]:
    """Return what starts a node here, the first one as the coordinator, and what starts one that can be stopped."""
    port = free_port()

    def start_node(least: int, most: int) -> Node:
        if not place[0]:
            return stack.enter_context(tcp_node(port, (least, most), setup=_SETUP))
        conf = {**FAST, "store_type": "file"} if place[0] == "c10d" else FAST
        parameters = RendezvousParameters(*place, "job", least, most, "127.0.0.1", **conf)
        return stack.enter_context(handler_node(parameters, _SETUP))

    def start_process(least: int, most: int) -> NodeProcess:
        given = place if place[0] else ()
        return stack.enter_context(NodeProcess(port, (least, most), is_host=False, suspends=True, place=given))

    return start_node, start_process


def _wait_dropped(node: Node, others: int) -> None:
    """Wait until the coordinator, which lives in a node, has dropped all but so many."""

    def is_dropped() -> bool:
        terms = node.session._terms  # type: ignore[attr-defined]
        coordinator = terms[-1]._coordinator if terms else None
        return coordinator is not None and len(coordinator.job.nodes) == others

    wait_until(is_dropped)


def test_a_waiting_node_that_was_suspended_joins_again(
    start: tuple[Callable[..., Node], Callable[..., NodeProcess]],
) -> None:
    """A node that waits, and is suspended beyond its lease, is in the next round, though its clock has seen nothing."""
    start_node, start_process = start
    first = start_node(3, 3)
    wait_until(lambda: first.is_waiting)
    sleeper = start_process(3, 3)
    sleeper.wait_line("waiting")
    _wait_dropped(first, 2)
    sleeper.process.send_signal(signal.SIGSTOP)
    _wait_dropped(first, 1)
    sleeper.process.send_signal(signal.SIGCONT)
    third = start_node(3, 3)
    assert first.wait_for(Formed).assignment.group_world_size == 3
    sleeper.wait_line("Formed")
    third.wait_for(Formed)
    sleeper.say("done")
    for node in (first, third):
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in (first, third)} == {"success"}
    assert "success" in sleeper.wait_line("Ended")


def test_a_member_that_was_suspended_joins_again(
    start: tuple[Callable[..., Node], Callable[..., NodeProcess]],
) -> None:
    """A member of a round that is suspended beyond its lease is replaced, stops its workers, and is in the next one."""
    start_node, start_process = start
    first = start_node(1, 2)
    wait_until(lambda: first.is_waiting)
    sleeper = start_process(1, 2)
    assert first.wait_for(Formed).assignment.group_world_size == 2
    sleeper.wait_line("Formed")
    sleeper.process.send_signal(signal.SIGSTOP)
    assert first.wait_for(Halted).reason == "loss"
    assert first.wait_for(Formed).assignment.group_world_size == 1
    sleeper.process.send_signal(signal.SIGCONT)
    sleeper.wait_line("Halted")
    assert first.wait_for(Formed).assignment.group_world_size == 2
    sleeper.wait_line("Formed")
    sleeper.say("done")
    first.done()
    assert first.wait_for(Ended).end.verdict == "success"


def test_a_node_whose_heartbeat_was_removed_says_again_where_it_stands(stack: ExitStack) -> None:
    """Whoever removes the heartbeat of a node that lives harms nothing: it joins again, once, and its round goes on."""
    port = free_port()
    nodes = [stack.enter_context(tcp_node(port, (2, 2), setup=_SETUP)) for _ in range(2)]
    for node in nodes:
        assert node.wait_for(Formed).assignment.group_world_size == 2
    name = nodes[1].session.node
    with C10dJobStore("127.0.0.1", port, "job") as store:
        wait_until(lambda: store.read_heartbeats([name]) != [None])
        _, position = store.read(FACTS, 0, 0.0)
        store.forget_heartbeats([name])
        facts: list[Join] = []
        while name not in [fact.node for fact in facts]:
            entries, position = store.read(FACTS, position, DEADLINE)
            facts += [fact for fact in map(read_fact, entries) if isinstance(fact, Join)]
        assert facts[-1].last is not None
        wait_until(lambda: store.read_heartbeats([name]) != [None])
    for node in nodes:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}
    assert not [event for node in nodes for _, event in node.events if isinstance(event, Halted)]


@pytest.mark.parametrize(
    "part", [pytest.param("/b/", id="heartbeats", marks=pytest.mark.long), pytest.param("", id="all keys")]
)
def test_a_job_goes_on_after_its_keys_in_etcd_were_deleted(stack: ExitStack, part: str) -> None:
    """The nodes write their heartbeats again, so that they are not lost again and again; the job ends with success."""
    etcd = stack.enter_context(Etcd())
    parameters = RendezvousParameters("etcd-v3", str(etcd.endpoints[0]), "job", 2, 2, "127.0.0.1", **FAST)
    nodes = [stack.enter_context(handler_node(parameters, _SETUP)) for _ in range(2)]
    for node in nodes:
        node.wait_for(Formed)
    wait_until(lambda: has_heartbeats(etcd))
    etcd.delete_keys(part)
    wait_until(lambda: has_heartbeats(etcd))
    for node in nodes:
        node.finish()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


@pytest.mark.parametrize("is_early", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_job_goes_on_after_its_directory_was_removed(stack: ExitStack, tmp_path: Path, *, is_early: bool) -> None:
    """So it does where the store is a directory, before the first heartbeats and after them."""
    conf = {**FAST, "store_type": "file"}
    parameters = RendezvousParameters("c10d", str(tmp_path / "store"), "job", 2, 2, "127.0.0.1", **conf)
    nodes = [stack.enter_context(handler_node(parameters, _SETUP)) for _ in range(2)]
    for node in nodes:
        node.wait_for(Formed)
    directory = tmp_path / "store.d"
    if not is_early:
        wait_until(lambda: len([*directory.rglob("b/*")]) == len(nodes))
    directory.rename(tmp_path / "away")  # a node may write there at the same time
    wait_until(lambda: len([*directory.rglob("b/*")]) == len(nodes))
    for node in nodes:
        node.finish()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def has_heartbeats(etcd: Etcd) -> bool:
    """Whether both nodes have one."""
    return sum("/b/" in key for key in etcd.list_keys()) == 2


def test_a_node_that_is_far_from_its_store_is_halted_at_once(stack: ExitStack) -> None:
    """Its looks at the coordinator follow each other without a pause, and don't keep the log of decisions from it."""
    conf = {**FAST, "last_call_timeout": "0"}
    port = free_port()
    near = stack.enter_context(tcp_node(port, (2, 2), is_host=True, conf=conf))
    way = stack.enter_context(SlowWay(port, 0.04))  # twice as long as the pause between two looks, there and back
    far = stack.enter_context(tcp_node(way.port, (2, 2), is_host=False, conf=conf))
    for node in (near, far):
        node.wait_for(Formed)
    looks = far.session._context.sender  # type: ignore[attr-defined]
    before = looks.last_heartbeat_at
    wait_until(lambda: looks.last_heartbeat_at > before)
    near.fail(3)
    failed_at = time.monotonic()
    assert far.when(far.wait_for(Halted)) - failed_at < stretched(2.0)
    assert far.wait_for(Ended).end.verdict == "worker_failed"
