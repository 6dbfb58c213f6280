"""Programs that launch functions, as users write them: the fixtures `program` and `host`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launch import Launched
from tests.support.program import write_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Program = Callable[..., str]
    Host = Callable[..., Launched]

METHODS = ("spawn", "fork", "forkserver")
all_methods = pytest.mark.parametrize("method", METHODS)

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
