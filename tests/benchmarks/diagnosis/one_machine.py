"""Plants a fault in a job of one machine, and waits for its report."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.diagnosis.faults import HANG_TIMEOUT, TORCH
from tests.benchmarks.diagnosis.verdict import Verdict, judge
from tests.benchmarks.job import BenchmarkError, Job
from tests.support.memory_limit import memory_limit

if TYPE_CHECKING:
    from tests.benchmarks.diagnosis.cases import Case
    from tests.benchmarks.installation import Installation

#: The worker's script gets one of these words in place of the fault's name if the launcher injects the fault.
TRAINING, _WAITING = "training", "waiting"
#: The end of the launcher's line about a fault that it injects.
INJECTED = "(--inject-fault)"
#: Its line about a job that hangs.
_HANGS = "the job hangs: "
WORKERS = Path(__file__).parent / "workers"
#: Seconds until the fault, and from there to the report.
_UNTIL_FAULT = 60.0
_UNTIL_REPORT = 45.0
_PAUSE = 0.01
#: Seconds until a collective times out; of a job that has to be found hanging, longer than it is watched.
_COLLECTIVE, _NEVER = 3.0, 600.0


def plant(installation: Installation, case: Case, *, launcher: str = "elastic-run") -> Verdict:
    """Run a job with a fault, and judge its report.

    Args:
        installation: Where the launchers are.
        case: The fault.
        launcher: Which launcher.
    """
    with memory_limit(case.fault.memory) as prefix:
        command = [*prefix, *_command(installation, case, launcher)]
        with Job(command, directory=installation.directory) as job:
            return _watch(case, job, is_injected=bool(case.injected) and launcher == "elastic-run")


def _command(installation: Installation, case: Case, launcher: str) -> list[str]:
    is_torch = case.fault.place == TORCH
    script = WORKERS / ("gloo.py" if is_torch else "light.py")
    injected = case.injected if launcher == "elastic-run" else ""
    training = _WAITING if case.fault.memory else TRAINING
    words = [str(script), training if injected else case.fault.name, str(case.rank)]
    flags: tuple[str, ...] = ()
    words += [str(case.groups), str(_NEVER if case.fault.is_hang else _COLLECTIVE)] if is_torch else [str(case.port)]
    if launcher == "elastic-run":
        preload = ("--preload=torch",) if is_torch else ()
        flags = (*preload, *case.fault.flags, *((injected,) if injected else ()))
    return installation.launcher(launcher, case.size, *flags, *words)


def _watch(case: Case, job: Job, *, is_injected: bool) -> Verdict:
    planted = ended = found = None
    with contextlib.suppress(BenchmarkError):
        planted = _wait_injected(job) if is_injected else _wait_planted(job)
        if case.fault.is_hang:
            found = _wait_said(job, _HANGS, _UNTIL_REPORT)
        job.wait_end(deadline=_UNTIL_REPORT, code=None)
        ended = time.time()
    seconds = None if planted is None or ended is None else max(0.0, ended - planted)
    late = None if planted is None or found is None else found - planted - HANG_TIMEOUT
    return replace(judge(case, [job.errors], seconds), late=late)


def _wait_planted(job: Job) -> float:
    ((_, moment),) = job.wait_lines(1, starting="planted ", deadline=_UNTIL_FAULT)
    return float(moment)


def _wait_injected(job: Job) -> float:
    return _wait_said(job, INJECTED, _UNTIL_FAULT) or time.time()


def _wait_said(job: Job, text: str, deadline: float) -> float | None:
    """Return when the launcher has said something, or None; lines of stderr go into a file."""
    end = time.monotonic() + deadline
    while text not in job.errors:
        if time.monotonic() > end:
            return None
        time.sleep(_PAUSE)
    return time.time()
