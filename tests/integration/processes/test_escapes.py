"""Descendants that leave a worker's session, environment and parent: found as the launcher's orphans."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import is_gone, kill_processes, wait_gone
from tests.support.programs import write_plugin, write_program
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: Begins a process without the environment in a session of its own, which says its pid in a file.
_ESCAPE = """
escape = "{environment} setsid sh -c 'echo $$ > {path}.new; mv {path}.new {path}; exec sleep 1000'"
if {is_orphan}:
    subprocess.run(["sh", "-c", f"({{escape}} &)"])
else:
    child = subprocess.Popen(["sh", "-c", f"exec {{escape}}"])
while not os.path.exists({path!r}): time.sleep(0.005)
"""
_LIMIT = 2.0


class Escape:
    """A process that leaves its worker.

    Args:
        path: The file in which it says its pid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def program(self, rest: str, *, is_orphan: bool = True, environment: str = "env -i") -> str:
        """Return a worker that begins it, and goes on."""
        return _ESCAPE.format(path=str(self.path), environment=environment, is_orphan=is_orphan) + rest

    @property
    def pid(self) -> int:
        """Its pid, once it is there."""
        wait_until(self.path.exists, what="the escaped process")
        return int(self.path.read_text())


@pytest.fixture
def escape(tmp_path: Path) -> Iterator[Escape]:
    """Make a process that leaves its worker; it is killed at the end."""
    made = Escape(tmp_path / "escaped")
    yield made
    if made.path.exists():
        kill_processes([made.pid])


def test_after_a_failure(launch: Launch, worker: Worker, escape: Escape) -> None:
    """It ends with the job, and holds nobody's pipe."""
    path = worker(escape.program("sys.exit(7)"))
    job = launch("--standalone", "--shutdown-timeout=1", path)
    assert job.wait_exit() == 7, job.stderr
    assert is_gone(escape.pid)


def test_after_a_success_it_is_named(launch: Launch, worker: Worker, escape: Escape) -> None:
    """It is a background process like any other: it lives on, and a line names it."""
    job = launch("--standalone", worker(escape.program("")))
    assert job.process.wait(60) == 0
    job.wait_line(rf"1 background process of the workers keeps running: pid {escape.pid} \(sleep 1000\)")
    assert not is_gone(escape.pid)
    kill_processes([escape.pid])
    job.wait_exit()


def test_after_the_launcher_was_killed(launch: Launch, worker: Worker, escape: Escape) -> None:
    """The guardian knows it as a child of the worker."""
    job = launch("--standalone", worker(escape.program("say('ready')\nsignal.pause()", is_orphan=False)))
    job.wait_line("ready")
    job.send(signal.SIGKILL)
    wait_gone(escape.pid, deadline=_LIMIT)
    job.wait_exit()


def test_inside_a_program(worker: Worker, escape: Escape, tmp_path: Path) -> None:
    """A program around the job is no subreaper, and its own children are left alone; the environment is known."""
    path = worker(escape.program("sys.exit(7)", environment=""))
    host = write_program(
        tmp_path / "host.py",
        "import subprocess, sys\n"
        "from elastic_run.launcher import LaunchConfig, elastic_launch\n"
        "from elastic_run.multiprocessing.errors import ChildFailedError\n",
        "",
        f"""
own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
config = LaunchConfig(1, 1, 1, rdzv_backend="local", max_restarts=0)
try: elastic_launch(config, sys.executable)({str(path)!r})
except ChildFailedError as error: print("failed")
print("own", own.poll())
own.kill()
print("own", own.wait())
""",
    )
    import subprocess

    done = subprocess.run([sys.executable, host], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["failed", "own", "None", "own", "-9"], done
    assert is_gone(escape.pid)


def test_its_end_leaves_no_zombie(launch: Launch, worker: Worker, escape: Escape) -> None:
    """An orphan that ends while the job runs is collected, though it has become the launcher's child."""
    job = launch("--standalone", worker(escape.program("say('ready')\nsignal.pause()")))
    job.wait_line("ready")
    wait_until(lambda: f"\nPPid:\t{job.pid}\n" in Path(f"/proc/{escape.pid}/status").read_text(encoding="ascii"))
    os.kill(escape.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{escape.pid}").exists(), what="no zombie")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143


_PLUGIN = """
import subprocess, threading
from elastic_run.multiprocessing import DefaultLogsSpecs

def run(word, codes):
    for _ in range(60):
        codes.append(subprocess.run(["sh", "-c", "exit 3"], start_new_session=word == "new").returncode)

def run_all(gate):
    codes = []
    threads = [threading.Thread(target=run, args=(word, codes)) for word in ("new", "new", "own", "own")]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    open(gate, "w").write(f"{len(codes)} {set(codes)}")

class Busy(DefaultLogsSpecs):
    def reify(self, envs):
        import os
        threading.Thread(target=run_all, args=(os.environ["GATE"],), daemon=True).start()
        return super().reify(envs)
"""


def test_children_of_a_plugin_are_the_plugins(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A plug-in's threads get the exit codes of their processes, in any session, and the launcher goes on."""
    write_plugin(tmp_path / "site", "busy", "torchrun.logs_specs", {"busy": "busy:Busy"}, _PLUGIN)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = worker(f"say(open({str(gate)!r}).read())")
    env = {"PYTHONPATH": str(tmp_path / "site"), "GATE": str(gate)}
    job = launch("--standalone", "--logs-specs=busy", path, env=env)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout.split() == ["240", "{3}"]


_SIGNALLING_PLUGIN = """
import signal
from elastic_run.multiprocessing import DefaultLogsSpecs

class Masked(DefaultLogsSpecs):
    def reify(self, envs):
        if envs[0]["TORCHELASTIC_RESTART_COUNT"] != "0":
            print("blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)
        return super().reify(envs)
"""


def test_a_plugin_starts_processes_with_the_mask_that_was_inherited(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Between rounds, what a plug-in for logs starts has no signal blocked; the launcher still handles its own."""
    write_plugin(tmp_path / "site", "masked", "torchrun.logs_specs", {"masked": "masked:Masked"}, _SIGNALLING_PLUGIN)
    path = worker("if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(1)\nsay('up')\ntime.sleep(1000)")
    job = launch(
        "--standalone", "--logs-specs=masked", "--max-restarts=1", path, env={"PYTHONPATH": str(tmp_path / "site")}
    )
    job.wait_line("up")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert "blocked []" in job.stdout
