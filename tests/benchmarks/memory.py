"""Memory and idleness of the launcher while two workers sleep, and what it must never import.

Memory is the proportional set size: shared pages count by share. The launcher's processes are itself and all below it
that are not workers: the guardian, or whatever else a launcher needs.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.comparison import Comparison
from tests.benchmarks.figures import Bar, Figure, compared
from tests.benchmarks.job import BenchmarkError, Job
from tests.support.processes import descendants_of

if TYPE_CHECKING:
    from tests.benchmarks.effort import Effort
    from tests.benchmarks.installation import Installation

#: Seconds over which wake-ups are counted.
_IDLE = 10.0
#: Seconds after the workers' first lines until a launcher has nothing left to do.
_SETTLING = 1.5
#: Seconds without a wake-up that tell a launcher at rest, and how long to wait for that at most.
_QUIET = 0.5
_PATIENCE = 10.0
_NEVER_IMPORTED = frozenset({"torch", "numpy", "asyncio", "multiprocessing", "importlib.metadata", "requests"})
_IMPORT_LINE = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s*(\S+)$", re.MULTILINE)


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure all launchers, one after the other, and look for modules that should not be there."""
    del effort  # figures of a state, not of a moment
    idle = {launcher: idle_figures(installation, launcher, idle=_IDLE) for launcher in installation.launchers}
    megabytes, wakes = (Comparison({name: [[pair[part]]] for name, pair in idle.items()}) for part in (0, 1))
    return [
        compared(
            megabytes,
            benchmark="memory",
            name="memory of the launcher's processes (PSS), 2 workers asleep",
            unit="MB",
            bar=Bar(25.0),
            is_headline=True,
            plots={"footprint": "launcher, 2 workers asleep"},
        ),
        compared(
            wakes,
            benchmark="memory",
            name=f"wake-ups of the launcher's processes in {_IDLE:g} s",
            unit="",
            bar=Bar(2.0),
            is_headline=True,
        ),
        Figure(
            benchmark="memory",
            name=f"modules imported of {', '.join(sorted(_NEVER_IMPORTED))}",
            unit="",
            bar=Bar(0.0),
            elastic_run=float(len(forbidden_imports(installation))),
        ),
    ]


def idle_figures(installation: Installation, launcher: str, *, idle: float) -> tuple[float, float]:
    """Let two workers sleep under a launcher.

    Args:
        installation: The commands.
        launcher: Which one.
        idle: Seconds to count wake-ups over.

    Returns:
        Megabytes of the launcher's processes, and how often they woke up.
    """
    command = installation.launcher(launcher, 2, installation.worker("sleeper"))
    with Job(command, directory=installation.directory) as job:
        workers = {int(words[0]) for words in job.wait_lines(2)}
        time.sleep(_SETTLING)
        pids = [job.pid, *(set(descendants_of(job.pid)) - workers)]
        if launcher == "elastic-run" and any("libtorch" in _maps(pid) for pid in pids):
            message = "the launcher has torch in its memory"
            raise BenchmarkError(message)
        before = _wait_quiet(pids)
        time.sleep(idle)
        wakes = sum(map(_wakes, pids)) - before
        return sum(map(proportional_megabytes, pids)), float(wakes)


def forbidden_imports(installation: Installation) -> set[str]:
    """Run a small job under ``-X importtime``, and return which modules it imported that it never should."""
    command = installation.launcher("elastic-run", 2, installation.worker("first_line"))
    with Job([installation.python, "-X", "importtime", *command], directory=installation.directory) as job:
        job.wait_end()
        modules = set(_IMPORT_LINE.findall(job.errors))
    if "elastic_run.run" not in modules:
        message = "the list of imported modules can't be read"
        raise BenchmarkError(message)
    return modules & _NEVER_IMPORTED


def proportional_megabytes(pid: int) -> float:
    """Return a process's memory; pages that it shares count by share."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(text.partition("\nPss:")[2].split()[0]) * 1024 / 1e6


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")


def _wait_quiet(pids: list[int]) -> int:
    """Wait until the launcher is done with its start, which a busy machine delays; return its wake-ups until then."""
    give_up_at = time.monotonic() + _PATIENCE
    wakes = sum(map(_wakes, pids))
    while time.monotonic() < give_up_at:
        time.sleep(_QUIET)
        before, wakes = wakes, sum(map(_wakes, pids))
        if wakes == before:
            break
    return wakes


def _wakes(pid: int) -> int:
    """Return how often a process's threads were put on a CPU."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[2]) for task in tasks)
