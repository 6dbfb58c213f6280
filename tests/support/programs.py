"""Programs of users: that launch functions (the fixtures `program` and `host`), with plugins, with shorter waits."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launch import Launched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Program = Callable[..., str]
    Host = Callable[..., Launched]
    from collections.abc import Mapping


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
