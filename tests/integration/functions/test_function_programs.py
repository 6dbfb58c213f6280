"""Programs that launch functions: what a worker has of the program, and what kind of program it may be."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import HEAD, all_methods
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Program = Callable[..., str]
    Host = Callable[..., Launched]


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
            # Its reply, its parent's sign of life, its captured stdout and stderr, its stacks.
            assert sum(name.startswith("pipe:") for name in extra) <= 5, extra
            assert not [name for name in extra if name.startswith(("socket:", "anon_inode:"))], extra
            assert is_open
        """,
    )
    job = host(path, "fork")
    assert job.wait_exit() == 0, job.stderr


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        ("launch(lambda: 1)", "PicklingError: the function (of type builtins.function) can't be sent to a worker: "),
        ("launch((lambda: work.__class__ and inner())())", ": define the function at the top level of a module"),
        (
            "launch(work, open(__file__))",
            "TypeError: argument 0 of local rank 0 (of type _io.TextIOWrapper) can't be sent to a worker: cannot",
        ),
        (
            "launch(work, 1, [threading.Lock()], method='forkserver')",
            "TypeError: argument 1 of local rank 0 (of type builtins.list) can't be sent to a worker: cannot pickle",
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


@pytest.mark.parametrize(
    ("top_level", "check"),
    [
        ("launch(work, restarts=3)", "refuse_unguarded_main"),
        ("multiprocessing.get_context('spawn').Process(target=print).start()", "_check_not_importing_main"),
    ],
    ids=["launch", "process"],
)
def test_a_program_without_a_main_guard(top_level: str, check: str, tmp_path: Path, host: Host) -> None:
    """A program that starts processes at its top level is told to guard that, once: it is not started again."""
    path = tmp_path / "host.py"
    path.write_text(f"{HEAD}\ndef work(): return 1\n{top_level}\nif __name__ == '__main__': launch(work, restarts=3)\n")
    job = host(path, "spawn")
    assert job.wait_exit() == 1
    workers, _, error = job.stderr.partition("ChildFailedError:")
    assert "if __name__ == '__main__':" in workers
    # Of each worker, and of the process that the program starts itself; with three restarts there are four and more.
    assert 1 <= workers.count(f", in {check}\n") <= 3
    assert error


@pytest.mark.parametrize("work", ["def work(): return 1", "work = lambda: 1"], ids=["function", "lambda"])
@pytest.mark.parametrize(("method", "code"), [("spawn", 0), ("fork", 0), ("forkserver", 1)])
def test_a_function_of_an_interactive_session(method: str, code: int, work: str, host: Host) -> None:
    """A function typed into a session runs by fork, also by default; forkserver refuses it with advice."""
    text = HEAD.replace("sys.argv[1]", repr(method)) + f"\n{work}\nsay(launch(work))\n"
    job = host(Path("-c"), text)
    assert job.wait_exit() == code
    assert ("in a notebook: of a file beside it" in job.stderr) == bool(code)
    assert job.stdout == ("" if code else "{0: 1, 1: 1}\n")


def test_a_program_that_comes_through_stdin_is_forked(tmp_path: Path) -> None:
    """A notebook's kernel has no file, as `python -`: the default start method forks its functions."""
    program = (
        "from elastic_run import LaunchConfig, elastic_launch\n"
        "def double(value): return value * 2\n"
        "print(elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend='local'), double)(21))\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{0: 42, 1: 42}\n", "")


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
    message = "RuntimeError: this process has initialised CUDA, and forked workers can't use CUDA then"
    assert message in job.stderr.splitlines()[-1]


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.soak), "fork"])
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
