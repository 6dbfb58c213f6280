"""The driver of faults that overlap, on faults that are only noted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.chaos import storm
from tests.chaos.faults import Fault
from tests.chaos.storm import Storm

if TYPE_CHECKING:
    from tests.chaos.job import ManyNodeJob


class _Agent:
    def __init__(self) -> None:
        self.host = "h"
        self.is_running = True


class _Job:
    """A job of three nodes that nothing hurts."""

    def __init__(self) -> None:
        self.nodes = [_Agent(), _Agent(), _Agent()]
        self.orphan_deadline = 0.0
        self.looks = 0

    def transcript(self) -> str:
        return ""

    def progress(self) -> SimpleNamespace:
        """Return a checkpoint of one life more each time."""
        self.looks += 1
        return SimpleNamespace(ancestry=[None] * self.looks)

    def start_again(self, _: object) -> int:
        return 0


def test_a_fault_of_the_store_frees_no_node_for_other_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is in the dark stays hit when a fault of the store ends that was drawn with the same node."""
    hit: list[Fault] = []
    is_over = threading.Event()

    def note(fault: Fault, *_: object) -> None:
        hit.append(fault)
        if fault.name == "go-dark":
            assert is_over.wait(30)

    def say(line: str) -> None:
        if "set-clock" in line:
            is_over.set()

    def sleep(_: float) -> None:
        if "kill-store-leader" in [fault.name for fault in hit]:
            # The next fault begins when the thread of this one is over, which says nothing.
            for thread in threading.enumerate():
                if thread.name.startswith("kill-store-leader"):
                    thread.join(30)

    monkeypatch.setattr(storm, "inflict", note)
    monkeypatch.setattr("tests.chaos.storm.time.sleep", sleep)
    faults = [Fault(name, 1, 2, 0.1) for name in ("go-dark", "kill-store-leader", "set-clock")]
    Storm(cast("ManyNodeJob", _Job()), None, store_node=None, say=say).blow(faults, every=0.0)
    assert [(fault.name, fault.node) for fault in hit] == [("go-dark", 1), ("kill-store-leader", 1), ("set-clock", 2)]


@pytest.mark.parametrize(("store_node", "looks"), [(None, 2), (0, 0)])
def test_no_agent_ends_before_a_round_without_a_node_that_has_lost_its_power(
    store_node: int | None, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store can move, each of the two would be half of the seats that count; other faults don't wait."""
    job = _Job()
    hit: list[tuple[str, int]] = []
    monkeypatch.setattr(storm, "inflict", lambda fault, *_: hit.append((fault.name, job.looks)))
    faults = [Fault(name, node, 0, 0.1) for node, name in ((1, "power-off"), (2, "set-clock"), (2, "kill-agent"))]
    Storm(cast("ManyNodeJob", job), None, store_node=store_node, say=lambda _: None).blow(faults, every=0.0)
    assert sorted(hit) == [("kill-agent", looks), ("power-off", looks // 2), ("set-clock", looks // 2)]
