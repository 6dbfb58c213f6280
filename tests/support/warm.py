"""Warm workers under test: a module to preload, and the template and its forks as `ps` shows them."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.processes import descendants_of
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    Module = Callable[..., dict[str, str]]

_ROOT = Path(__file__).parents[2]
#: In the first attempt the others fail when the gate is opened; rank 0, told to stop, goes when it is opened again.
ENDS_AT_THE_GATE = (
    "if attempt == 0 and rank == 0:\n"
    "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "    say('there')\n    signal.sigwait({signal.SIGTERM})\n    say('stopping')\n"
    "    open(os.environ['GATE']).read()\n    sys.exit(0)\n"
    "if attempt == 0: open(os.environ['GATE']).read(); sys.exit(1)\n"
)
#: Whether the worker came from a template that had imported the module.
SAYS_HOW = "say('warm' if 'heavy' in sys.modules else 'cold', rank, attempt)\n"


def module_writer(directory: Path) -> Module:
    """Return a function that writes the module `heavy`, and returns the variables with which it can be imported."""

    def write(body: str = "") -> dict[str, str]:
        place = directory / "modules"
        place.mkdir(exist_ok=True)
        (place / "heavy.py").write_text(textwrap.dedent(body), encoding="utf-8")
        return {"PYTHONPATH": f"{place}:{_ROOT}", "GATE": str(directory / "gate"), "OMP_NUM_THREADS": "1"}

    os.mkfifo(directory / "gate")
    return write


def title_of(pid: int) -> str:
    """Return a process's command line as `ps` shows it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").rstrip("\0").replace("\0", " ")
    except OSError:
        return ""


def wait_titled(launcher: int, title: str, count: int = 1) -> list[int]:
    """Wait until so many descendants of a launcher have a title; return their pids."""

    def find() -> list[int]:
        return [pid for pid in descendants_of(launcher) if title_of(pid) == title]

    return wait_until(lambda: len(found := find()) == count and found, what=f"{count} x {title!r}") or []


def wait_template(launcher: int) -> int:
    """Wait for a launcher's template; return its pid."""
    return wait_titled(launcher, "elastic-run: template")[0]
