"""Law 1: what the launcher has not imported by the time it starts its workers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

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

#: Law 1.
NEVER = {"torch", "asyncio", "multiprocessing", "importlib.metadata", "requests"}
#: Each costs milliseconds that the first worker would wait.
TOO_SLOW = {
    "enum",
    "signal",
    "collections",
    "logging",
    "subprocess",
    "tempfile",
    "shutil",
    "uuid",
    "random",
    "json",
    "argparse",
    "inspect",
    "traceback",
}


@pytest.mark.parametrize("flags", [["--standalone"], ["--max-restarts=1", "--tee=3", "--log-dir=logs"]], ids=" ".join)
def test_nothing_large_is_imported_before_the_workers_run(
    flags: list[str], launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """When the last worker is started, the launcher has imported neither torch nor anything else on the lists."""
    (tmp_path / "sitecustomize.py").write_text(SPY, encoding="utf-8")
    (tmp_path / "script.py").write_text("", encoding="utf-8")
    report = tmp_path / "imported.jsonl"
    env = {"PYTHONPATH": str(tmp_path), "SPY_REPORT": str(report)}
    job = launch("--nproc-per-node=2", *flags, "script.py", env=env, cwd=tmp_path)
    assert job.wait_exit() == 0, job.stderr
    notes = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    assert notes, "the spy saw no process start"
    assert not (NEVER | TOO_SLOW) & set(notes[-1])
