"""Tells the user of a waiting node about the other nodes: which are there, which are missing, how long is left.

A waiting node asks the coordinator for the status: after two seconds (in a large job a bit later, not all nodes at
once), then at every keep-alive interval, or in a large job every ten seconds if the agent does not show it as one line
that it rewrites. Ordinary lines that say the same come more and more rarely. A spare node is told once that it is a
spare.
"""

from __future__ import annotations

import math

from elastic_run.rendezvous.session import Notice, Waiting
from elastic_run.report.wait_texts import (
    FIRST,
    INTERVAL,
    Repetition,
    describe_missing,
    describe_spare,
    missing_texts,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.job.wait_status import WaitStatus

__all__ = ["NEW", "READY", "WaitNotices"]

# Why a node waits: it has not been in a round yet, or its last round is over.
NEW = "new"
READY = "ready"
#: Phases of the job, as its status names them.
_GATHERING = "gathering"
_RUNNING = ("running", "warned")
#: Most nodes of a job in which every waiting node may look with each heartbeat.
_OFTEN = 256
#: Seconds until the next look where the coordinator had written nothing yet; it was elected just now.
_AGAIN = 0.25


class WaitNotices:
    """One node's view of the nodes that are there.

    Args:
        state: Says why this node waits for a round, `new` or `ready`; None while it doesn't.
        doubt: Returns a mistake that the user may have made, or ""; the argument says whether no other node is there.
        shows_waiting: Whether the agent shows the status in one line that it rewrites.
        deliver: Brings an event to the agent.
        spare_hint: A line for a node that comes to a job that runs already, or "".
        delay: Seconds by which the first look is later than the first line is due.

    Attributes:
        described: Which nodes were there at the last look of the current wait, and which are missing; otherwise "".
    """

    def __init__(
        self,
        *,
        state: Callable[[], str | None],
        doubt: Callable[[bool], str],
        shows_waiting: bool,
        deliver: Callable[[Notice | Waiting], None],
        spare_hint: str = "",
        delay: float = 0.0,
    ) -> None:
        self._first = FIRST + delay
        self._state = state
        self._doubt = doubt
        self._shows_waiting = shows_waiting
        self._deliver = deliver
        self._spare_hint = spare_hint
        self._since: float | None = None
        self._status_at: float | None = None
        self._looks_often = shows_waiting
        self._last_look = -math.inf
        self._repetition = Repetition()
        self._is_shown = False
        self._told_spare = ""
        self._told_lost: tuple[str, ...] = ()
        self.described = ""

    def first_due(self, now: float) -> float:
        """Return the monotonic time of the first look of a wait, infinity where none is due; notes that a wait begins.

        Args:
            now: Monotonic seconds.
        """
        if not self._is_waiting:
            self._since = self._status_at = None
            return math.inf
        if self._since is None:
            self._since = now
            self._repetition = Repetition()
        return math.inf if self._status_at is not None else max(self._since + self._first, self._last_look + _AGAIN)

    def next_look(self, now: float, interval: float) -> float:
        """Return the monotonic time at which to ask for the status, infinity while this node waits for nobody.

        Args:
            now: Monotonic seconds.
            interval: Seconds between two looks where the job is small.
        """
        due = self.first_due(now)
        if not self._is_waiting:
            self._told_spare = self.described = ""
            self._is_shown = False  # the line is over with the event that ends the wait
        if self._status_at is None:
            return due
        return max(self._last_look + interval, 0.0 if self._looks_often else self._status_at + INTERVAL)

    def note_look(self, now: float) -> None:
        """Note that the status was asked for."""
        self._last_look = now

    def take(self, status: WaitStatus, now: float) -> None:
        """Tell the agent what the status says, if that is due."""
        # Before it has heard of any node the coordinator, elected just now, knows nothing.
        if status.present and self._is_waiting:
            self._status_at = now
            self._looks_often = self._shows_waiting or status.max_nodes <= _OFTEN
            self._tell(status, now)

    @property
    def _is_waiting(self) -> bool:
        return self._state() is not None

    def _tell(self, status: WaitStatus, now: float) -> None:
        is_spare = status.phase in _RUNNING and self._state() != READY
        self.described = ""
        if status.phase == _GATHERING:
            self._told_spare = ""
            self._tell_missing(status, now)
        elif is_spare:
            self._tell_spare(describe_spare(status.present, status.max_nodes))
        else:
            self._hide()

    def _tell_missing(self, status: WaitStatus, now: float) -> None:
        hosts, present, wanted, left = status.hosts, status.present, status.max_nodes, status.seconds_left
        starts = status.starts
        doubt = self._doubt(present == 1)
        lost = f"not in the job: {', '.join(status.lost)}" if status.lost else ""
        remarks = tuple(filter(None, (doubt, status.missing, lost)))
        self.described = "; ".join((describe_missing(hosts, present, wanted, None), *remarks))
        if not self._shows_waiting:
            if self._repetition.is_due(self.described, now):
                line = describe_missing(hosts, present, wanted, left, starts=starts)
                self._deliver(Notice("; ".join((line, *remarks))))
            return
        self._tell_lost(status.lost)
        until = None if left is None else now + left

        def texts(at: float) -> tuple[str, ...]:
            forms = missing_texts(hosts, present, wanted, None if until is None else until - at, starts=starts)
            return "; ".join((forms[0], *remarks)), *forms

        self._show(Waiting(texts, is_for_nodes=True))

    def _tell_lost(self, clauses: tuple[str, ...]) -> None:
        """Tell of each node that is missing in a line that stays, once: a line that is rewritten may have no room."""
        for clause in clauses:
            if clause not in self._told_lost:
                self._deliver(Notice(f"not in the job: {clause}"))
        self._told_lost = clauses

    def _tell_spare(self, line: str) -> None:
        if self._shows_waiting:
            self._show(Waiting(lambda _: (line,), is_for_nodes=True))
        elif line != self._told_spare:
            self._deliver(Notice(line))
        if not self._told_spare and self._spare_hint:
            self._deliver(Notice(self._spare_hint))
        self._told_spare = line

    def _show(self, waiting: Waiting) -> None:
        self._is_shown = True
        self._deliver(waiting)

    def _hide(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._deliver(Waiting(None, is_for_nodes=True))
