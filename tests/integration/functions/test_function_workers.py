"""Functions as workers: real programs that launch them, by every start method."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import is_gone, kill_processes, switches_within, wait_gone
from tests.support.programs import all_methods
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Program = Callable[..., str]
    Host = Callable[..., Launched]


@all_methods
def test_values_by_rank(method: str, program: Program, host: Host) -> None:
    """Every worker has torchrun's environment and a session of its own; what it returns comes back by global rank."""
    path = program(
        """
        def work(base, text):
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "ROLE_NAME")
            assert all(os.environ["MASTER_" + name] for name in ("ADDR", "PORT"))
            return {"env": [os.environ[name] for name in names], "sum": base + int(os.environ["RANK"]), "text": text,
                    "leads": os.getsid(0) == os.getpid(), "parent": multiprocessing.parent_process().is_alive()}
        """,
        """
        values = launch(work, 40, "${local_rank}", run_id="job", role="trainer")
        assert list(values) == [0, 1], values
        for rank, value in values.items():
            env = [str(rank), str(rank), "2", "job", "trainer"]
            expected = {"env": env, "sum": 40 + rank, "text": str(rank), "leads": True, "parent": True}
            assert value == expected, (rank, value)
        print("fine")
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "fine\n"


@all_methods
def test_a_main_file_that_sets_variables_leaves_the_workers_environment(
    method: str, program: Program, host: Host
) -> None:
    """A program that sets MASTER_PORT at its top, as for `torch.multiprocessing.spawn`, gives no worker a wrong one."""
    path = program(
        """
        os.environ.update(RANK="7", MASTER_PORT="12355", OF_THE_PROGRAM="kept")
        def work():
            return os.environ["RANK"], os.environ["MASTER_PORT"] != "12355", os.environ["OF_THE_PROGRAM"]
        """,
        """
        assert launch(work) == {0: ("0", True, "kept"), 1: ("1", True, "kept")}
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr


@all_methods
def test_workers_do_not_get_the_jobs_secret(method: str, program: Program, host: Host) -> None:
    """The secret that the nodes of a job share is not in a worker's environment, which it may print."""
    path = program(
        "def work(): return os.environ.get('ELASTIC_RUN_RDZV_TOKEN')",
        """
        os.environ["ELASTIC_RUN_RDZV_TOKEN"] = "a secret"
        assert launch(work) == {0: None, 1: None}
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr


@pytest.mark.long
@all_methods
def test_large_results_and_arguments(method: str, program: Program, host: Host) -> None:
    """Arguments of 20 MB and results of 100 MB of each worker go through, side by side."""
    path = program(
        "def work(data): return data * 5",
        """
        values = launch(work, b"x" * 20_000_000)
        assert [len(value) for value in values.values()] == [100_000_000] * 2
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr


@all_methods
def test_a_result_comes_through_though_a_child_keeps_the_pipe(method: str, program: Program, host: Host) -> None:
    """A process that a worker leaves behind holds up neither its result nor the program, and lives on."""
    path = program(
        """
        def work():
            pid = os.fork()
            if not pid:
                time.sleep(1000)
            return pid
        """,
        """
        values = launch(work)
        say(*values.values())
        """,
    )
    job = host(path, method)
    pids = [int(pid) for pid in job.wait_line(r"^(\d+) (\d+)$").groups()]
    assert job.process.wait(DEADLINE) == 0, job.stderr
    assert not any(map(is_gone, pids))
    kill_processes(pids)
    assert job.wait_exit() == 0, job.stderr


@all_methods
def test_an_exception_comes_back_with_its_traceback(method: str, program: Program, host: Host) -> None:
    """A worker's exception is a ChildFailedError whose failure has torch's message; its traceback is on stderr."""
    path = program(
        """
        def inner(): raise ValueError("no such thing")
        def work():
            if os.environ["RANK"] == "1":
                inner()
            time.sleep(1000)
        """,
        """
        try:
            launch(work)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            assert (rank, failure.local_rank, failure.exitcode, list(error.failures)) == (1, 1, 1, [1]), error
            assert failure.message["message"] == "ValueError: no such thing", failure
            assert "in inner" in failure.message["extraInfo"]["py_callstack"]
            assert failure.message["extraInfo"]["timestamp"].isdigit()
            assert error.name == "work" and "ValueError: no such thing" in str(error)
            assert os.path.exists(failure.error_file)
            print("fine")
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "fine\n"
    frames = re.findall(r"in (\w+)$", job.stderr, re.MULTILINE)
    assert frames == ["work", "inner"], job.stderr


@all_methods
def test_restarts(method: str, program: Program, host: Host) -> None:
    """A failed round is started again with all its workers, and the result is the last round's."""
    path = program(
        """
        def work():
            attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
            if attempt < 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if attempt < 2:
                time.sleep(1000)
            return attempt
        """,
        "say(launch(work, restarts=3))",
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "{0: 2, 1: 2}\n"


@all_methods
def test_exit_without_return(method: str, program: Program, host: Host) -> None:
    """sys.exit(0) and os._exit(0) in a worker count as success without a value, another exit code as a failure."""
    path = program(
        """
        def work(): (os._exit if os.environ["RANK"] == "1" else sys.exit)(0)
        def fail(): sys.exit(7)
        """,
        """
        say(launch(work))
        try:
            launch(fail, count=1)
        except ChildFailedError as error:
            say(error.get_first_failure()[1].exitcode)
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "{0: None, 1: None}\n7\n"


@all_methods
def test_logs(method: str, program: Program, host: Host, tmp_path: Path) -> None:
    """Redirects and tee hold for functions as for commands: files, prefixes, and no line of a worker lost."""
    path = program(
        """
        def work():
            print("out", os.environ["RANK"])
            print("err", os.environ["RANK"], file=sys.stderr)
        """,
        f"launch(work, logs_specs=DefaultLogsSpecs({str(tmp_path / 'logs')!r}, redirects=Std.ERR, tee=Std.OUT))",
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["[default_role0]:out 0", "[default_role1]:out 1"]
    assert not job.stderr
    for rank in "01":
        (stdout,) = (tmp_path / "logs").glob(f"*_*/attempt_0/{rank}/stdout.log")
        assert stdout.read_text() == f"out {rank}\n"
        assert stdout.with_name("stderr.log").read_text() == f"err {rank}\n"


@all_methods
def test_nothing_of_a_function_outlives_its_program(method: str, program: Program, host: Host) -> None:
    """When the launching program is killed, its workers and what they started are gone within two seconds."""
    path = program(
        """
        def work():
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            say("ready", os.getpid(), child.pid)
            time.sleep(1000)
        """,
        "launch(work)",
    )
    job = host(path, method)
    pids = [int(pid) for match in job.wait_lines(r"ready (\d+) (\d+)", count=2) for pid in match.groups()]
    os.kill(job.pid, signal.SIGKILL)
    end = time.monotonic() + 2.0
    for pid in pids:
        wait_gone(pid, deadline=max(0.1, end - time.monotonic()))


@all_methods
def test_a_signal_stops_functions(method: str, program: Program, host: Host) -> None:
    """SIGTERM reaches the workers, which answer it in their own way, and the launch raises SignalException."""
    path = program(
        """
        def work():
            def answer(number, frame):
                say("answered", os.environ["RANK"])
                sys.exit(0)
            if os.environ["RANK"] == "0":
                signal.signal(signal.SIGTERM, answer)
            say("ready")
            while True:
                signal.pause()
        """,
        """
        from elastic_run.multiprocessing import SignalException
        try:
            launch(work)
        except SignalException as error:
            say("stopped by", error.sigval.name)
        """,
    )
    job = host(path, method)
    job.wait_lines("ready", count=2)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines()[2:] == ["answered 0", "stopped by SIGTERM"]


def test_fork_in_a_thread_of_an_executor(program: Program, host: Host) -> None:
    """A program on asyncio launches from `asyncio.to_thread`; its workers don't wait for the program's threads."""
    path = program(
        """
        import asyncio

        def work():
            return asyncio.run(asyncio.to_thread(int, os.environ["RANK"]))
        """,
        "print(asyncio.run(asyncio.to_thread(launch, work)))",
    )
    job = host(path, "fork")
    assert job.wait_exit() == 0, job.stderr
    assert (job.stdout, job.stderr) == ("{0: 0, 1: 1}\n", "")


@pytest.mark.long
@all_methods
def test_many_launches_leave_nothing(
    method: str, program: Program, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch after launch, failed or not: no process, zombie, thread or descriptor stays, and no directory."""
    path = program(
        """
        import contextlib, tempfile
        from elastic_run import spawn

        def work(index=0): return index

        def fail(): sys.exit(3)

        def held():
            children = set()
            for task in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):  # a thread that ends is listed a moment longer than it is there
                    children.update(open(f"/proc/self/task/{task}/children").read().split())
            logs = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("elastic-run_")]
            return children, threading.active_count(), len(os.listdir("/proc/self/fd")), logs

        def launch_all():
            launch(work, count=1)
            spawn(work, start_method=sys.argv[1])
            try:
                launch(fail, count=1)
            except ChildFailedError:
                pass
        """,
        """
        launch_all()  # multiprocessing's fork server and resource tracker stay
        before = held()
        for _ in range(8):
            launch_all()
        assert held() == before, (before, held())
        assert not before[-1], before
        """,
    )
    # A directory of its own, whose path is short enough for the socket of multiprocessing's fork server.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("TMPDIR", directory)
        job = host(path, method)
        assert job.wait_exit() == 0, job.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_shared_memory_outlives_the_worker_that_made_it(method: str, program: Program, host: Host) -> None:
    """A function may return the name of shared memory: it is the program's, and the program's tracker keeps it."""
    path = program(
        """
        from multiprocessing.shared_memory import SharedMemory
        def work():
            memory = SharedMemory(create=True, size=8)
            memory.buf[0] = 65 + int(os.environ["RANK"])
            memory.close()
            return memory.name
        """,
        """
        for name in launch(work).values():
            memory = SharedMemory(name)
            say(chr(memory.buf[0]))
            memory.close()
            memory.unlink()
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "A\nB\n"
    assert "leaked" not in job.stderr


def test_idle_agent_uses_no_cpu(program: Program, host: Host) -> None:
    """While its functions run, the launching program uses no processor time and wakes up for nothing."""
    path = program(
        "def work(): say('ready'); time.sleep(1000)",
        "launch(work)",
    )
    job = host(path, "spawn")
    job.wait_lines("ready", count=2)
    wait_until(lambda: not switches_within(job.pid, 1.5), deadline=20, what="an agent at rest")
