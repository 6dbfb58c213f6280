"""The two guardians of a launcher, found by their titles."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import descendants_of
from tests.support.wait import DEADLINE, wait_until

_TITLES = ("guardian of", "second guardian of")


def wait_guardians(launcher: int, *, deadline: float = DEADLINE) -> list[int]:
    """Wait until both guardians of a launcher stand.

    Args:
        launcher: The launcher's pid.
        deadline: Seconds from now.

    Returns:
        Their pids, the first guardian's first.
    """

    def find() -> list[int]:
        titles = {pid: _read_title(pid) for pid in descendants_of(launcher)}
        found = {title: pid for pid, text in titles.items() for title in _TITLES if text.startswith(title)}
        return [found[title] for title in _TITLES] if len(found) == len(_TITLES) else []

    return wait_until(find, deadline=deadline, what=f"two guardians of {launcher}")


def _read_title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""
