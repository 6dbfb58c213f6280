"""The start of function workers beside what the program itself does with multiprocessing; starts no process."""

from __future__ import annotations

import errno
import os
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.multiprocessing.functions import launch
from elastic_run.multiprocessing.functions.launch import Functions


def test_the_programs_executable_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that embeds Python multiprocessing executes that program again, as it did before."""
    before = spawn.get_executable()
    monkeypatch.setattr(launch, "find_interpreter", lambda: "/opt/python")
    with launch._interpreter():
        assert os.fsdecode(spawn.get_executable()) == "/opt/python"
    assert spawn.get_executable() == before


def test_a_fork_that_is_refused_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes may be reached for a while, and the program goes on."""

    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    options: Any = SimpleNamespace(stdout=1, stderr=2, stacks=-1, env={}, replaced=(), affinity=None)
    functions: Any = SimpleNamespace(_parent_alive_pipes=[])
    worker: Any = None
    before = {*Path("/proc/self/fd").iterdir()}
    with pytest.raises(OSError, match="temporarily unavailable"):
        Functions._fork(functions, worker, options, lambda: None)
    assert {*Path("/proc/self/fd").iterdir()} == before
    assert functions._parent_alive_pipes == []
