"""How long an agent looks for its coordinator, and what it says meanwhile.

No line appears within the lease where the agent has had a coordinator before: the workers go on. Where it never had
one, the first line appears after two seconds. Lines from time to time (`report.waiting`) say what is wrong, and for
how long the agent looks; after that the job is lost for it. It looks for `join_timeout` where it never had a
coordinator, or where another one may follow (several endpoints, a lease). Where only one is possible it gives up
sooner: a refused connection means that its process is gone.
"""

from __future__ import annotations

import time

from elastic_run.core.job.founding import ONLY_ONE
from elastic_run.rendezvous.events import Lost, Notice, Waiting
from elastic_run.report.waiting import FIRST, LIVE_INTERVAL, Repetition, describe_trouble, trouble_texts
from elastic_run.store.errors import REFUSED, SILENT, UNRESOLVED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.config import JobConfig
    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.events import SessionEvent
    from elastic_run.store.errors import StoreError

#: Seconds beyond the lease for which a single endpoint is tried that refuses connections, or is dark.
REFUSED_FOR = 5.0
DARK_FOR = 60.0


class Outage:
    """The time without a coordinator."""

    def __init__(
        self, place: Place, config: JobConfig, deliver: Callable[[SessionEvent], None], *, shows_waiting: bool
    ) -> None:
        self.was_reached = False  # whether this agent has had a coordinator
        self._place = place
        self._config = config
        self._deliver = deliver
        self._shows_waiting = shows_waiting
        self._since: float | None = None
        self._refused_since: float | None = None
        self._last_line: float | None = None
        self._repetition = Repetition()
        self._listener = ("", "")  # the trouble for which it was looked up, and the clause about it

    def begin(self) -> None:
        """Note that there is no coordinator from now on."""
        if self._since is None:
            self._since = time.monotonic()

    def end(self) -> None:
        """Note that there is a coordinator; if there were lines before, the user is told."""
        silent_for = 0.0 if self._since is None else time.monotonic() - self._since
        was_told, verb = self._last_line is not None, "answers again" if self.was_reached else "answers"
        self._since = self._last_line = self._refused_since = None
        self.was_reached = True
        if was_told:
            self._deliver(Notice(f"the store at {self._place.name} {verb} after {silent_for:.0f} s"))
        if was_told and self._shows_waiting:
            self._deliver(Waiting(None, is_for_nodes=False))

    @property
    def attempt_limit(self) -> float:
        """Seconds that one attempt may take: at first no longer than until the first line is due."""
        now = time.monotonic()
        left = max(0.001, self._left(now))
        waited = 0.0 if self._since is None else now - self._since
        return left if self.was_reached or waited >= FIRST else min(left, max(0.1, FIRST - waited))

    def failed(self, name: str, error: StoreError) -> None:
        """Note that an attempt at an endpoint failed; the user or, after too long a time, the agent is told."""
        now = time.monotonic()
        self.begin()
        reason, trouble = getattr(error, "reason", SILENT), getattr(error, "cause", str(error))
        if reason == UNRESOLVED and not self.was_reached:
            trouble += "; if the name stays unknown, give all nodes an address in its place"
        self._refused_since = (self._refused_since or now) if reason == REFUSED else None
        left = self._left(now)
        if left > 0 and not self._is_line_due(trouble, now):
            return
        if trouble != self._listener[0]:
            self._listener = trouble, self._place.describe_listener(name, reason)
        trouble, reason = trouble + self._listener[1], reason + self._listener[1]
        if left <= 0:
            self._deliver(self._lost(now, trouble))
        else:
            self._last_line = now
            name, since, until = self._place.name, self._since or now, now + left

            def texts(at: float) -> tuple[str, ...]:
                return trouble_texts(name, trouble, at - since, until - at, reason=reason)

            line = Notice(describe_trouble(name, trouble, now - since, left))
            self._deliver(Waiting(texts, is_for_nodes=False) if self._shows_waiting else line)

    def _is_line_due(self, trouble: str, now: float) -> bool:
        if self._last_line is None:
            self._repetition = Repetition()
            first = self._config.lease if self.was_reached else LIVE_INTERVAL if self._shows_waiting else FIRST
            return now - (self._since or now) >= first and self._repetition.is_due(trouble, now)
        return now - self._last_line >= LIVE_INTERVAL if self._shows_waiting else self._repetition.is_due(trouble, now)

    def _left(self, now: float) -> float:
        since, lease = self._since or now, self._config.lease
        ends = [since + self._config.join_timeout]
        if self.was_reached and self._place.choice == ONLY_ONE:
            ends.append(since + lease + DARK_FOR)
            if self._refused_since is not None:
                ends.append(self._refused_since + lease + REFUSED_FOR)
        return min(ends) - now

    def _lost(self, now: float, trouble: str) -> Lost:
        silent_for = now - (self._since or now)
        place, name = self._place, self._place.name
        if not self.was_reached:
            return Lost("rendezvous", f"the store at {name} could not be reached for {silent_for:.0f} s: {trouble}")
        gone = "; the node that served it is gone" if place.dies_with_host else ""
        if gone and place.kind == "c10d" and place.choice == ONLY_ONE:
            gone += "; with several endpoints (--rdzv-endpoint=a,b,c) the job goes on at the next endpoint"
        return Lost("store_lost", f"the store at {name} has been out of reach for {silent_for:.0f} s: {trouble}{gone}")
