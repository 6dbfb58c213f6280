"""Law 1: what the launcher has not imported by the time it starts its workers."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.sessions import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch

#: Imported by the interpreter itself at start; it notes what is imported whenever the launcher starts a process.
SPY = """
import json, os, sys
report = os.environ.pop("SPY_REPORT", None)
if report:
    pid, at_start = os.getpid(), set(sys.modules)
    def note(event, arguments):
        if event in ("os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen") and os.getpid() == pid:
            with open(report, "a") as file:
                file.write(json.dumps(sorted(set(sys.modules) - at_start)) + "\\n")
    sys.addaudithook(note)
"""

#: The same, but it notes what is imported at the launcher's end.
AT_THE_END = """
import atexit, os, sys
report = os.environ.pop("SPY_REPORT", None)
if report:
    atexit.register(lambda: print(*sys.modules, file=open(report, "w")))
"""

#: Law 1.
NEVER = {"torch", "asyncio", "multiprocessing", "importlib.metadata", "requests"}
#: Each costs a part of a millisecond or more that the first worker would wait. argparse does too, and is worth it.
TOO_SLOW = {
    "re",
    "enum",
    "collections",
    "functools",
    "operator",
    "signal",
    "logging",
    "subprocess",
    "tempfile",
    "shutil",
    "uuid",
    "random",
    "json",
    "gettext",
    "locale",
    "inspect",
    "traceback",
    "tomllib",
    "psutil",
    "elastic_run.cli.explain",
    "elastic_run.cli.help",
    "elastic_run.report.event_log",
    "prometheus_client",
    "etcd",
    "urllib3",
}
#: Modules of ours that a job of one node has imported when its first worker starts, at most.
_MOST_OF_OURS = 34
#: Flags of a job of several nodes that begins with one; it also needs what speaks with the others.
SEVERAL_NODES = ["--nnodes=1:2"]
#: Each would cost such a job as much as all its messages' classes.
TOO_SLOW_FOR_NODES = {
    "elastic_run.cli.explain",
    "elastic_run.report.event_log",
    "prometheus_client",
    "etcd",
    "urllib3",
    "tomllib",
    "ast",
    "dataclasses",
    "dis",
    "inspect",
    "psutil",
    "typing",
    "subprocess",
    "tempfile",
    "uuid",
}


@pytest.mark.parametrize(
    "flags", [["--standalone"], ["--max-restarts=1", "--tee=3", "--log-dir=logs"], ["--metrics-port=0"]], ids=" ".join
)
def test_nothing_large_is_imported_before_the_workers_run(flags: list[str], launch: Launch, tmp_path: Path) -> None:
    """When the last worker is started, the launcher has imported neither torch nor anything else on the lists."""
    assert not (NEVER | TOO_SLOW) & imported_before_the_last_worker(flags, launch, tmp_path)


def test_few_modules_of_ours_are_imported_before_the_workers_run(launch: Launch, tmp_path: Path) -> None:
    """A reader of the way from the command to the first worker has this many files to read, and no more."""
    imported = imported_before_the_last_worker(["--standalone"], launch, tmp_path)
    ours = sorted(name for name in imported if name.partition(".")[0] == "elastic_run")
    assert len(ours) <= _MOST_OF_OURS, ours


def test_nothing_large_is_imported_before_the_workers_of_several_nodes_run(launch: Launch, tmp_path: Path) -> None:
    """A job of several nodes has imported neither torch nor `dataclasses` when its last worker is started."""
    imported = imported_before_the_last_worker(SEVERAL_NODES, launch, tmp_path)
    assert "elastic_run.core.job.membership" in imported, "this was no job of several nodes"
    assert not (NEVER | TOO_SLOW_FOR_NODES) & imported


def test_the_second_launcher_on_a_machine_imports_no_more(launch: Launch, tmp_path: Path) -> None:
    """It finds the endpoint's port taken, and does not look for the process that has it."""
    place = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j"]
    (tmp_path / "script.py").touch()
    first = launch(*place, "--nproc-per-node=2", "script.py", cwd=tmp_path)
    first.wait_line("waiting")
    imported = imported_before_the_last_worker(place, launch, tmp_path)
    assert first.wait_exit() == 0
    assert not (NEVER | TOO_SLOW_FOR_NODES) & imported


def test_a_job_of_one_node_speaks_with_nobody(launch: Launch, tmp_path: Path) -> None:
    """It imports neither the codec of messages nor JSON, which would take processor time from workers that start."""
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END, encoding="utf-8")
    env = {"PYTHONPATH": str(tmp_path), "SPY_REPORT": str(tmp_path / "imported")}
    assert launch("--nproc-per-node=2", "--no-python", "true", env=env, cwd=tmp_path).wait_exit() == 0
    imported = set((tmp_path / "imported").read_text(encoding="utf-8").split())
    assert "elastic_run.agent.history" in imported
    assert not {"json", "elastic_run.core.job.codec", "elastic_run.cluster.devices"} & imported


def test_an_ordinary_job_does_without_psutil(launch: Launch, tmp_path: Path) -> None:
    """Its watch over quiet rounds, its answer to SIGTERM and the end of its workers import none of psutil's 2 MB."""
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END, encoding="utf-8")
    env = {"PYTHONPATH": str(tmp_path), "SPY_REPORT": str(tmp_path / "imported")}
    job = launch("--no-python", "sh", "-c", "sleep 1.5; kill -TERM $PPID; exec sleep 60", env=env, cwd=tmp_path)
    assert job.wait_exit() == 128 + signal.SIGTERM
    imported = set((tmp_path / "imported").read_text(encoding="utf-8").split())
    assert "elastic_run.agent.driver.worker_readings" in imported
    assert "psutil" not in imported


def test_what_a_failure_needs_is_imported_while_the_workers_run(launch: Launch, tmp_path: Path) -> None:
    """A worker that fails after a second is reported without a wait for imports."""
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END, encoding="utf-8")
    env = {"PYTHONPATH": str(tmp_path), "SPY_REPORT": str(tmp_path / "imported")}
    assert launch("--no-python", "sleep", "2", env=env).wait_exit() == 0
    imported = set((tmp_path / "imported").read_text(encoding="utf-8").split())
    assert {"elastic_run.report.closing_report", "elastic_run.core.failure.diagnose"} <= imported


def imported_before_the_last_worker(flags: list[str], launch: Launch, directory: Path) -> set[str]:
    """Run a job; return the modules that its launcher had imported when it started the last process."""
    (directory / "sitecustomize.py").write_text(SPY, encoding="utf-8")
    (directory / "script.py").write_text("", encoding="utf-8")
    report = directory / "imported.jsonl"
    env = {"PYTHONPATH": str(directory), "SPY_REPORT": str(report)}
    job = launch("--nproc-per-node=2", *flags, "script.py", env=env, cwd=directory)
    assert job.wait_exit() == 0, job.stderr
    notes = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    assert notes, "the spy saw no process start"
    return set(notes[-1])
