"""Keeps a guardian process running: starts it, replaces it when it dies, dismisses it at the end.

If a guardian can't be kept alive (an embedding program without an interpreter, a process limit), it is started again
`_TRIES` times, after pauses that double. Then the job goes on without a guardian, and the user is told.
"""

from __future__ import annotations

from elastic_run.multiprocessing.process import process_table
from elastic_run.signals import SIGKILL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.process.guardian import Guardian

_TRIES = 5
_FIRST_PAUSE = 0.1
#: Seconds that the guardian gets to leave after the farewell.
_FAREWELL = 2.0


class GuardianKeeper:
    """Starts the guardian again when it dies."""

    def __init__(self, loop: Loop, guardian: Guardian, *, say: Callable[[str], None]) -> None:
        self._loop = loop
        self._guardian = guardian
        self._say = say
        self._losses = 0
        self._is_present = False
        self._is_over = False

    def start(self) -> None:
        """Watch the guardian; start it unless that was done already."""
        self._guardian.attach(self._loop)
        self._watch(self._guardian.pid or self._guardian.start())

    def _watch(self, pid: int) -> None:
        self._is_present = True
        self._loop.watch_exit(pid, lambda _: self._on_exit())

    def _on_exit(self) -> None:
        self._is_present = False
        self._lost()

    def _lost(self) -> None:
        if self._is_over:
            return
        self._losses += 1
        if self._losses == 1:
            self._say("the guardian process was killed; starting another")
        if self._losses > _TRIES:
            self._say("each guardian process was killed: if the launcher is killed as well, its workers keep running")
        elif self._losses == 1:
            self._replace()
        else:
            self._loop.call_later(_FIRST_PAUSE * 2.0**self._losses, self._replace)

    def _replace(self) -> None:
        if self._is_over:
            return
        try:
            self._watch(self._guardian.start())
        except OSError:
            self._lost()

    def close(self, *, is_clean: bool) -> None:
        """Let the guardian go, and wait a moment until it has gone.

        Args:
            is_clean: Whether nothing is left to guard. If not it does its work first.
        """
        self._is_over = True
        if is_clean:
            self._guardian.dismiss()
        else:
            self._guardian.alarm()
        # Until it was reaped: a program that launches again and again must not collect zombies.
        if not self._wait_gone() and is_clean:
            # It was stopped, and would do harm if it went on one day. The second one reads the farewell then.
            process_table.signal_children((self._guardian.pid,), SIGKILL)
            self._wait_gone()
        self._guardian.close()

    def _wait_gone(self) -> bool:
        return self._loop.run_until(lambda: not self._is_present, self._loop.now() + _FAREWELL)
