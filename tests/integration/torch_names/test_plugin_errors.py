"""Plug-ins that fail when a job calls them: the line says whose code it was, and nobody is asked to report it to us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.programs import write_plugin

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch


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
_PARTIAL_LOGS = """
from elastic_run.multiprocessing import LogsDest, LogsSpecs

class Partial(LogsSpecs):
    root_log_dir = ""

    def reify(self, envs):
        attempt = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        return LogsDest({0: "", 1: ""}, {0: "", 1: ""}) if not attempt else LogsDest({0: ""}, {})

class Nothing(Partial):
    def reify(self, envs):
        return None

class Late(Partial):
    def reify(self, envs):
        if envs[0]["TORCHELASTIC_RESTART_COUNT"] == "1":
            raise KeyError("late")
        return super().reify(envs)
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
    ("name", "line"),
    [
        ("Partial", 'our_logs.Partial.reify has returned no stdouts for local rank 1; "" is the console'),
        ("Nothing", 'our_logs.Nothing.reify has returned no stdouts for local rank 0, 1; "" is the console'),
        ("Late", "KeyError: 'late', at "),
    ],
)
def test_a_plugin_that_leaves_out_workers(launch: Launch, tmp_path: Path, name: str, line: str) -> None:
    """The line names the plug-in's class and the ranks, in the first round and after a restart."""
    write_plugin(tmp_path, "our_logs", contract.LOGS_SPECS_ENTRY_POINTS, {"ours": f"our_logs:{name}"}, _PARTIAL_LOGS)
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--max-backoff=0", "--logs-specs=ours", "--no-python", "false")
    job = launch(*flags, env={"PYTHONPATH": str(tmp_path)})
    assert job.wait_exit() == contract.EXIT_INTERNAL_ERROR
    assert job.stderr.splitlines()[-1].startswith(f"elastic-run: error: {line}")
    assert "report it" not in job.stderr


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
