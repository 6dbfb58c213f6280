"""A rank whose main thread has raised an exception, and whose process lives: the job names it, and waits no longer."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.programs import shortened
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launch, Launched

    Write = Callable[[str], Path]

_DIRECTORY = Path(__file__).parents[2] / "data" / "failed_programs"
_CAUSE = "ValueError: shard 7 is corrupt"
_TORCH = ("dist.", "loader", "torch.")
_TAIL = "if __name__ == '__main__':\n    main()\n    if rank == 1: run()\n"


class Kind(NamedTuple):
    """A kind of program whose rank 1 raises an exception, and lives on after it or handles it and goes on.

    `tests/data/failed_programs` has a text for each kind: `## its name`, with ` -> pattern` if the cause is not the
    usual one, and below it what rank 1 runs. Rank 0 waits, without torch for a file that never comes, unless `WAITS=0`
    says that it ends.
    """

    name: str
    body: str
    cause: str

    @property
    def program(self) -> str:
        """The whole program."""
        heads = ["head.txt"] + ["torch.txt"] * any(word in self.body for word in _TORCH)
        head = "\n".join((_DIRECTORY / name).read_text(encoding="utf-8") for name in heads)
        body = "".join(f"    {line}\n" for line in self.body.splitlines())
        return f"{head}\ndef run():\n    global kept\n{body}\n{_TAIL}"


def read_kinds(file: str) -> dict[str, Kind]:
    """Return the kinds of a file, `lives_on` or `goes_on`, by their names."""
    found = {}
    for text in (_DIRECTORY / f"{file}.txt").read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = text.partition("\n")
        name, _, cause = title.partition(" -> ")
        found[name] = Kind(name, body.strip(), cause or _CAUSE)
    return found


_LIVES_ON, _GOES_ON = read_kinds("lives_on"), read_kinds("goes_on")
#: Kinds that `make test` tries, and those that `make test-long` tries; `make soak` tries all others.
_SOME = ("thread sleeps", "process by fork", "exit function sleeps", "destructor of a global", "SIGTERM ends with 0")
_LONG = (
    "thread in pause() of C",
    "ProcessPoolExecutor",
    "daemon that ignores SIGTERM",
    "exit function of C",
    "generator",
    "descriptor of stderr closed",
    "hook that prints by itself and waits",
    "torch: thread in a collective",
    "torch: loader that ignores SIGTERM",
    "raises: group",
    "raises: in a process of a pool",
)
_SOME_GO_ON = ("prints the traceback", "calls the hook", "main ends, a thread goes on", "exception printed by C")
_LONG_GO_ON = ("exception in a task", "main ends, a process goes on", "dumps its stacks", "executes another program")
_THREAD = _LIVES_ON["thread sleeps"].program
_RAISED = "rank 1 has raised ValueError: shard 7 is corrupt"
#: Rank 1's hook shows an exception by itself, and tells nobody.
_OWN_HOOK = _LIVES_ON["hook that prints by itself"]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a program."""

    def write_program(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write_program


def cause_of(job: Launched) -> str:
    """Return the section of the report that has the cause, in one line."""
    lines = job.stderr.rpartition("-- elastic-run: ")[2].splitlines()[1:]
    rest = [index for index, line in enumerate(lines) if index and line[:1] not in ("", " ")]
    return " ".join(" ".join(lines[: rest[0]]).split())


def kinds(some: tuple[str, ...], long: tuple[str, ...], every: dict[str, Kind]) -> list[pytest.ParameterSet]:
    """Return all kinds as parameters, most of which only `make soak` tries."""
    marks = {name: [pytest.mark.long] if name in long else [pytest.mark.soak] for name in every}
    return [pytest.param(kind, marks=[] if name in some else marks[name], id=name) for name, kind in every.items()]


@pytest.mark.parametrize("kind", kinds(_SOME, _LONG, _LIVES_ON))
def test_its_exception_is_the_cause(kind: Kind, launch: Launch, write: Write, tmp_path: Path) -> None:
    """After --shutdown-timeout it has failed, whatever keeps it alive."""
    env = {"TMPDIR": str(tmp_path)}
    job = launch("--nproc-per-node=2", "--shutdown-timeout=2", write(kind.program), env=env, cwd=tmp_path)
    assert job.wait_exit(deadline=60) == 1
    assert re.search(rf"^cause rank 1 on \S+ \(local rank 1, .* failed with exit code 1 .*{kind.cause}", cause_of(job))


@pytest.mark.parametrize("kind", kinds(_SOME_GO_ON, _LONG_GO_ON, _GOES_ON))
def test_a_program_that_handles_its_exception_goes_on(kind: Kind, launch: Launch, write: Write, tmp_path: Path) -> None:
    """Whatever it writes, it ends by itself, and no line is about it."""
    is_short = kind.name in _SOME_GO_ON
    env = {"WAITS": "0", "PAUSE": "2.5" if is_short else "14", "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    job = launch("--nproc-per-node=2", "--shutdown-timeout=1", write(kind.program), env=env)
    assert job.wait_exit(deadline=60) == 0
    assert "elastic-run: " not in job.stderr


def test_a_line_says_what_keeps_it_alive(launch: Launch, write: Write) -> None:
    """It comes once, well before the rank counts as failed; the report says for how long the rank had lived on."""
    job = launch("--nproc-per-node=2", "--shutdown-timeout=4", write(_THREAD))
    assert job.wait_exit() == 1
    said = f"{_RAISED}, and has not ended: thread Thread-1 (sleep_long) still runs"
    assert job.stderr.count(said) == 1
    assert re.search(r"it had not ended 4\.\d s later: thread Thread-1 \(sleep_long\) still runs", cause_of(job))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_does_not_hide_it(number: signal.Signals, launch: Launch, write: Write, tmp_path: Path) -> None:
    """The exit code is the signal's, the cause the exception."""
    job = launch("--nproc-per-node=2", f"--log-dir={tmp_path}", write(_THREAD))
    job.wait_line("and has not ended: ")
    job.send(number)
    assert job.wait_exit() == 128 + number
    assert "ValueError: shard 7 is corrupt" in cause_of(job)
    assert f"verdict  {number.name} came from " in job.stderr
    (failure,) = tmp_path.glob("*_*/failure.json")
    root = json.loads(failure.read_text(encoding="utf-8"))["root_cause"]
    assert (root["rank"], root["exit_code"], root["exception"]["type"]) == (1, 1, "ValueError")


def test_another_failure_does_not_hide_it(launch: Launch, write: Write, tmp_path: Path) -> None:
    """Rank 0 fails later, and its process ends first."""
    path = write(
        "import os, sys, threading, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    raise ValueError('shard 7 is corrupt')\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
        "raise KeyError(3)\n"
    )
    job = launch("--nproc-per-node=2", path, tmp_path / "fails")
    job.wait_line("and has not ended: ")
    (tmp_path / "fails").touch()
    assert job.wait_exit() == 1
    assert "ValueError: shard 7 is corrupt" in cause_of(job)
    assert re.search(r"others   rank 0 failed \d\.\d s later: KeyError: 3", job.stderr)


def test_it_is_restarted_as_any_failure(launch: Launch, write: Write) -> None:
    """The restart's line has the exception."""
    job = launch("--nproc-per-node=2", "--shutdown-timeout=1", "--max-restarts=1", write(_THREAD))
    assert job.wait_exit() == 1
    assert re.search(r"ValueError: shard 7 is corrupt; restarting all 2 workers, restart 1 of 1", job.stderr)


def test_a_hang_is_its_fault(launch: Launch, write: Write) -> None:
    """Rank 0, which only sleeps, is not blamed; the exception is the cause, and not that no rank made progress."""
    job = launch("--nproc-per-node=2", "--hang-timeout=2", "--hang-action=fail", write(_THREAD))
    assert job.wait_exit() == 1
    assert "look at rank 1: it has failed and not ended" in job.stderr
    assert "ValueError: shard 7 is corrupt" in cause_of(job)


def test_reading_stacks_does_not_wake_a_pause(launch: Launch, write: Write) -> None:
    """Any signal would end the system call, and C code would go on. Another thread takes the signal if there is one."""
    path = write(
        "import ctypes, os, signal, threading, time\n"
        "if os.environ['RANK'] == '0': threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "ctypes.CDLL(None).pause()\nos.write(1, b'woken\\n')\n"
    )
    job = launch("--nproc-per-node=2", "--hang-timeout=2", path)
    job.wait_line(r"rank 0 is in <module> \(train.py:3\)")
    job.wait_line("rank 1 waits for a signal")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert "woken" not in job.stdout


@pytest.mark.parametrize("options", [[], ["--hang-timeout=2", "--hang-action=fail"]], ids=["waits", "hangs"])
def test_each_node_names_it(options: list[str], launch: Launch, write: Write) -> None:
    """The node without the rank as well."""
    address = (f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    words = (*address, "--nproc-per-node=1", "--shutdown-timeout=3", *options, write(_THREAD))
    for node in [launch(*words) for _ in range(2)]:
        assert node.wait_exit() == 1
        assert re.search("^cause rank 1 .* ValueError: shard 7 is corrupt$", cause_of(node))


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_function_that_has_raised_is_known_too(method: str, launch: Launch, write: Write) -> None:
    """The process of a worker's function lives on like that of a program."""
    path = write(f"""
import os, threading, time
from elastic_run.launcher import LaunchConfig, elastic_launch

def train():
    if os.environ["RANK"] == "1":
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("shard 7 is corrupt")
    time.sleep(600)

if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, start_method="{method}", max_restarts=0, rdzv_backend="c10d", run_id="f",
                          rdzv_endpoint="localhost:0")
    elastic_launch(config, train)()
""")
    job = launch(path, program=(sys.executable,), env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"})
    assert job.wait_exit() == 1
    assert _RAISED in job.stderr


def test_a_preloaded_worker_tells_of_its_exception(launch: Launch, write: Write) -> None:
    """A fork of the template gets the hook when it becomes a worker."""
    job = launch("--nproc-per-node=2", "--preload=json", "--shutdown-timeout=2", write(_THREAD))
    assert job.wait_exit() == 1
    assert _RAISED in job.stderr


def test_a_hook_of_the_program_hides_no_exception(launch: Launch, write: Write) -> None:
    """The hook tells nobody, so the worker is asked for its stacks when it has been silent for a while."""
    program = shortened({"elastic_run.agent.driver.watches.SILENCE": 1.0})
    job = launch("--nproc-per-node=2", "--shutdown-timeout=1", write(_OWN_HOOK.program), program=program)
    assert job.wait_exit() == 1
    assert "ValueError: shard 7 is corrupt" in cause_of(job)


def test_the_last_words_of_a_worker_that_tells_nothing_are_in_the_report(launch: Launch, write: Write) -> None:
    """Its Python has no hook, so nobody knows whether it has handled the exception: nothing but a line follows."""
    path = write(_THREAD)
    job = launch("--nproc-per-node=2", "--no-python", "--shutdown-timeout=1", sys.executable, "-S", path)
    job.wait_line("ValueError: shard 7 is corrupt")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    said = r"before rank 1 wrote ValueError: shard 7 is corrupt \d\.\d+ s before the stop, and had not ended"
    assert re.search(said, " ".join(job.stderr.split()))


def test_a_job_that_stands_still_is_reported_without_hang_timeout(launch: Launch, write: Write) -> None:
    """After some minutes, which are seconds here, the whole report on a hang comes once."""
    path = write("import os, time\ndef load(): time.sleep(600)\nload()\n")
    program = shortened(
        {
            "elastic_run.agent.driver.watches.QUIET_PERIOD": 2.0,
            "elastic_run.agent.driver.watches._QUIET_TIMEOUT": 2.0,
        }
    )
    job = launch("--nproc-per-node=2", path, program=program)
    job.wait_line(r"the job hangs: no progress of any rank for [4-9]\.\d s")
    job.wait_line(r"ranks 0-1 are in load \(train.py:2\)")
    job.wait_line("the job goes on .--hang-timeout finds a hang sooner")
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    assert job.stderr.count("the job hangs") == 1
