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
        found = [pid for beginning in _TITLES for pid, title in titles.items() if title.startswith(beginning)]
        return found if len(found) == len(_TITLES) else []

    return wait_until(find, deadline=deadline, what=f"two guardians of {launcher}")


def _read_title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return ""
