"""Templates and their forks as the agent holds them, without a job around: bindings, changes, patience."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.multiprocessing.guardian import Guardian
from elastic_run.multiprocessing.warm import engagement
from elastic_run.multiprocessing.warm.engagement import WarmWorkers
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
        self.warm = WarmWorkers(modules, affinities, self.guardian)
        self.argv = [sys.executable, "-u", str(script)]
        self.warm.start(self.argv, os.environ)
        self.warm.attach(self.loop, self.said.append)
        self.warm.prepare()

    def settle(self) -> None:
        """Wait until there is nothing to wait for."""
        self.warm.await_settled(lambda: None)
        assert self.loop.run_until(lambda: self.warm.is_settled, self.loop.now() + DEADLINE)

    def start(self, rank: int, **env: str) -> str | None:
        """Start a worker, and return what it writes; None where there is no fork for it."""
        reading, writing = os.pipe()
        pid = self.warm.start_worker(rank, self.argv, {**os.environ, **env}, stdout=writing, stderr=2)
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


def test_a_generation_is_ordered_again(engage: Engage) -> None:
    """Every generation comes from the same template; forks that nobody took are taken by the next round."""
    each = engage("json", affinities={0: None, 1: None})
    each.settle()
    for round_ in range(3):
        assert each.start(0, NAME=f"round {round_}") is not None
        each.warm.prepare()
        each.settle()
    assert len(each.guardian.spared) == 1
    assert each.start(1, NAME="last") is not None


@pytest.mark.parametrize("change", ["OMP_NUM_THREADS", "PYTHONWARNINGS", "LD_LIBRARY_PATH", "TZ"])
def test_a_fork_isnt_used_when_exec_would_give_something_else(change: str, engage: Engage) -> None:
    """What libraries read when they are imported must not have changed since."""
    each = engage("json")
    each.settle()
    assert each.start(0, NAME="x", **{change: "3"}) is None
    assert each.said == [f"--preload: {change} has changed since the template started: workers start cold"]
    assert each.warm.is_settled


def test_a_fork_isnt_used_in_another_directory(engage: Engage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has changed its directory between rounds gets workers that begin there."""
    each = engage("json")
    each.settle()
    monkeypatch.chdir(tmp_path)
    assert each.start(0, NAME="x") is None
    assert "the working directory has changed since" in each.said[0]


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that never ends its import, and return its name."""
    (tmp_path / "slow.py").write_text("import signal\nsignal.pause()", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "slow"


def test_a_long_import_is_told_and_given_up(engage: Engage, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user hears what is waited for, and after a long time the round begins without it."""
    monkeypatch.setattr(engagement, "_NOTICE", 0.5)
    each = engage("json", slow)
    assert each.loop.run_until(lambda: each.warm._doing == "importing slow", each.loop.now() + DEADLINE)
    monkeypatch.setattr(engagement, "_IMPORT_PATIENCE", 1.0)
    (template,) = each.guardian.spared
    each.settle()
    assert each.said == [
        "--preload: waiting for the workers' template, which is importing slow for 0 s now",
        "--preload: importing slow takes longer than 1 s: workers start cold",
    ]
    assert each.start(0, NAME="x") is None
    each.warm.close()
    assert is_gone(template)


def test_a_long_import_under_one_of_two_bindings_is_given_up(
    engage: Engage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that has imported says nothing about another one's import."""
    cpus = sorted(os.sched_getaffinity(0))
    program = f"import os, signal\nif os.sched_getaffinity(0) == {{{cpus[-1]}}}: signal.pause()"
    (tmp_path / "uneven.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    each = engage("uneven", affinities={0: frozenset({cpus[0]}), 1: frozenset({cpus[-1]})})
    assert each.loop.run_until(
        lambda: len(each.warm._templates[frozenset({cpus[0]})].forks) == 1, each.loop.now() + DEADLINE
    )
    monkeypatch.setattr(engagement, "_IMPORT_PATIENCE", 0.5)
    monkeypatch.setattr(engagement, "_FORK_PATIENCE", 0.0)
    each.settle()
    assert each.said == ["--preload: importing uneven takes longer than 0 s: workers start cold"]


def test_nothing_is_left_when_it_is_closed_in_the_middle(engage: Engage) -> None:
    """Templates that import, forks that wait and forks under way are gone when `close` returns."""
    for rounds in range(4):
        each = engage("json", affinities={0: None, 1: None})
        for _ in range(rounds):
            each.loop.run_until(lambda: False, each.loop.now() + 0.02)
        (template,) = each.guardian.spared
        each.warm.close()
        assert is_gone(template)
        assert not each.guardian.spared
