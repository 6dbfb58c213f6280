"""Processes that end, or hang in the kernel, while psutil reads them."""

from __future__ import annotations

import errno
import os
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from elastic_run.agent.background import _read_command
from elastic_run.agent.driver.fault_injection import _find_child
from elastic_run.agent.driver.watches import _is_uninterruptible
from elastic_run.agent.driver.worker_readings import read_usage
from elastic_run.diagnosis import doctor_host
from elastic_run.store.worker_store import PortTakenError, find_port_owner
from elastic_run.timer.countdowns import Countdowns
from elastic_run.timer.timer_file import FileTimerRequest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from elastic_run.agent.driver.round import Round

_METHODS = ("status", "name", "cmdline", "children", "username", "num_threads")
_ERRORS = (psutil.NoSuchProcess(7), psutil.ZombieProcess(7), psutil.AccessDenied(7), OSError(errno.EMFILE, ""))


def _raise(error: Exception) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> Any:
        raise error

    return method


@pytest.fixture
def port() -> Iterator[int]:
    """Listen at a port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _round_of(*pids: int) -> Round:
    workers = SimpleNamespace(pids=dict(enumerate(pids)), alive=set(range(len(pids))))
    return cast("Round", SimpleNamespace(workers=workers))


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: type(error).__name__)
def test_a_process_that_ends_while_it_is_read_is_no_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes], port: int
) -> None:
    """Each reader of a process answers that nothing is known of it."""
    countdowns = Countdowns()
    countdowns.register([FileTimerRequest(sleeper.pid, "x", 1)])
    for name in _METHODS:
        monkeypatch.setattr(psutil.Process, name, _raise(error))
    assert read_usage(_round_of(sleeper.pid)) == {}
    assert not _is_uninterruptible(sleeper.pid)
    assert _read_command(sleeper.pid) == ""
    assert _find_child(os.getpid()) is None
    assert find_port_owner(port) == ""
    assert doctor_host.parse_processes(f"GPU-a, {sleeper.pid}, 3, /bin/x") == {
        "GPU-a": [f"process {sleeper.pid} (x, 3 MiB)"]
    }
    assert doctor_host._count_running() == 0
    assert countdowns.expired()[sleeper.pid][0].is_orphan


def test_a_taken_port_is_told_also_if_the_kernel_writes_what_psutil_does_not_know(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """It raises RuntimeError or KeyError for a line or a state that is new to it."""
    monkeypatch.setattr(psutil, "net_connections", _raise(KeyError("0D")))
    assert str(PortTakenError(port)) == f"port {port} is taken; choose another one or 0 for any"


def test_a_pid_that_no_process_has_is_no_error() -> None:
    """Nor is a number that can be no pid."""
    missing = 2**22 + 1
    assert list(read_usage(_round_of(os.getpid(), missing))) == [0]
    assert not _is_uninterruptible(missing)
    assert _read_command(missing) == ""
    assert _find_child(missing) is None
    countdowns = Countdowns()
    countdowns.register([FileTimerRequest(pid, "x", 1) for pid in (missing, -1, 2**70)])
    assert [found.is_orphan for (found,) in countdowns.expired().values()] == [True] * 3


def test_the_command_line_of_a_process_in_the_kernel_is_not_read(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """It may hold its memory lock for ever; psutil reads it for a name of 15 characters and more."""
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_DISK_SLEEP)
    monkeypatch.setattr(psutil.Process, "name", _raise(AssertionError()))
    monkeypatch.setattr(psutil.Process, "cmdline", _raise(AssertionError()))
    assert find_port_owner(port) == f"pid {os.getpid()}"
    (found,) = doctor_host.parse_processes(f"GPU-a, {os.getpid()}, 3, /bin/x")["GPU-a"]
    assert found.startswith(f"process {os.getpid()} (x of ")
    assert _is_uninterruptible(os.getpid())
