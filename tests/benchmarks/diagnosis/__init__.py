"""Planted faults: whether the closing report names the right rank and the right cause, how soon and how far up.

| module | what it holds |
|---|---|
| `cases` | which faults are planted in which ranks of which jobs |
| `faults` | the kinds of faults, and how a report names each |
| `one_machine` | a job with a fault on this machine |
| `several_hosts` | a job with a fault on virtual hosts |
| `summary` | the figures of all verdicts |
| `verdict` | what closing lines say, compared with what was planted |
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.diagnosis import one_machine, several_hosts
from tests.benchmarks.diagnosis.cases import choose
from tests.benchmarks.diagnosis.faults import HOSTS
from tests.benchmarks.diagnosis.summary import make_figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.benchmarks.diagnosis.cases import Case
    from tests.benchmarks.diagnosis.verdict import Verdict
    from tests.benchmarks.effort import Effort
    from tests.benchmarks.figures import Figure
    from tests.benchmarks.installation import Installation

#: Jobs that run at a time.
_JOBS = 2


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Plant all faults under elastic-run, and some of them under torchrun."""
    cases = choose(effort.faults)
    ours = list(plant_all(installation, cases))
    beside = [case for case in cases if case.is_for_torchrun]
    theirs = list(plant_all(installation, beside, launcher="torchrun"))
    return make_figures(ours, theirs)


def plant_all(installation: Installation, cases: Sequence[Case], *, launcher: str = "elastic-run") -> Iterator[Verdict]:
    """Plant faults, two at a time on this machine and then those on virtual hosts.

    Args:
        installation: Where the launchers are.
        cases: The faults.
        launcher: Which launcher.
    """
    here = [case for case in cases if case.fault.place != HOSTS]
    with ThreadPoolExecutor(_JOBS) as pool:
        yield from pool.map(partial(one_machine.plant, installation, launcher=launcher), here)
    yield from several_hosts.plant_all(installation, [case for case in cases if case.fault.place == HOSTS])
