"""Watches for workers in uninterruptible sleep (state D): a driver or a file system does not answer.

The watch is off unless TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT is set. The kernel reports no change of a process's
state, so the watch reads it a few times within the timeout (an exception that law 2 lists). A short stay in state D is
normal disk traffic.
"""

from __future__ import annotations

import psutil

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_run.loop import Loop, Timer

_LOOKS = 4


class DStateWatch:
    """Calls `on_stuck` once, when a process has been in uninterruptible sleep for too long."""

    def __init__(
        self, loop: Loop, timeout: float, *, pids: Callable[[], Iterable[int]], on_stuck: Callable[[int], None]
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._pids = pids
        self._on_stuck = on_stuck
        self._since: dict[int, float] = {}
        self._timer: Timer | None = None
        self._look()

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.now()
        stuck = {pid for pid in self._pids() if _is_uninterruptible(pid)}
        self._since = {pid: self._since.get(pid, now) for pid in stuck}
        for pid, since in self._since.items():
            if now - since >= self._timeout:
                self._on_stuck(pid)
                return
        self._timer = self._loop.call_later(self._timeout / _LOOKS, self._look)


def _is_uninterruptible(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP
    except (psutil.Error, OSError):
        return False  # it has ended, or no file can be opened
