"""Plants faults in jobs of three virtual hosts with two ranks each, and waits for the reports of all of them."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from tests.benchmarks.diagnosis.cases import HOSTS, PER_HOST
from tests.benchmarks.diagnosis.one_machine import INJECTED, TRAINING, WORKERS
from tests.benchmarks.diagnosis.verdict import Verdict, judge
from tests.support.hosts import virtual_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.benchmarks.diagnosis.cases import Case
    from tests.benchmarks.installation import Installation
    from tests.support.host_process import HostProcess
    from tests.support.hosts import VirtualHost, VirtualHosts

_PORT = 29400
_CONF = "--rdzv-conf=keep_alive_interval=0.5,keep_alive_max_attempt=3,join_timeout=3"
#: Seconds until the fault, from there to the reports, and until a job that goes on is ended.
_UNTIL_FAULT = 30.0
_UNTIL_REPORT = 30.0
_WATCHED = 4.0
#: Done to a host or its agent from outside; all others are done by a worker.
_FROM_OUTSIDE = frozenset(("host dark", "agent killed"))


def plant_all(installation: Installation, cases: Sequence[Case]) -> Iterator[Verdict]:
    """Plant faults, one after another, each on hosts of its own.

    Args:
        installation: Where the launchers are.
        cases: The faults.
    """
    for case in cases:
        with virtual_hosts(HOSTS) as hosts:
            yield _plant(installation, case, hosts)


def _plant(installation: Installation, case: Case, hosts: VirtualHosts) -> Verdict:
    which = case.rank // PER_HOST
    # The store of a job whose host goes dark lives on another host: its loss has tests of its own.
    store = hosts[(which + 1) % HOSTS if case.fault.name in _FROM_OUTSIDE else 0]
    agents = [_start(installation, case, host, number, store.name) for number, host in enumerate(hosts)]
    planted = _wait_fault(case, hosts[which], agents)
    told = [agent for agent in agents if agent is not agents[which] or case.fault.name not in _FROM_OUTSIDE]
    ended = planted and _wait_reports(case, told)
    is_of_host = case.fault.name in _FROM_OUTSIDE or case.fault.is_hang
    seconds = ended - planted if planted and ended else None
    return judge(case, [agent.stderr for agent in told], seconds, host=hosts[which].name if is_of_host else "")


def _start(installation: Installation, case: Case, host: VirtualHost, number: int, store: str) -> HostProcess:
    command = [
        *installation.elastic_run,
        f"--nnodes={HOSTS}",
        f"--nproc-per-node={PER_HOST}",
        f"--node-rank={number}",
        "--rdzv-backend=c10d",
        "--rdzv-id=planted",
        f"--rdzv-endpoint={store}:{_PORT}",
        _CONF,
        *((case.injected,) if case.injected else ()),
        *(str(word) for word in (WORKERS / "light.py", TRAINING if case.injected else case.fault.name, case.rank)),
        str(case.port),
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
        agents[number].wait_line(INJECTED if case.injected else "planted", deadline=_UNTIL_FAULT)
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
    end = time.monotonic() + _UNTIL_REPORT
    try:
        for agent in agents:
            agent.wait_exit(deadline=max(0.1, end - time.monotonic()))
    except (AssertionError, TimeoutError):
        return 0.0
    return 0.0 if case.fault.is_hang else time.time()
