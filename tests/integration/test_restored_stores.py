"""An etcd that was restored from a backup goes backwards: nodes see it, say so, and the job goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.core.node.messages import Ended, Formed
from elastic_run.rendezvous import RendezvousParameters
from elastic_run.rendezvous.session import Notice
from elastic_run.store.errors import RESTORED, StoreConnectionError
from elastic_run.store.jobstore.etcd_v2 import EtcdV2JobStore
from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client
from elastic_run.store.jobstore.etcd_v3 import EtcdV3JobStore
from elastic_run.store.jobstore.etcd_v3_client import EtcdV3Client
from elastic_run.store.jobstore.revisions import Revisions
from tests.support.configs import plain_setup
from tests.support.etcd import Etcd
from tests.support.job_stores import LEASE
from tests.support.sessions import FAST, Node, handler_node
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from contextlib import ExitStack

    from elastic_run.store.jobstore.api import JobStore


@pytest.fixture
def etcd(stack: ExitStack) -> Etcd:
    """Start an etcd of one member."""
    return stack.enter_context(Etcd())


def _open(kind: str, etcd: Etcd, run_id: str, revisions: Revisions | None = None) -> JobStore:
    if kind == "etcd-v3":
        return EtcdV3JobStore(EtcdV3Client(etcd.client(), revisions=revisions), run_id, lease=LEASE)
    return EtcdV2JobStore(EtcdV2Client(etcd.client(), revisions=revisions), run_id, lease=LEASE)


@pytest.mark.parametrize("kind", ["etcd-v2", "etcd-v3"])
def test_an_older_answer_is_told_once(etcd: Etcd, kind: str) -> None:
    """Each connection hears that the store went back, and together they count it once; then all is as it was."""
    revisions = Revisions()
    with _open(kind, etcd, "job", revisions) as store:
        store.append("facts", b"before")
        etcd.save()
    with _open(kind, etcd, "job", revisions) as store, _open(kind, etcd, "job", revisions) as other:
        for number in range(10):
            store.append("facts", b"%d" % number)
        _, position = store.read("facts", 0, 0.0)
        assert other.read("facts", 0, 0.0)[1] == position
        assert store.restores == 0
        etcd.restore()
        for connection in (store, other):
            with pytest.raises(StoreConnectionError) as caught:
                connection.trim("facts", position)
            assert caught.value.reason == RESTORED
    with _open(kind, etcd, "job", revisions) as store:
        assert store.restores == 1
        store.append("facts", b"after")
        assert store.read("facts", 0, 0.0)[0] == [b"before", b"after"]
        assert store.restores == 1


def test_answers_that_cross_are_no_restore() -> None:
    """An answer may be older than one that came after its request was sent."""
    revisions = Revisions()
    revisions.check("etcd", 0, 5, 0)
    before = revisions.highest
    revisions.check("etcd", before, 9, 0)
    revisions.check("etcd", before, 6, 0)
    assert (revisions.highest, revisions.restores) == (9, 0)
    for _ in range(2):
        with pytest.raises(StoreConnectionError, match="went back to revision 3: it was restored"):
            revisions.check("etcd", 9, 3, 0)
    assert (revisions.highest, revisions.restores) == (3, 1)


@pytest.mark.parametrize("backend", ["etcd-v2", "etcd-v3"])
def test_a_job_goes_on_in_a_store_that_was_restored(stack: ExitStack, etcd: Etcd, backend: str) -> None:
    """A job whose etcd forgets a round and the facts of it takes in who comes next, and ends well; its nodes say so."""

    def start() -> Node:
        parameters = RendezvousParameters(backend, str(etcd.endpoints[0]), "job", 2, 4, "127.0.0.1", **conf)
        return stack.enter_context(handler_node(parameters, plain_setup()))

    conf = {**FAST, "last_call_timeout": "1"}
    nodes = [start(), start()]
    for node in nodes:
        assert node.wait_for(Formed).assignment.group_world_size == 2
    etcd.save()
    nodes.append(start())
    for node in nodes:
        while node.wait_for(Formed).assignment.group_world_size != 3:
            pass
    with _open(backend, etcd, "another job") as other:  # other jobs write as well
        for number in range(50):
            other.append("facts", b"%d" % number)
    etcd.restore()
    for node in nodes:
        wait_until(lambda node=node: any("restored from a backup" in text for text in _notices(node)))  # type: ignore[misc]
    nodes.append(start())
    for node in nodes:
        while node.wait_for(Formed).assignment.group_world_size != 4:
            pass
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in nodes} == {"success"}


def _notices(node: Node) -> list[str]:
    return [event.text for _, event in tuple(node.events) if isinstance(event, Notice)]
