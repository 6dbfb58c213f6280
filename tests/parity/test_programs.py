"""Programs that call the launcher: torch's functions and ours raise the same classes, and record the same events."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import clean_environment
from tests.support.sessions import free_port
from tests.support.torchrun import run_on, with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch


# --- `main` and `run` ------------------------------------------------------------------------------------------------
#: Prints for each case the exception: the names of its classes, its exit code, that of the first failed worker, and the
#: program's name in it.
_CALLER = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
for function, words in json.loads(sys.argv[2]):
    try:
        module.main(words) if function == "main" else module.run(module.parse_args(words))
        print(json.dumps([["nothing"], None, None, None]), flush=True)
    except BaseException as error:
        first = error.get_first_failure()[1].exitcode if hasattr(error, "get_first_failure") else None
        names = [cls.__name__ for cls in type(error).__mro__]
        print(json.dumps([names, getattr(error, "code", None), first, getattr(error, "name", None)]), flush=True)
"""

#: What the program calls, and the flags in front of the script; by what torch raises.
_CASES = {
    "worker fails": ("main", []),
    "worker fails in run": ("run", []),
    "restarts are used up": ("main", ["--max-restarts=1"]),
    "not a number of nodes": ("main", ["--nnodes=two"]),
    "too many numbers": ("main", ["--nnodes=1:2:3"]),
    "not a number of workers": ("main", ["--nproc-per-node=many"]),
    "no such device": ("main", ["--nproc-per-node=gpu"]),
    "not a rank": ("main", ["--local-ranks-filter=one"]),
    "no such plug-in": ("main", ["--logs-specs=nowhere"]),
    "no such stream": ("main", ["--tee=out"]),
    "unknown flag": ("main", ["--never-heard-of"]),
    "help": ("main", ["--help"]),
}


def _raised_by(module: str, script: Path, tmp_path: Path) -> dict[str, tuple[list[str], list[int | str | None]]]:
    cases = [(function, [*flags, str(script)]) for function, flags in _CASES.values()]
    command = [sys.executable, "-c", _CALLER, module, json.dumps(cases)]
    done = subprocess.run(
        with_hosts_file(command, write_hosts_file(tmp_path)),
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        env=clean_environment({"CUDA_VISIBLE_DEVICES": ""}),
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(found) == len(_CASES), done.stderr
    return {name: (names, codes) for name, (names, *codes) in zip(_CASES, found, strict=True)}


@pytest.mark.long
def test_main_and_run_raise_what_torchs_raise(tmp_path: Path) -> None:
    """A program that calls `main` or `run` catches torch's exceptions, and goes on after each of them."""
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(7)\n", encoding="utf-8")
    theirs = _raised_by("torch.distributed.run", script, tmp_path)
    ours = _raised_by("elastic_run.run", script, tmp_path)
    for name, (names, codes) in theirs.items():
        assert names[0] in ours[name][0], f"{name}: torch raises {names[0]}, ours {ours[name][0]}"
        assert ours[name][1] == codes, name


def test_the_legacy_main_raises_too(tmp_path: Path) -> None:
    """`launch.main` raises a worker's failure and a wrong value as `run.main` does."""
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(7)\n", encoding="utf-8")
    raised = _raised_by("elastic_run.launch", script, tmp_path)
    assert raised["worker fails"][0][0] == "ChildFailedError"
    assert "ValueError" in raised["not a number of nodes"][0]


def test_a_program_of_torchs_commands_name_is_a_command(tmp_path: Path) -> None:
    """Torch's console script `torchrun` calls `main` without words: it ends with the job's exit code."""
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)\n", encoding="utf-8")
    command = tmp_path / "torchrun"
    command.write_text("import sys\nfrom elastic_run.run import main\nsys.exit(main())\n", encoding="utf-8")
    words = [sys.executable, str(command), str(tmp_path / "train.py")]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=clean_environment(), timeout=100)
    assert done.returncode == 7
    assert "Traceback" not in done.stderr


# --- `elastic_launch` ------------------------------------------------------------------------------------------------
_LAUNCH = """
api = get("torch.distributed.launcher.api")
def launch(endpoint, conf, command, *words, nodes=2):
    config = api.LaunchConfig(nodes, nodes, 1, rdzv_backend="c10d", rdzv_endpoint=endpoint, run_id="job",
                              rdzv_configs=conf, max_restarts=0)
    try:
        api.elastic_launch(config, command)(*words)
    except Exception as error:
        tell([cls.__name__ for cls in type(error).__mro__], str(error))
"""
_PROGRAM = """
import signal, threading
launch(f"127.0.0.1:{PORT}", {"is_host": "false", "read_timeout": 1, "timeout": 1}, "true")
launch(f"127.0.0.1:{PORT}", {"join_timeout": 1, "timeout": 1, "last_call_timeout": 1}, "true")
os.mkfifo(FIFO := f"{os.path.dirname(os.path.abspath(__file__))}/{SIDE}.fifo")
def stop():
    open(FIFO).read()
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=stop).start()
launch("127.0.0.1:0", {}, "sh", "-c", f": > {FIFO}; exec sleep 10", nodes=1)
"""


@pytest.mark.long
def test_the_classes_are_torchs(tmp_path: Path) -> None:
    """A store that isn't there, nodes that don't come and a stop signal are caught as torch's exceptions are."""
    program = _LAUNCH + _PROGRAM.replace("{PORT}", str(free_port()))
    theirs, ours = (run_on(side, program, tmp_path) for side in ("torch", "ours"))
    assert [names for names, _ in ours] == [names for names, _ in theirs]
    assert [names[0] for names, _ in ours] == ["RendezvousConnectionError", "RendezvousTimeoutError", "SignalException"]
    assert theirs[2][1].startswith("Process ")
    assert " got signal: 15" in theirs[2][1]
    assert " got signal: 15" in ours[2][1]


@pytest.mark.long
def test_a_program_that_cannot_start_is_the_systems_error(tmp_path: Path) -> None:
    """A command that isn't there, may not be executed or is no program is caught as the system's exception is."""
    texts = {"denied": "exit 0\n", "none": "no first line\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "none").chmod(0o755)
    calls = [f"launch('127.0.0.1:0', {{}}, {str(tmp_path / name)!r}, nodes=1)\n" for name in ("missing", *texts)]
    theirs, ours = (run_on(side, _LAUNCH + "".join(calls), tmp_path) for side in ("torch", "ours"))
    assert [names for names, _ in ours] == [names for names, _ in theirs]
    assert [names[0] for names, _ in ours] == ["FileNotFoundError", "PermissionError", "OSError"]
    for (_, their_text), (_, our_text) in zip(theirs, ours, strict=True):
        assert our_text.startswith(their_text.partition("]")[0]), "the number of the error"


def test_the_report_of_the_command_names_them(launch: Launch) -> None:
    """Programs that search a launcher's log for torch's error find its name there."""
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    settings = "--rdzv-conf=join_timeout=1,last_call_timeout=1"
    job = launch(*place, settings, "--no-python", "true")
    assert job.wait_exit() == 201, job.stderr
    assert "(RendezvousTimeoutError)" in job.stderr


# --- events and metrics ----------------------------------------------------------------------------------------------
#: The worker of each attempt waits until the agent has called its group healthy; the first attempt then fails.
_STEPS = """
import logging
launcher, metrics = get("torch.distributed.launcher.api"), get("torch.distributed.elastic.metrics")
handlers = get("torch.distributed.elastic.events.handlers")
os.mkfifo("healthy")
healthy = os.open("healthy", os.O_RDWR)

class Events(logging.Handler):
    def emit(self, record):
        event = json.loads(record.getMessage())
        metadata = event.pop("metadata")
        details = json.loads(metadata.pop("metadata"))
        tell("event", event["name"], event["source"], metadata["agent_restarts"], metadata["state"],
             sorted(metadata), sorted(details), isinstance(metadata["duration_ms"], float))

class Metrics(metrics.MetricHandler):
    def emit(self, data):
        tell("metric", data.group_name, data.name, data.value if data.name.startswith("workers.") else None)
        if data.name.endswith(".healthy"):
            os.write(healthy, b"\\n")

handlers._log_handlers["told"] = Events()
metrics.configure(Metrics())
config = launcher.LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=1, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id="job",
    max_restarts=1, event_log_handler="told", monitor_interval=0.01)
command = 'read line < healthy; exit $((1 - TORCHELASTIC_RESTART_COUNT))'
launcher.elastic_launch(config, "bash")("-c", command)
"""


@pytest.mark.long
def test_steps_are_told_as_by_torch(tmp_path: Path) -> None:
    """The events come in torch's order with its fields, and every metric of torch's methods has its name and values."""
    found = {}
    for side in ("torch", "ours"):
        directory = tmp_path / side
        directory.mkdir()
        told = run_on(side, f"import os; os.chdir({str(directory)!r})\n{_STEPS}", directory)
        events = [event for kind, *event in told if kind == "event"]
        metrics = {tuple(metric) for kind, *metric in told if kind == "metric"}
        found[side] = events, metrics
    assert found["ours"][0] == found["torch"][0]
    assert found["ours"][1] == found["torch"][1]
    assert ["torchelastic", "workers.default_role.healthy", 1] in map(list, found["ours"][1])
    assert [event[3] for event in found["ours"][0] if event[0].endswith("ASSIGN_WORKER_RANKS")]
