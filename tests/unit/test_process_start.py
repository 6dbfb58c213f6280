"""What the start of a process and of functions changes in the launcher, and processes that end while they are read."""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys
from multiprocessing import spawn
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from elastic_run.agent.driver.round_driver import _read_command
from elastic_run.agent.driver.watches import _is_uninterruptible
from elastic_run.agent.driver.worker_readings import read_usage
from elastic_run.diagnosis import doctor_host
from elastic_run.multiprocessing.fork_exec import open_unnamed, start_process
from elastic_run.multiprocessing.functions import launch
from elastic_run.multiprocessing.functions import start_processes as contexts
from elastic_run.multiprocessing.functions.launch import Functions
from elastic_run.multiprocessing.functions.start_processes import PContext
from elastic_run.multiprocessing.process_table import _with_descendants, read_stat
from elastic_run.store.worker_store import PortTakenError, find_port_owner

if TYPE_CHECKING:
    import signal
    import subprocess
    from collections.abc import Callable, Iterator

    from elastic_run.agent.driver.round import Round


def test_a_file_without_a_name_where_python_has_no_call_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of conda gets the same file in memory, closed on exec, and imports nothing for it."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setitem(sys.modules, "tempfile", None)
    opened = open_unnamed(b"orders")
    try:
        assert os.read(opened, 10) == b"orders"
        assert not os.get_inheritable(opened)
        assert "/memfd:elastic-run" in str(Path(f"/proc/self/fd/{opened}").readlink())
    finally:
        os.close(opened)


# --- commands ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fails", [False, True])
def test_the_launcher_keeps_its_limits(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """A worker begins with its own limit of descriptors and its own CPUs; the launcher keeps its former ones."""
    limits, cpus = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    lowered, chosen = limits[0] - 1, {min(cpus)}
    seen = []

    def start(*_: object, **__: object) -> int:
        seen.append((resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.sched_getaffinity(0)))
        if fails:
            raise FileNotFoundError
        return 70

    monkeypatch.setattr(os, "posix_spawnp", start)
    try:
        assert start_process(["true"], {}, affinity=frozenset(chosen), descriptor_limit=lowered) == 70
    except FileNotFoundError:
        assert fails
    assert seen == [(lowered, chosen)]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    assert os.sched_getaffinity(0) == cpus


# --- functions --------------------------------------------------------------------------------------------------------
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


# --- contexts ---------------------------------------------------------------------------------------------------------
class EndlessContext(PContext):
    """Processes that never end."""

    def __init__(self) -> None:
        self.looks = 0

    def _start(self) -> None: ...

    def _poll(self) -> None:
        self.looks += 1

    def pids(self) -> dict[int, int]:
        """Return nothing."""
        return {}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None: ...


@pytest.mark.parametrize(
    ("timeout", "period", "pauses"),
    [(2.5, 1.0, [1.0, 1.0, 0.5]), (0.25, 1.0, [0.25]), (1.0, 0.5, [0.5, 0.5]), (0.0, 1.0, [])],
)
def test_a_wait_takes_its_whole_timeout(
    monkeypatch: pytest.MonkeyPatch, timeout: float, period: float, pauses: list[float]
) -> None:
    """`wait` looks each period, and once more at the end of its timeout, before it returns nothing."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(contexts, "time", clock)
    context = EndlessContext()
    assert context.wait(timeout, period) is None
    assert slept == pauses
    assert context.looks == len(pauses) + 1


# --- processes that end, or hang in the kernel, while psutil reads them -----------------------------------------------
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
    for name in _METHODS:
        monkeypatch.setattr(psutil.Process, name, _raise(error))
    assert read_usage(_round_of(sleeper.pid)) == {}
    assert not _is_uninterruptible(sleeper.pid)
    assert _read_command(sleeper.pid) == ""
    assert find_port_owner(port) == ""
    assert doctor_host.parse_processes(f"GPU-a, {sleeper.pid}, 3, /bin/x") == {
        "GPU-a": [f"process {sleeper.pid} (x, 3 MiB)"]
    }
    assert doctor_host._count_running() == 0


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


def test_the_command_line_of_a_process_in_the_kernel_is_not_read(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """It may hold its memory lock for ever; psutil reads it for a name of 15 characters and more."""
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_DISK_SLEEP)
    monkeypatch.setattr(psutil.Process, "name", _raise(AssertionError()))
    monkeypatch.setattr(psutil.Process, "cmdline", _raise(AssertionError()))
    assert find_port_owner(port) == f"pid {os.getpid()}"
    (found,) = doctor_host.parse_processes(f"GPU-a, {os.getpid()}, 3, /bin/x")["GPU-a"]
    assert found.startswith(f"process {os.getpid()} (x of ")
    assert _is_uninterruptible(os.getpid())


# --- /proc ------------------------------------------------------------------------------------------------------------
def test_a_look_at_a_process_leaves_no_descriptor_open() -> None:
    """The launcher of a job of months looks at its workers many times."""
    before = [*Path("/proc/self/fd").iterdir()]
    for _ in range(3):
        stat = read_stat(os.getpid())
        assert stat is not None
        assert (stat.parent, stat.session) == (os.getppid(), os.getsid(0))
        assert read_stat(4194305) is None
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)


def test_descendants_are_found_at_any_depth() -> None:
    """Each process below one that was found, whatever the order of the pids; no other one."""
    parents = {2: 7, 3: 2, 5: 3, 7: 1, 8: 1, 9: 8}
    living: Any = {pid: SimpleNamespace(parent=parent) for pid, parent in parents.items()}
    assert _with_descendants({7}, living) == {7, 2, 3, 5}
