"""Templates and their forks as the agent holds them, without a job around: bindings, changes, wait_limit, losses."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.multiprocessing.process.guardian import Guardian
from elastic_run.multiprocessing.warm import worker_pool
from elastic_run.multiprocessing.warm.worker_pool import WorkerPool
from tests.support.processes import is_gone
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    Engage = Callable[..., "Engaged"]

#: A worker writes where it may run, and whether it is a fork of a template.
_SCRIPT = "import os, sys; print(sorted(os.sched_getaffinity(0)), 'json' in sys.modules, os.environ['NAME'])"


class Engaged:
    """Warm workers with a loop of their own.

    Args:
        script: What they run.
        modules: What their templates import.
        affinities: Their CPUs, by local rank.
    """

    def __init__(self, script: Path, modules: list[str], affinities: Mapping[int, frozenset[int] | None]) -> None:
        self.loop = Loop()
        self.guardian = Guardian(is_exec=True)
        self.guardian.start()
        self.said: list[str] = []
        self.warm = WorkerPool(modules, affinities, self.guardian)
        self.argv = [sys.executable, "-u", str(script)]
        self.warm.start(self.argv, os.environ)
        self.warm.prepare()
        self.warm.attach(self.loop, self.said.append)

    def settle(self) -> None:
        """Wait until there is nothing to wait for."""
        self.warm.await_settled(lambda: None)
        assert self.loop.run_until(lambda: self.warm.is_settled, self.loop.now() + DEADLINE)

    def start(self, rank: int, **env: str) -> str | None:
        """Start a worker, and return what it writes; None where there is no fork for it."""
        reading, writing = os.pipe()
        pid = self.warm.start_worker(rank, self.argv, {**os.environ, **env}, (writing, 2))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read().strip()
        if pid is not None:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return text if pid is not None else None

    def close(self) -> None:
        """End all of it."""
        self.warm.close()
        self.guardian.dismiss()
        os.waitpid(self.guardian.pid, 0)
        self.loop.close()


@pytest.fixture
def engage(tmp_path: Path) -> Iterator[Engage]:
    """Start templates; they end with the test."""
    engaged: list[Engaged] = []

    def start(*modules: str, affinities: Mapping[int, frozenset[int] | None] | None = None) -> Engaged:
        script = tmp_path / "script.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        engaged.append(Engaged(script, [*modules], affinities or {0: None}))
        return engaged[-1]

    yield start
    for each in engaged:
        each.close()


def test_each_binding_has_a_template_of_its_own(engage: Engage) -> None:
    """Workers that are bound to other CPUs come from another template, bound before it imported anything."""
    cpus = sorted(os.sched_getaffinity(0))
    bindings = [frozenset({cpus[0]}), frozenset({cpus[-1]})]
    each = engage("json", affinities={0: bindings[0], 1: bindings[1], 2: bindings[0]})
    each.settle()
    assert len(each.guardian.spared) == len(set(bindings))
    for rank in range(3):
        assert each.start(rank, NAME="x") == f"{sorted(bindings[rank % 2])} True x"
    assert each.start(0, NAME="x") is None
    assert each.said == []


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that never ends its import, and return its name."""
    (tmp_path / "slow.py").write_text("import signal\nsignal.pause()", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "slow"


def test_a_long_import_is_told_and_given_up(engage: Engage, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user hears what is waited for, and after a long time the round begins without it."""
    monkeypatch.setattr(worker_pool, "_NOTICE", 0.5)
    each = engage("json", slow)
    assert each.loop.run_until(lambda: each.warm._doing == "importing slow", each.loop.now() + DEADLINE)
    monkeypatch.setattr(worker_pool, "_IMPORT_WAIT", 1.0)
    (template,) = each.guardian.spared
    each.settle()
    assert each.said == [
        "--preload: still waiting for the workers' template after 0 s: it is importing slow",
        "--preload: the workers' template is still importing slow after a wait of 1 s: workers start cold",
    ]
    assert each.start(0, NAME="x") is None
    each.warm.close()
    assert is_gone(template)


# --- templates that can't be, or die ---------------------------------------------------------------------------------


# --- parts -----------------------------------------------------------------------------------------------------------
