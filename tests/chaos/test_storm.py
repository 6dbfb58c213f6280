"""The driver of faults that overlap, on faults that are only noted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

from tests.chaos import storm
from tests.chaos.faults import Fault
from tests.chaos.storm import Storm

if TYPE_CHECKING:
    import pytest

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

    def transcript(self) -> str:
        return ""


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
