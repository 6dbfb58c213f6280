"""Planted faults: whether the closing report names the right rank and the right cause, how soon and how far up.

``python -m benchmarks.diagnosis [-v] WORD...`` plants the faults whose names hold all words, and prints the
reports of those that were missed; with -v all reports.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.faults import (
    HANG_TIMEOUT,
    HOST_COUNT,
    HOSTS,
    PER_HOST,
    TORCH,
    Verdict,
    all_cases,
    choose,
    judge,
    make_figures,
)
from benchmarks.installation import install
from benchmarks.job import BenchmarkError, Job
from tests.support.hosts import virtual_hosts
from tests.support.system import memory_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.faults import Case
    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation
    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts

#: Jobs that run at a time.
_JOBS = 2
#: The worker's script gets one of these words in place of the fault's name if the launcher injects the fault.
_TRAINING, _WAITING = "training", "waiting"
#: The end of the launcher's line about a fault that it injects.
_INJECTED = "(--inject-fault)"
#: Its line about a job that hangs.
_HANGS = "the job hangs: "
#: Seconds until the fault, and from there to the report.
_UNTIL_FAULT = 60.0
_UNTIL_REPORT = 45.0
_PAUSE = 0.01
#: Seconds until a collective times out; of a job that has to be found hanging, longer than it is watched.
_COLLECTIVE, _NEVER = 3.0, 600.0
_PORT = 29400
_CONF = "--rdzv-conf=keep_alive_interval=0.5,keep_alive_max_attempt=3,join_timeout=3"
#: Seconds until the fault, from there to the reports, and until a job that goes on is ended.
_HOSTS_UNTIL_FAULT, _HOSTS_UNTIL_REPORT, _WATCHED = 30.0, 30.0, 4.0
#: Done to a host or its agent from outside; all others are done by a worker.
_FROM_OUTSIDE = frozenset(("host dark", "agent killed"))


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Plant all faults under elastic-run, and some of them under torchrun."""
    cases = choose(effort.faults)
    ours = list(plant_all(installation, cases))
    beside = [case for case in cases if case.is_for_torchrun]
    theirs = list(plant_all(installation, beside, launcher="torchrun"))
    return make_figures(ours, theirs)


def plant_all(installation: Installation, cases: Sequence[Case], *, launcher: str = "elastic-run") -> Iterator[Verdict]:
    """Plant faults, two at a time on this machine and then those on virtual hosts."""
    here = [case for case in cases if case.fault.place != HOSTS]
    with ThreadPoolExecutor(_JOBS) as pool:
        yield from pool.map(partial(_plant_here, installation, launcher=launcher), here)
    for case in cases:
        if case.fault.place == HOSTS:
            with virtual_hosts(HOST_COUNT) as hosts:
                yield _plant_on_hosts(installation, case, hosts)


# --- on this machine --------------------------------------------------------------------------------------------------
def _plant_here(installation: Installation, case: Case, *, launcher: str = "elastic-run") -> Verdict:
    """Run a job with a fault, and judge its report."""
    with memory_limit(case.fault.memory) as prefix:
        command = [*prefix, *_command(installation, case, launcher)]
        with Job(command, directory=installation.directory) as job:
            return _watch(case, job, is_injected=bool(case.injected) and launcher == "elastic-run")


def _command(installation: Installation, case: Case, launcher: str) -> list[str]:
    is_torch = case.fault.place == TORCH
    script = installation.worker("faulty_gloo" if is_torch else "faulty_light")
    injected = case.injected if launcher == "elastic-run" else ""
    training = _WAITING if case.fault.memory else _TRAINING
    words = [script, training if injected else case.fault.name, str(case.rank)]
    flags: tuple[str, ...] = ()
    words += [str(case.groups), str(_NEVER if case.fault.is_hang else _COLLECTIVE)] if is_torch else []
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
    return _wait_said(job, _INJECTED, _UNTIL_FAULT) or time.time()


def _wait_said(job: Job, text: str, deadline: float) -> float | None:
    """Return when the launcher has said something, or None; lines of stderr go into a file."""
    end = time.monotonic() + deadline
    while text not in job.errors:
        if time.monotonic() > end:
            return None
        time.sleep(_PAUSE)
    return time.time()


# --- on virtual hosts -------------------------------------------------------------------------------------------------
def _plant_on_hosts(installation: Installation, case: Case, hosts: VirtualHosts) -> Verdict:
    which = case.rank // PER_HOST
    # The store of a job whose host goes dark lives on another host: its loss has tests of its own.
    store = hosts[(which + 1) % HOST_COUNT if case.fault.name in _FROM_OUTSIDE else 0]
    agents = [_start_agent(installation, case, host, number, store.name) for number, host in enumerate(hosts)]
    planted = _wait_fault(case, hosts[which], agents)
    told = [agent for agent in agents if agent is not agents[which] or case.fault.name not in _FROM_OUTSIDE]
    ended = planted and _wait_reports(case, told)
    is_of_host = case.fault.name in _FROM_OUTSIDE or case.fault.is_hang
    seconds = ended - planted if planted and ended else None
    return judge(case, [agent.stderr for agent in told], seconds, host=hosts[which].name if is_of_host else "")


def _start_agent(installation: Installation, case: Case, host: VirtualHost, number: int, store: str) -> HostProcess:
    command = [
        *installation.elastic_run,
        f"--nnodes={HOST_COUNT}",
        f"--nproc-per-node={PER_HOST}",
        f"--node-rank={number}",
        "--rdzv-backend=c10d",
        "--rdzv-id=planted",
        f"--rdzv-endpoint={store}:{_PORT}",
        _CONF,
        *((case.injected,) if case.injected else ()),
        installation.worker("faulty_light"),
        _TRAINING if case.injected else case.fault.name,
        str(case.rank),
    ]
    is_other = case.fault.name == "wrong version on one node" and number == case.rank // PER_HOST
    path = str(_write_other_torch(installation.directory)) if is_other else None
    return host.start(command, env={"PYTHONPATH": path}, cwd=installation.directory)


def _write_other_torch(directory: Path) -> Path:
    """Make an environment whose torch is of another release, as far as can be seen without importing it."""
    package = directory / "other" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '2.4.0'\n", encoding="ascii")
    return package.parent


def _wait_fault(case: Case, host: VirtualHost, agents: Sequence[HostProcess]) -> float:
    """Wait until the fault has happened, or let it happen; return when, or 0."""
    number = case.rank // PER_HOST
    try:
        agents[number].wait_line(_INJECTED if case.injected else "planted", deadline=_HOSTS_UNTIL_FAULT)
    except (AssertionError, TimeoutError):
        return 0.0
    if case.fault.name == "host dark":
        host.go_dark()
    elif case.fault.is_hang:
        with contextlib.suppress(AssertionError, TimeoutError):
            agents[number].wait_exit(deadline=_WATCHED)
        agents[0].send(signal.SIGTERM)
    return time.time()


def _wait_reports(case: Case, agents: Sequence[HostProcess]) -> float:
    """Wait until all launchers have ended; return when the last did, or 0."""
    end = time.monotonic() + _HOSTS_UNTIL_REPORT
    try:
        for agent in agents:
            agent.wait_exit(deadline=max(0.1, end - time.monotonic()))
    except (AssertionError, TimeoutError):
        return 0.0
    return 0.0 if case.fault.is_hang else time.time()


def main(words: list[str]) -> None:
    """Do what the command line says."""
    is_verbose = "-v" in words
    wanted = [word for word in words if word != "-v"]
    cases = [case for case in all_cases() if all(word in case.name for word in wanted)]
    with TemporaryDirectory(prefix="elastic-run-diagnosis-") as directory:
        for verdict in plant_all(install(Path(directory)), cases):
            seconds = "-" if verdict.seconds is None else f"{verdict.seconds:.1f} s"
            marks = f"rank {verdict.has_rank:d} cause {verdict.has_cause:d} line {verdict.line}"
            late = "" if verdict.late is None else f"  verdict {verdict.late:.2f} s after the timeout"
            print(f"{marks}  {seconds:>7}  {verdict.case.name}{late}", flush=True)
            if is_verbose or not (verdict.has_rank and verdict.is_early):
                print(verdict.text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
