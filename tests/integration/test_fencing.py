"""Sessions whose job is out of reach: with --fence-after=lease they let their workers be stopped, else not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elastic_run.core.job.node_config import NodeConfig
from elastic_run.core.job.node_events import Ended, Formed, Halted
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.rendezvous.session import Notice
from tests.support.configs import plain_setup
from tests.support.etcd import Etcd
from tests.support.sessions import FAST, Node, handler_node
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from contextlib import ExitStack

#: On a busy machine a heartbeat may take longer than the short lease of other tests.
_CONF = {**FAST, "keep_alive_max_attempt": "8"}
_LEASE = 8 * 0.4


def _start(stack: ExitStack, etcd: Etcd, *fences: str) -> list[Node]:
    parameters = RendezvousParameters("etcd-v3", str(etcd.endpoints[0]), "job", 1, 2, "127.0.0.1", **_CONF)
    setups = [plain_setup(node_config=NodeConfig(fence_after=after)) for after in fences]
    nodes = [stack.enter_context(handler_node(parameters, setup)) for setup in setups]
    for node in nodes:
        assert node.wait_for(Formed).assignment.group_world_size == 2
    return nodes


def test_a_node_that_is_cut_off_stops_its_workers(stack: ExitStack) -> None:
    """A fenced node halts its round after a lease and says why; the other runs on; the next round is no restart."""
    etcd = stack.enter_context(Etcd())
    fenced, other = _start(stack, etcd, "lease", "never")
    etcd.pause(0)
    halted = fenced.wait_for(Halted)
    assert halted.reason == "fenced"
    assert fenced.when(halted) - _last_heartbeat_at(fenced) >= _LEASE
    wait_until(lambda: any("the workers were stopped after" in text for text in _notices(fenced)))
    assert not [event for _, event in other.events if isinstance(event, Halted)]
    etcd.resume(0)
    for node in (fenced, other):
        formed = node.wait_for(Formed).assignment
        while formed.group_world_size != 2:
            formed = node.wait_for(Formed).assignment
        assert formed.restart_count == 0
    for node in (fenced, other):
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in (fenced, other)} == {"success"}


def test_a_node_whose_store_answers_is_left_alone(stack: ExitStack) -> None:
    """A fenced node whose heartbeats arrive runs for as long as its workers do."""
    etcd = stack.enter_context(Etcd())
    nodes = _start(stack, etcd, "lease", "lease")
    end = time.monotonic() + 1.5 * _LEASE
    # The store has confirmed a heartbeat that was sent after that time.
    wait_until(lambda: all(_last_heartbeat_at(node) > end for node in nodes))
    for node in nodes:
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}
    assert not [event for node in nodes for _, event in node.events if isinstance(event, Halted)]


def _last_heartbeat_at(node: Node) -> float:
    """Return the time at which the last heartbeat was sent that the store has confirmed."""
    return node.session._context.sender.last_heartbeat_at  # type: ignore[attr-defined, no-any-return]


def _notices(node: Node) -> list[str]:
    return [event.text for _, event in tuple(node.events) if isinstance(event, Notice)]
