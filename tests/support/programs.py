"""Programs of users: that launch functions, with plugins, with shorter waits, with a module to preload."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launch import Launched
from tests.support.processes import descendants_of
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Program = Callable[..., str]
    Host = Callable[..., Launched]
    Module = Callable[..., dict[str, str]]


def write_program(path: Path, head: str, functions: str, main: str) -> str:
    """Write a program."""
    body = textwrap.indent(textwrap.dedent(main).strip("\n"), "    ")
    path.write_text(f"{head}\n{textwrap.dedent(functions)}\nif __name__ == '__main__':\n{body}\n", encoding="utf-8")
    return str(path)


#: Each start method of functions; that of forkserver has the way of spawn, but for the fork.
all_methods = pytest.mark.parametrize("method", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.long)])

#: What every program of these tests begins with. `launch` is one line, as in users' programs.
HEAD = """
import os, pickle, signal, subprocess, sys, threading, time
import multiprocessing
from elastic_run import ChildFailedError, DefaultLogsSpecs, LaunchConfig, Std, elastic_launch

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def launch(function, *args, count=2, restarts=0, method=sys.argv[1], **config):
    config = LaunchConfig(1, 1, count, rdzv_backend="local", max_restarts=restarts, start_method=method, **config)
    return elastic_launch(config, function)(*args)
"""


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Write a program from its functions and what it does as the main program."""

    def write(functions: str, main: str) -> str:
        return write_program(tmp_path / "host.py", HEAD, functions, main)

    return write


@pytest.fixture
def host() -> Iterator[Host]:
    """Run a program with arguments; what still runs at the end is killed."""
    started: list[Launched] = []

    def start(path: Path, *arguments: str, **options: Any) -> Launched:
        started.append(Launched((sys.executable, str(path), *arguments), env=dict(os.environ), **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def write_plugin(directory: Path, package: str, group: str, entry_points: dict[str, str], source: str = "") -> None:
    """Write a package's metadata, and its module."""
    metadata = directory / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    if source:
        (directory / f"{package}.py").write_text(source, encoding="utf-8")


def shortened(constants: Mapping[str, float]) -> tuple[str, ...]:
    """Return the command of a launcher that has other constants."""
    code = ["import sys"]
    for name, seconds in constants.items():
        module, _, constant = name.rpartition(".")
        code += [f"import {module}", f"sys.modules[{module!r}].{constant} = {seconds}"]
    return (sys.executable, "-c", "\n".join((*code, "from elastic_run.__main__ import main", "main()")))


#: A launcher whose first waiting line comes after a fifth of a second instead of two.
TELLS_SOON = shortened({"elastic_run.report.waiting.FIRST": 0.2})


# --- warm workers: a module to preload, the template and its forks as `ps` shows them ---------------------------------
_ROOT = Path(__file__).parents[2]
#: In the first attempt the others fail when the gate is opened; rank 0, told to stop, goes when it is opened again.
ENDS_AT_THE_GATE = (
    "if attempt == 0 and rank == 0:\n"
    "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "    say('there')\n    signal.sigwait({signal.SIGTERM})\n    say('stopping')\n"
    "    open(os.environ['GATE']).read()\n    sys.exit(0)\n"
    "if attempt == 0: open(os.environ['GATE']).read(); sys.exit(1)\n"
)
#: Whether the worker came from a template that had imported the module.
SAYS_HOW = "say('warm' if 'heavy' in sys.modules else 'cold', rank, attempt)\n"


def module_writer(directory: Path) -> Module:
    """Return a function that writes the module `heavy`, and returns the variables with which it can be imported."""

    def write(body: str = "") -> dict[str, str]:
        place = directory / "modules"
        place.mkdir(exist_ok=True)
        (place / "heavy.py").write_text(textwrap.dedent(body), encoding="utf-8")
        return {"PYTHONPATH": f"{place}:{_ROOT}", "GATE": str(directory / "gate"), "OMP_NUM_THREADS": "1"}

    os.mkfifo(directory / "gate")
    return write


def title_of(pid: int) -> str:
    """Return a process's command line as `ps` shows it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").rstrip("\0").replace("\0", " ")
    except OSError:
        return ""


def wait_titled(launcher: int, title: str, count: int = 1) -> list[int]:
    """Wait until so many descendants of a launcher have a title; return their pids."""

    def find() -> list[int]:
        return [pid for pid in descendants_of(launcher) if title_of(pid) == title]

    return wait_until(lambda: len(found := find()) == count and found, what=f"{count} x {title!r}") or []


def wait_template(launcher: int) -> int:
    """Wait for a launcher's template; return its pid."""
    return wait_titled(launcher, "elastic-run: template")[0]


# --- countdown timers -------------------------------------------------------------------------------------------------
@pytest.fixture
def no_timer_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without a client, whatever a test before it has configured."""
    monkeypatch.setattr("torch.distributed.elastic.timer.api._timer_client", None)
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that does nothing."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()
