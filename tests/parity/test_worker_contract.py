"""Every command line of the matrix under torchrun and under elastic-run: whatever differs must be a documented difference.

torchrun takes two seconds of a CPU for each, so it runs ahead of the tests, two at a time, each case once.
"""

from __future__ import annotations

import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.parity.matrix import CASES, Case
from tests.parity.observed import Run
from tests.support.processes import kill_processes, processes_with_environment
from tests.support.torchrun import with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-torchrun.md"
#: Stands for what was not seen at all.
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One thing in which elastic-run differs from torchrun on purpose.

    Args:
        name: What it is.
        reason: Why.
        documented: Words in docs/migrating-from-torchrun.md that tell users.
        seen_in: A case of the matrix in which it shows.
        covers: Tells from a case, a key and what was seen under torchrun and elastic-run, whether this is it.
    """

    name: str
    reason: str
    documented: str
    seen_in: str
    covers: Callable[[Case, str, Any, Any], bool]


def _covers(*endings: str, torchrun: object, elastic_run: object) -> Callable[[Case, str, Any, Any], bool]:
    """Make a `covers` for keys with some endings and one value under each launcher."""
    return lambda _case, key, theirs, ours: key.endswith(endings) and theirs == torchrun and ours == elastic_run


def _is_code_of_worker(case: Case, key: str, theirs: object, ours: object) -> bool:
    return key == "exit code" and theirs == 1 and ours == case.exit_code and "PARITY_END" in case.env and not case.stops


def _is_code_of_program(case: Case, key: str, theirs: object, ours: object) -> bool:
    return key == "exit code" and theirs == 1 and ours == case.exit_code and "--no-python" in case.arguments


def _is_report(case: Case, key: str, theirs: list[str], ours: list[str]) -> bool:
    """After a failure: no more than 25 lines, none of them from a traceback of ours; before, what workers wrote."""
    if key != "launcher's lines on stderr" or case.stops or not theirs:
        return False
    start = next((number for number, line in enumerate(ours) if line.startswith("-- elastic-run:")), None)
    return start is not None and len(ours) - start <= 25 and not any("launcher" in line for line in ours[start:])


