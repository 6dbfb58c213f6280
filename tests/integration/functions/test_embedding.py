"""Programs that embed Python, or were frozen: `sys.executable` is the program, which must not be executed as Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.multiprocessing import fork_exec
from tests.support.launch import Launched, clean_environment
from tests.support.processes import wait_gone
from tests.support.programs import write_program
from tests.support.system import require_marker, starter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[..., Launched]

_HEAD = """
import os, sys
sys.frozen = bool(os.environ.get("IS_FROZEN"))
import multiprocessing.spawn
from elastic_run import LaunchConfig, elastic_launch, spawn

def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def launch(what, *args, method="spawn"):
    return elastic_launch(LaunchConfig(1, 1, 2, rdzv_backend="local", start_method=method), what)(*args)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingProgram:
    """Build the program once."""
    return EmbeddingProgram(tmp_path_factory.mktemp("embedding"))


@pytest.fixture
def run(built: EmbeddingProgram, tmp_path: Path) -> Iterator[Run]:
    """Run Python code in the program; what still runs at the end is killed."""
    started: list[Launched] = []

    def start(functions: str, main: str, **env: str) -> Launched:
        built.forget_starts()
        script = write_program(tmp_path / "script.py", _HEAD, functions, main)
        job = Launched((str(built.path),), env=clean_environment({**built.environment(script), **env}))
        started.append(job)
        return job

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("is_frozen", ["", "1"])
def test_what_it_launched_ends_with_it_and_it_starts_once(run: Run, built: EmbeddingProgram, is_frozen: str) -> None:
    """A killed program takes the commands that it launched with it, and was never executed a second time."""
    job = run("", "launch('sh', '-c', 'echo $$$$ runs; exec sleep 1000')", IS_FROZEN=is_frozen)
    pids = [int(line.group(1)) for line in job.wait_lines(r"(\d+) runs", count=2)]
    os.kill(job.pid, signal.SIGKILL)
    for pid in pids:
        wait_gone(pid)
    assert built.starts == 1


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_functions_of_an_embedding_program(run: Run, built: EmbeddingProgram, method: str) -> None:
    """The interpreter of the same installation runs them, by every start method; `spawn` does the same."""
    job = run(
        """
        def work(index=0):
            return os.path.basename(sys.executable).startswith("python") or os.getppid()
        """,
        f"""
        say(launch(work, method={method!r}))
        spawn(work, nprocs=2, start_method={method!r})
        """,
    )
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == ("{0: True, 1: True}\n" if method != "fork" else f"{{0: {job.pid}, 1: {job.pid}}}\n")
    assert built.starts == 1


def test_functions_of_a_frozen_program(run: Run, built: EmbeddingProgram) -> None:
    """A frozen program has no interpreter: spawn is refused by a message that names the way, and nothing is started."""
    job = run("def work(): return os.getpid()", "launch(work)", IS_FROZEN="1")
    assert job.wait_exit() != 0
    assert "needs a Python interpreter" in job.stderr
    assert built.starts == 1


def test_the_command_line_in_an_embedding_program(run: Run, built: EmbeddingProgram, tmp_path: Path) -> None:
    """`elastic_run.run.main` starts the script with the interpreter of the same installation."""
    script = tmp_path / "train.py"
    script.write_text("import os, sys; os.write(1, os.path.basename(sys.executable).encode() + b'\\n')")
    job = run("", f"from elastic_run.run import main; main(['--nproc-per-node=2', {str(script)!r}])")
    assert job.wait_exit() == 0, job.stderr
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert job.stdout == f"{version}\n" * 2
    assert built.starts == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("python", True), ("python3", True), ("python3.11", True), ("python3.13t", True), ("python3-dbg", True)),
        *(("pypy3.10", True), ("uwsgi", False), ("simulator", False), ("pythonista", False), ("", False)),
    ],
)
def test_interpreters_are_known_by_their_name(tmp_path: Path, name: str, *, expected: bool) -> None:
    """Only what is called as an interpreter is executed as one."""
    path = tmp_path / (name or "none")
    path.touch(mode=0o755)
    assert fork_exec.is_interpreter(str(path)) is expected


_SOURCE = Path(__file__).parents[2] / "data" / "embedding.c"


@starter
class EmbeddingProgram:
    """The built program, and how it is started.

    Args:
        directory: For the program and its notes.
        name: Its name.
    """

    def __init__(self, directory: Path, name: str = "simulator") -> None:
        require_marker("a C compiler")
        self.path = directory / name
        self._starts = directory / "starts"
        libraries = [str(sysconfig.get_config_var(name)) for name in ("LIBDIR", "LIBPL")]
        paths = [flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
        version = f"{sys.version_info[0]}.{sys.version_info[1]}{getattr(sys, 'abiflags', '')}"
        rest = [f"-lpython{version}", "-ldl", "-lm", "-lpthread", "-lutil", "-Wl,-export-dynamic"]
        flags = [f"-I{sysconfig.get_paths()['include']}", *paths, *rest]
        subprocess.run(["cc", str(_SOURCE), "-o", str(self.path), *flags], check=True)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return self._starts.stat().st_size

    def forget_starts(self) -> None:
        """Begin to count anew."""
        self._starts.write_bytes(b"")

    def environment(self, script: str) -> dict[str, str]:
        """Return what its environment needs."""
        return {
            "EMBEDDING_STARTS": str(self._starts),
            "EMBEDDING_HOME": sys.base_prefix,
            "EMBEDDING_PROGRAM": script,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
