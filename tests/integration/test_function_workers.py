"""Functions as workers: real programs that launch them, by every start method."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipapp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launch import Launched
from tests.support.processes import descendants_of, is_gone, kill_processes, switches_within, wait_gone
from tests.support.program import write_program
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Program = Callable[..., str]
    Host = Callable[..., Launched]

METHODS = ("spawn", "fork", "forkserver")
all_methods = pytest.mark.parametrize("method", METHODS)

#: What every program of these tests begins with. `launch` is one line, as in users' programs.
_HEAD = """
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
        return write_program(tmp_path / "host.py", _HEAD, functions, main)

    return write


@pytest.fixture
def host() -> Iterator[Host]:
    """Run a program with arguments; what still runs at the end is killed."""
    started: list[Launched] = []

    def start(path: Path, *arguments: str, **options: Any) -> Launched:  # noqa: ANN401 - of Launched
        started.append(Launched((sys.executable, str(path), *arguments), env=dict(os.environ), **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


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
        (stdout,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
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


@all_methods
def test_in_a_thread(method: str, program: Program, host: Host) -> None:
    """A launch in a thread installs no handlers, leaves nothing open, and is stopped by `elastic_launch.stop`."""
    path = program(
        """
        def work():
            return os.environ["RANK"]
        def wait():
            say("ready")
            time.sleep(1000)
        """,
        """
        from elastic_run.multiprocessing import SignalException
        launch(work)  # what is opened once and stays, such as the fork server's socket
        before = set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGTERM)
        thread = threading.Thread(target=lambda: say(launch(work)))
        thread.start(); thread.join()
        launcher = elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="local", start_method=sys.argv[1]), wait)
        def run():
            try:
                launcher()
            except SignalException as error:
                say(error)
        thread = threading.Thread(target=run)
        thread.start()
        sys.stdin.readline()
        launcher.stop()
        thread.join()
        assert before == (set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGTERM))
        """,
    )
    job = host(path, method, stdin=subprocess.PIPE)
    job.wait_lines("^ready", count=2)
    assert job.process.stdin is not None
    job.process.stdin.write(b"\n")
    job.process.stdin.close()
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.splitlines()[0] == "{0: '0', 1: '1'}"
    assert "SIGTERM" in job.stdout.splitlines()[-1]


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


@all_methods
def test_many_launches_leave_nothing(method: str, program: Program, host: Host) -> None:
    """Launch after launch, failed or not: no process, zombie, thread or descriptor stays in the program."""
    path = program(
        """
        from elastic_run import spawn

        def work(index=0): return index

        def fail(): sys.exit(3)

        def held():
            children = {line for task in os.listdir("/proc/self/task")
                        for line in open(f"/proc/self/task/{task}/children").read().split()}
            return children, threading.active_count(), len(os.listdir("/proc/self/fd"))

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
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr


@all_methods
def test_shared_things_of_multiprocessing(method: str, program: Program, host: Host) -> None:
    """A queue and an event of the same start method's context may be arguments, and work."""
    path = program(
        """
        def work(queue, event):
            queue.put(os.environ["RANK"])
            assert event.wait(30)
        """,
        """
        context = multiprocessing.get_context(sys.argv[1])
        queue, event = context.Queue(), context.Event()
        def let_go():
            say(*sorted(queue.get() for _ in range(2)))
            event.set()
        thread = threading.Thread(target=let_go)
        thread.start()
        launch(work, queue, event)
        thread.join()
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "0 1\n"


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


def test_fork_keeps_the_program_as_it_is(program: Program, host: Host) -> None:
    """A forked worker has the program's memory, may be a closure, prints nothing twice, runs no exit function of it."""
    path = program(
        "",
        """
        import atexit
        atexit.register(lambda: say("exit function of", os.getpid()))
        print("buffered")
        data = [40]
        def work():
            data[0] += 2
            atexit.register(lambda: say("exit function of a worker"))
            return data[0], signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert launch(work) == {0: (42, True), 1: (42, True)}
        assert data == [40]
        say("main", os.getpid())
        """,
    )
    job = host(path, "fork")
    assert job.wait_exit() == 0, job.stderr
    lines = job.stdout.splitlines()
    assert lines.count("buffered") == 1
    assert lines.count("exit function of a worker") == 2
    (main,) = [line.split()[1] for line in lines if line.startswith("main")]
    assert [line for line in lines if re.match(r"exit function of \d", line)] == [f"exit function of {main}"]


def test_fork_gives_up_the_launchers_descriptors(program: Program, host: Host) -> None:
    """A forked worker holds no pipe, socket or epoll of the launcher's, and the user's own files stay open."""
    path = program(
        "",
        """
        own = os.open("/etc/passwd", os.O_RDONLY)
        def look():
            found = set()
            for fd in os.listdir("/proc/self/fd"):
                try: found.add(os.readlink(f"/proc/self/fd/{fd}"))
                except OSError: pass
            return found
        before = look()
        def work():
            return sorted(look() - before), os.fstat(own).st_size > 0
        for extra, is_open in launch(work).values():
            # Its reply, its parent's sign of life, its captured stderr; what it looks at.
            assert sum(name.startswith("pipe:") for name in extra) <= 3, extra
            assert not [name for name in extra if name.startswith(("socket:", "anon_inode:"))], extra
            assert is_open
        """,
    )
    job = host(path, "fork")
    assert job.wait_exit() == 0, job.stderr


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        ("launch(lambda: 1)", "PicklingError: a lambda can't be found by a process started by 'spawn': define"),
        (
            "launch((lambda: work.__class__ and inner())())",
            "PicklingError: make.<locals>.inner, which is defined inside",
        ),
        (
            "launch(work, open(__file__))",
            "TypeError: argument 0 of local rank 0 (of type _io.TextIOWrapper) can't be sent",
        ),
        (
            "launch(work, 1, threading.Lock())",
            "TypeError: argument 1 of local rank 0 (of type _thread.lock) can't be sent",
        ),
        ("launch(None)", "AssertionError: WorkerSpec needs an entrypoint"),
        ("launch(7)", "TypeError: 7 (of type builtins.int) is neither a function nor a command"),
        ("launch(work, event_log_handler='flight')", "ValueError: unknown event handler 'flight'; known: console"),
        ("launch(work, count=0)", "AssertionError: local_world_size must be at least 1, got 0"),
        ("launch(work, method='thread')", "ValueError: start_method 'thread' is none of spawn, fork, forkserver"),
    ],
)
def test_bad_input(main: str, expected: str, program: Program, host: Host) -> None:
    """What can't be launched is refused in one line that names it, before a process was started."""
    path = program(
        """
        def work(*args): pass
        def make():
            def inner(): pass
            return inner
        inner = make
        """,
        f"""
        def started(event, arguments):
            if event in ("os.posix_spawn", "os.fork"): say("started", event)
        sys.addaudithook(started)
        {main}
        """,
    )
    job = host(path, "spawn")
    assert job.wait_exit() == 1
    assert expected in job.stderr.splitlines()[-1]
    assert not job.stdout


def test_a_defect_before_the_start_ends_at_once(program: Program, host: Host) -> None:
    """An agent of one's own whose event handler isn't there raises; nothing was started, nothing is waited for."""
    path = program(
        "def work(): pass",
        """
        from elastic_run.launcher import make_agent, make_surroundings

        config = LaunchConfig(1, 1, 2, rdzv_backend="local")
        around = make_surroundings(config, work, [], is_whole_process=False)
        around.group.spec.event_log_handler = "flight"
        started = time.monotonic()
        try:
            make_agent(config, around).run()
        except ValueError as error:
            say(time.monotonic() - started < 15, error)
        """,
    )
    job = host(path, "spawn")
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.startswith("True unknown event handler 'flight'")
    assert not job.stderr


@all_methods
def test_a_value_that_cannot_be_pickled(method: str, program: Program, host: Host) -> None:
    """A return value that can't be pickled is a failure that names the rank and the type."""
    path = program(
        "def work(): return (each for each in ()) if os.environ['RANK'] == '1' else None",
        """
        try:
            launch(work)
        except ChildFailedError as error:
            say(error.get_first_failure()[1].message["message"])
        """,
    )
    job = host(path, method)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.startswith(
        "PicklingError: rank 1 returned a value of type builtins.generator that can't be pickled"
    )


def test_a_program_without_a_main_guard(tmp_path: Path, host: Host) -> None:
    """A program that launches at its top level is told to guard the launch, and starts no chain of processes."""
    path = tmp_path / "host.py"
    path.write_text(f"{_HEAD}\ndef work(): return 1\nlaunch(work)\n")
    job = host(path, "spawn")
    assert job.wait_exit() == 1
    assert "put the launch below `if __name__ == '__main__':`" in job.stderr


@pytest.mark.parametrize(("method", "code"), [("spawn", 1), ("fork", 0)])
def test_a_function_of_an_interactive_session(method: str, code: int, host: Host) -> None:
    """A function typed into a session is refused with advice by spawn, and runs by fork, as in a notebook."""
    text = _HEAD.replace("sys.argv[1]", repr(method)) + "\ndef work(): return 1\nsay(launch(work))\n"
    job = host(Path("-c"), text)
    assert job.wait_exit() == code
    assert ("in a notebook: of a file beside it" in job.stderr) == (method == "spawn")
    assert job.stdout == ("{0: 1, 1: 1}\n" if method == "fork" else "")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("words", [("-m", "package"), ("program.pyz",)])
def test_functions_of_main_files(words: tuple[str, ...], method: str, tmp_path: Path, host: Host) -> None:
    """A function of a __main__.py, which no other process imports, is refused; one of a module beside it runs."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("def work(): return __name__.rpartition('.')[2]\n")
    (package / "__main__.py").write_text(
        _HEAD.replace("sys.argv[1]", repr(method)) + "if __package__: from package.beside import work\n"
        "else: from beside import work\n"
        "def own(): pass\n"
        "if __name__ == '__main__':\n    print(launch(work))\n    launch(own)\n"
    )
    zipapp.create_archive(package, tmp_path / "program.pyz")
    job = host(Path(words[0]), *words[1:], cwd=tmp_path)
    assert job.wait_exit() == 1
    assert job.stdout == "{0: 'beside', 1: 'beside'}\n"
    expected = (
        f"PicklingError: own, which is defined in a __main__.py, can't be found by a process started by '{method}'"
    )
    assert expected in job.stderr.splitlines()[-1]


def test_fork_after_cuda_was_initialised(program: Program, host: Host) -> None:
    """Forking a program that has initialised CUDA is refused before anything runs."""
    path = program(
        "def work(): pass",
        """
        import types
        sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: True)
        launch(work)
        """,
    )
    job = host(path, "fork")
    assert job.wait_exit() == 1
    assert "RuntimeError: CUDA is initialised in this process already" in job.stderr.splitlines()[-1]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_tensors_and_a_process_group(method: str, program: Program, host: Host) -> None:
    """Tensors are arguments and values as they are, and workers meet by the environment that they get."""
    path = program(
        """
        import torch
        import torch.distributed
        def work(tensor):
            torch.distributed.init_process_group("gloo")
            tensor = tensor + int(os.environ["RANK"])
            torch.distributed.all_reduce(tensor)
            torch.distributed.destroy_process_group()
            return tensor
        """,
        """
        # Small: torch's thread pool, which a large one would start, does not survive a fork.
        values = launch(work, torch.ones(3))
        assert all(value.tolist() == [3.0, 3.0, 3.0] for value in values.values()), values
        """,
    )
    job = host(path, method)
    assert job.wait_exit(deadline=90) == 0, job.stderr


def test_neither_torch_nor_multiprocessing_for_nothing(program: Program, host: Host) -> None:
    """A function launch imports torch neither in the program nor in a worker."""
    path = program(
        "def work(): return 'torch' in sys.modules",
        """
        assert launch(work) == {0: False, 1: False}
        assert 'torch' not in sys.modules
        """,
    )
    job = host(path, "spawn")
    assert job.wait_exit() == 0, job.stderr


def test_descendants_are_known(program: Program, host: Host) -> None:
    """A worker's own children, by multiprocessing, work as anywhere and end with it; the program's tracker stays."""
    path = program(
        """
        def square(number): return number * number
        def work():
            with multiprocessing.Pool(2) as pool:
                return pool.map(square, range(4))
        """,
        """
        assert launch(work) == {0: [0, 1, 4, 9], 1: [0, 1, 4, 9]}
        say("tracker", multiprocessing.resource_tracker._resource_tracker._pid)
        sys.stdin.read()
        """,
    )
    job = host(path, "spawn", stdin=subprocess.PIPE)
    tracker = int(job.wait_line(r"tracker (\d+)")[1])
    wait_until(lambda: descendants_of(job.pid) == [tracker], deadline=5)


@all_methods
def test_several_nodes(method: str, program: Program, host: Host) -> None:
    """Two programs form one job: ranks go on over both, and each gets the values of its own workers."""
    path = program(
        "def work(): return os.environ['RANK'], os.environ['GROUP_RANK'], os.environ['WORLD_SIZE']",
        """
        config = LaunchConfig(2, 2, 2, run_id="two", rdzv_backend="c10d", rdzv_endpoint=sys.argv[2],
                              start_method=sys.argv[1], max_restarts=0)
        for rank, value in elastic_launch(config, work)().items():
            say(rank, *value)
        """,
    )
    endpoint = f"127.0.0.1:{free_port()}"
    jobs = [host(path, method, endpoint) for _ in range(2)]
    assert [job.wait_exit() for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    lines = sorted("".join(job.stdout for job in jobs).splitlines())
    assert lines == ["0 0 0 4", "1 1 0 4", "2 2 1 4", "3 3 1 4"]


def test_a_failure_on_another_node(program: Program, host: Host) -> None:
    """A function that fails on one node stops those of the other, where the call raises with the same cause."""
    path = program(
        """
        def work():
            if os.environ["RANK"] == "1":
                raise ValueError("node one")
            time.sleep(1000)
        """,
        """
        config = LaunchConfig(2, 2, 1, run_id="two", rdzv_backend="c10d", rdzv_endpoint=sys.argv[2], max_restarts=0)
        try:
            elastic_launch(config, work)()
        except ChildFailedError as error:
            say(error.get_first_failure()[0], error.get_first_failure()[1].exitcode)
        """,
    )
    endpoint = f"127.0.0.1:{free_port()}"
    jobs = [host(path, "spawn", endpoint) for _ in range(2)]
    assert [job.wait_exit() for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    assert [job.stdout for job in jobs] == ["1 1\n"] * 2
