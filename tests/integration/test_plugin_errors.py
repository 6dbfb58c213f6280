"""Plug-ins that fail when a job calls them: the line says whose code it was, and nobody is asked to report it to us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.plugins import write_plugin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

_LOGS = """
import queue
from elastic_run.multiprocessing import DefaultLogsSpecs

class Failing(DefaultLogsSpecs):
    def reify(self, envs):
        queue.Queue().get_nowait()

class Refusing(DefaultLogsSpecs):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("no room on the log server")
"""
_HANDLERS = """
class Misnamed:
    def get_backend(self):
        return "another"

def fail(params):
    raise RuntimeError("no licence")

def misname(params):
    return Misnamed()
"""
_MISNAMED = (
    "rendezvous backend 'misname' was asked for, but its handler says that it is 'another': "
    "get_backend() must return the name under which it is registered\n"
)
_WHOSE = "(LOGLEVEL=DEBUG shows the traceback)\n"


@pytest.mark.parametrize(
    ("name", "message", "line"),
    [
        ("failing", "Empty", 7),
        ("refusing", "RuntimeError: no room on the log server", 11),
    ],
)
def test_a_failing_plugin_for_logs(launch: Launch, tmp_path: Path, name: str, message: str, line: int) -> None:
    """The line names the place in the plug-in, also where the standard library raised the exception."""
    classes = {"failing": "our_logs:Failing", "refusing": "our_logs:Refusing"}
    write_plugin(tmp_path, "our_logs", contract.LOGS_SPECS_ENTRY_POINTS, classes, _LOGS)
    job = launch(f"--logs-specs={name}", "--no-python", "true", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait_exit() == contract.EXIT_INTERNAL_ERROR
    place = f"at {tmp_path}/our_logs.py:{line}, which is no code of elastic-run"
    assert job.stderr == f"elastic-run: error: {message}, {place} {_WHOSE}"


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        (
            "fail",
            contract.EXIT_INTERNAL_ERROR,
            "RuntimeError: no licence, at {}/our_handlers.py:7, which is no code of elastic-run " + _WHOSE,
        ),
        (
            "misname",
            contract.EXIT_USAGE,
            f"--rdzv-backend: {_MISNAMED}",
        ),
    ],
)
def test_a_failing_plugin_for_the_rendezvous(launch: Launch, tmp_path: Path, name: str, code: int, line: str) -> None:
    """A creator that raises, and a handler of another name than its entry point's."""
    creators = {"fail": "our_handlers:fail", "misname": "our_handlers:misname"}
    write_plugin(tmp_path, "our_handlers", contract.RENDEZVOUS_ENTRY_POINTS, creators, _HANDLERS)
    place = (f"--rdzv-backend={name}", "--rdzv-endpoint=localhost:1", "--rdzv-id=job", "--nnodes=1:2")
    job = launch(*place, "--no-python", "true", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait_exit() == code
    assert job.stderr == f"elastic-run: error: {line.format(tmp_path)}"


@pytest.mark.parametrize(
    ("group", "flags"),
    [
        (contract.LOGS_SPECS_ENTRY_POINTS, ("--logs-specs=bare",)),
        (contract.RENDEZVOUS_ENTRY_POINTS, ("--rdzv-backend=bare", "--rdzv-endpoint=localhost:1", "--rdzv-id=job")),
        ("elastic_run.event_handlers", ("--event-log-handler=bare",)),
    ],
)
def test_an_exception_without_a_message(launch: Launch, tmp_path: Path, group: str, flags: tuple[str, ...]) -> None:
    """A plug-in whose import raises one is told by the exception's name alone, without a colon."""
    write_plugin(tmp_path, "bare", group, {"bare": "bare:nothing"}, "raise MemoryError")
    job = launch(*flags, "--no-python", "true", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait_exit() == contract.EXIT_USAGE
    assert job.stderr.endswith(" can't be loaded: MemoryError\n")


_UNREADY = """
class Unready:
    use_agent_store = False

    def get_backend(self):
        return "unready"

    def next_rendezvous(self):
        raise KeyError

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def get_run_id(self):
        return "job"

    def shutdown(self):
        return True

def create(params):
    return Unready()
"""


def test_a_handler_that_raises_without_a_message(launch: Launch, tmp_path: Path) -> None:
    """The report has the exception's name alone."""
    write_plugin(tmp_path, "places", contract.RENDEZVOUS_ENTRY_POINTS, {"unready": "places:create"}, _UNREADY)
    place = ("--rdzv-backend=unready", "--rdzv-endpoint=localhost:1", "--rdzv-id=job", "--nnodes=1:2")
    job = launch(*place, "--no-python", "true", env={"PYTHONPATH": str(tmp_path)})
    assert job.wait_exit() == contract.EXIT_RENDEZVOUS
    assert "cause    KeyError\n" in job.stderr
