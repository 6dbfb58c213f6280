"""The system refuses a descriptor, a process or a thread: nothing that was begun is left, and the error says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import contract
from elastic_run.multiprocessing import fork_exec

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


#: Counts what there is before and after a start that is refused at each place in turn.
_HEAD = """
import ctypes, errno, os, resource, sys, threading, time
from elastic_run import loop
from elastic_run.launcher import LaunchConfig, elastic_launch
from elastic_run.multiprocessing import DefaultLogsSpecs, Std, start_processes
from elastic_run.multiprocessing import fork_exec
from elastic_run.multiprocessing.functions.spawn import spawn

def work(index=0):
    time.sleep(0)

def wait():
    time.sleep(600)

def command(): start("/bin/sleep", {0: ("600",), 1: ("600",)})
def tee(): start("/bin/sleep", {0: ("600",), 1: ("600",)}, logs=DefaultLogsSpecs(log_dir=sys.argv[1], tee=Std.ALL))
def by_fork(): start(wait, {0: (), 1: ()}, start_method="fork")
def by_spawn(): start(wait, {0: (), 1: ()}, start_method="spawn")
def plain(): spawn(work, nprocs=2, start_method="fork")
def job():
    config = LaunchConfig(1, 1, 2, rdzv_backend="local", max_restarts=0, start_method="fork")
    elastic_launch(config, work)()

def start(entrypoint, args, logs=None, **options):
    envs = {rank: {} for rank in args}
    context = start_processes("name", entrypoint, args, envs, logs or DefaultLogsSpecs(), **options)
    assert len(context.pids()) == len(args)
    context.close()

def opened():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try: found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError: pass
    return {fd: path for fd, path in found.items() if not path.startswith("/proc/")}

def children_left():
    "Return the children of all threads, ended ones too."
    found = set()
    for task in os.listdir("/proc/self/task"):
        try: found.update(open(f"/proc/self/task/{task}/children").read().split())
        except OSError: pass
    return found

def limited(kind, begin, limits):
    "Begin under each soft limit in turn."
    begin()
    old = resource.getrlimit(kind)
    outcomes = set()
    for limit in limits:
        before, children_before = opened(), children_left()
        resource.setrlimit(kind, (limit, old[1]))
        try: begin(); outcomes.add("begun")
        except (OSError, RuntimeError) as raised: outcomes.add(str(raised))
        finally: resource.setrlimit(kind, old)
        assert opened() == before, (limit, before, opened())
        assert children_left() == children_before, limit
    for outcome in sorted(outcomes, key=lambda outcome: (outcome != "begun", outcome)): print(outcome)

def become_nobody():
    "Let the limit of processes hold for this process, which may go on reading root's files."
    os.setresuid(424242, 0, 0)
    class Header(ctypes.Structure): _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
    header, sets = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(ctypes.byref(header), sets) == 0
    for index in range(6):
        sets[index] &= ~((1 << 21 | 1 << 24) if index < 3 else 0)  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
    assert libc.capset(ctypes.byref(header), sets) == 0

def refused(call, nth, error):
    "Return a call that fails at its nth time."
    count = 0
    def wrapper(*args, **kwargs):
        nonlocal count
        count += 1
        if count == nth: raise error
        return call(*args, **kwargs)
    return wrapper

def sweep(begin, module, name, error):
    call = getattr(module, name)
    begin()  # multiprocessing's and our own lasting descriptors
    for nth in range(1, 60):
        before, children_before = opened(), children_left()
        setattr(module, name, refused(call, nth, error))
        try:
            begin()
            is_refused = False
        except (OSError, RuntimeError) as raised:
            is_refused = True
            print(nth, type(raised).__name__, raised, flush=True)
        finally:
            setattr(module, name, call)
        assert opened() == before, (nth, before, opened())
        assert children_left() == children_before, nth
        if not is_refused and nth > 12:
            return
"""
#: All of these begin workers. Each takes seconds, so `make test` has one, the whole job, and `make test-long` two more.
_BEGIN = [
    "job",
    *(pytest.param(begin, marks=pytest.mark.long) for begin in ("tee", "by_spawn")),
    *(pytest.param(begin, marks=pytest.mark.soak) for begin in ("command", "by_fork", "plain")),
]
_REFUSED = "OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))"
_NO_DESCRIPTOR = "OSError(errno.EMFILE, os.strerror(errno.EMFILE))"


def run(tmp_path: Path, body: str) -> list[str]:
    """Run a program, and return its lines."""
    path = tmp_path / "program.py"
    path.write_text(f"{_HEAD}\nif __name__ == '__main__':\n    {body}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path, tmp_path], capture_output=True, text=True, timeout=120, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("begin", _BEGIN)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("os, 'pipe'", _NO_DESCRIPTOR),
        ("os, 'fork'", _REFUSED),
        pytest.param("os, 'posix_spawnp'", _REFUSED, marks=pytest.mark.long),
        pytest.param("threading.Thread, 'start'", 'RuntimeError("can\'t start new thread")', marks=pytest.mark.long),
    ],
)
def test_a_refusal_at_any_place_leaves_nothing(tmp_path: Path, begin: str, call: str, error: str) -> None:
    """No descriptor, no process; and the next start works."""
    run(tmp_path, f"sweep({begin}, {call}, {error})\n    {begin}()")


@pytest.mark.parametrize("begin", _BEGIN)
def test_a_limit_of_descriptors_leaves_nothing(tmp_path: Path, begin: str) -> None:
    """Under each limit in turn, from the first at which nothing can be opened to the first that is enough."""
    lines = run(tmp_path, f"limited(resource.RLIMIT_NOFILE, {begin}, range(len(opened()) + 1, 48))")
    assert lines.pop(0) == "begun"
    assert lines
    assert all("Too many open files" in line or "(ulimit -n)" in line for line in lines), lines


@pytest.mark.system  # which becomes another user
@pytest.mark.parametrize("begin", ["command", "by_fork", "plain", "job"])
def test_a_limit_of_processes_leaves_nothing(tmp_path: Path, begin: str) -> None:
    """Under each limit in turn: the guardian, a worker or the thread that watches them is refused."""
    lines = run(tmp_path, f"become_nobody(); limited(resource.RLIMIT_NPROC, {begin}, range(1, 10))")
    lines.remove("begun")
    assert lines
    assert all("temporarily unavailable" in line or "no thread can be started" in line for line in lines), lines


@pytest.mark.parametrize("closed", [(), (0,)])
def test_a_descriptor_is_never_duplicated_onto_itself(
    monkeypatch: pytest.MonkeyPatch, closed: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """It would stay close-on-exec in the child under a C library below 2.29; also where a standard one is closed."""
    seen: list[tuple[int, ...]] = []
    spawn = os.posix_spawnp

    def note(*args: Any, file_actions: list[tuple[int, ...]], **options: Any) -> int:
        seen.extend(file_actions)
        return spawn(*args, file_actions=file_actions, **options)

    monkeypatch.setattr(os, "posix_spawnp", note)
    saved = [os.dup(fd) for fd in closed]
    reading, writing = os.pipe()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for fd in closed:
        os.close(fd)
    pid = fork_exec.start_process(
        ["/bin/sh", "-c", f"echo told > /proc/self/fd/{writing}; ls /proc/self/fd"], os.environ, kept=[writing]
    )
    for fd, copy in zip(closed, saved, strict=True):
        os.dup2(copy, fd)
        os.close(copy)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before - len(closed)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"told\n"
    assert writing in {action[2] for action in seen if action[0] == os.POSIX_SPAWN_DUP2}
    assert not [action for action in seen if action[0] == os.POSIX_SPAWN_DUP2 and action[1] == action[2]]
    # Nothing but what was given: the copy is gone, and 3 or another is the directory that ls reads.
    assert len(capfd.readouterr().out.split()) == 5 - len(closed)


# --- limits of descriptors --------------------------------------------------------------------------------------------
def test_many_workers_under_a_low_limit_of_descriptors(launch: Launch) -> None:
    """The launcher raises its own limit where its workers need it, and they begin with the one they would have had."""
    program = ("sh", "-c", 'ulimit -Sn 256; exec "$0" -m elastic_run "$@"', sys.executable)
    job = launch("--nproc-per-node=96", "--no-python", "sh", "-c", "ulimit -Sn", program=program)
    assert job.wait_exit(deadline=60) == 0
    assert job.stdout.splitlines() == ["256"] * 96


@pytest.mark.parametrize(("workers", "limit"), [(96, 256), (16, 64)])
def test_so_many_streams_that_a_worker_cannot_begin_with_its_limit(
    launch: Launch, tmp_path: Path, workers: int, limit: int
) -> None:
    """With more pipes than the workers' limit allows they get it right after their start."""
    program = ("sh", "-c", f'ulimit -Sn {limit}; exec "$0" -m elastic_run "$@"', sys.executable)
    flags = (f"--nproc-per-node={workers}", "--tee=3", f"--log-dir={tmp_path / 'logs'}", "--no-python")
    script = f"until [ $(ulimit -Sn) = {limit} ]; do :; done; ulimit -Sn"
    job = launch(*flags, "sh", "-c", script, program=program)
    assert job.wait_exit(deadline=60) == 0
    assert [line.rpartition(":")[2] for line in job.stdout.splitlines()] == [str(limit)] * workers


@pytest.mark.parametrize(("workers", "limit", "needed"), [(96, 256, 696), (4, 22, 52)])
def test_more_workers_than_descriptors(launch: Launch, tmp_path: Path, workers: int, limit: int, needed: int) -> None:
    """Where the hard limit is too low nothing is started, and the message says what is missing."""
    program = ("sh", "-c", f'ulimit -n {limit}; exec "$0" -m elastic_run "$@"', sys.executable)
    flags = (f"--nproc-per-node={workers}", "--tee=3", f"--log-dir={tmp_path / 'logs'}", "--no-python")
    job = launch(*flags, "echo", "begun", program=program)
    assert job.wait_exit() == contract.EXIT_CANNOT_START
    message = f"{workers} workers need {needed} file descriptors here, but only {limit} are allowed (ulimit -n)"
    assert message in " ".join(job.stderr.split())
    assert "begun" not in job.stdout


@pytest.mark.parametrize("limits", ["-n 64", "-Sn 64"])
def test_an_inherited_descriptor_beyond_the_limit(launch: Launch, worker: Worker, limits: str) -> None:
    """A descriptor from before the limit was lowered keeps no worker from starting, and no worker has it."""
    lower = f'ulimit {limits}; exec "$0" -m elastic_run "$@"'
    program = (
        sys.executable,
        "-c",
        f"import os, sys; os.dup2(0, 200); os.execvp('sh', {['sh', '-c', lower]} + sys.argv[1:])",
    )
    job = launch(
        sys.executable, "--nproc-per-node=2", worker("say(os.path.exists('/proc/self/fd/200'))"), program=program
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "False\n" * 2
