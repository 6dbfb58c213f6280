"""What the kernel shows of a worker that does not write its stacks."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.diagnosis.stacks import STOPPED
from elastic_run.diagnosis import kernel_view
from elastic_run.signals import STACK_SIGNAL

if TYPE_CHECKING:
    from pathlib import Path

_NO_PID = 2**22 + 1


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give process 7 the threads 7, 8 and 9."""
    monkeypatch.setattr(kernel_view, "_threads", lambda _: ["7", "8", "9"])


def let_states(monkeypatch: pytest.MonkeyPatch, **states: str) -> None:
    """Let the kernel show states: `p7` of a process, `t8` of its thread; no other process is there."""

    def read_stat(task: int | str) -> SimpleNamespace | None:
        name = f"p{task}" if isinstance(task, int) else f"t{task.rpartition('/')[2]}"
        return SimpleNamespace(state=states[name].encode()) if name in states else None

    monkeypatch.setattr(kernel_view, "read_stat", read_stat)


@pytest.mark.parametrize(
    ("state", "where", "is_pending", "expected"),
    [
        ("T", "", True, STOPPED),
        ("t", "", True, "is stopped by a debugger"),
        ("Z", "", True, "has ended"),
        ("D", "nfs_wait", True, "is in uninterruptible sleep in the kernel (nfs_wait)"),
        ("D", "", True, "is in uninterruptible sleep in the kernel"),
        ("R", "", True, "has got no processor time to write its stacks"),
        ("S", "", True, f"blocks signal {STACK_SIGNAL}"),
        ("S", "", False, f"has a handler of its own for signal {STACK_SIGNAL}"),
    ],
)
def test_why_a_worker_is_silent(
    monkeypatch: pytest.MonkeyPatch, state: str, where: str, expected: str, *, is_pending: bool
) -> None:
    """Each state of the process, and of the signal, has its reason."""
    let_states(monkeypatch, p7=state)
    monkeypatch.setattr(kernel_view, "wait_channel", lambda _: where)
    monkeypatch.setattr(kernel_view, "is_pending", lambda _: is_pending)
    assert kernel_view.explain_silence(7) == expected


def test_a_process_that_is_gone_has_ended() -> None:
    """The reason is the same before and after the request for its stacks."""
    assert kernel_view.explain_silence(_NO_PID) == "has ended"
    assert kernel_view.find_obstacle(_NO_PID, None) == "has ended"


@pytest.mark.usefixtures("show")
@pytest.mark.parametrize(("others", "expected"), [("SS", True), ("SR", False), ("RS", False), ("DS", True)])
def test_a_process_is_calm_where_no_thread_but_the_first_runs(
    monkeypatch: pytest.MonkeyPatch, others: str, *, expected: bool
) -> None:
    """The handler of faulthandler reads the frames of other threads, which must not change meanwhile."""
    let_states(monkeypatch, t7="R", t8=others[0], t9=others[1])
    assert kernel_view.is_calm(7) is expected


def test_a_program_that_has_loaded_python_is_a_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in C may load the interpreter as a library. It counts as Python if it shows no stacks."""
    monkeypatch.setattr(kernel_view, "is_interpreters_name", lambda _: False)
    library = tmp_path / "libpython3.13.so.1.0"
    library.write_bytes(b"elf")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert kernel_view._is_python(os.getpid())
