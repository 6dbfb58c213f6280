"""How long an agent goes on without an answer of the job's store, and what it says meanwhile.

For a store that has answered before, no line appears within the lease: the workers go on. For a store that was never
reached, the first line appears after two seconds. Lines from time to time (`report.wait_texts`) say what is wrong, and
for how long the agent tries; after that the store is lost. The agent tries for `join_timeout` if it never reached the
store, or if the store comes back by itself (etcd, a file). It gives up a store that dies with its host (c10d) sooner: a
refused connection means that the process of the store is gone, with its contents. With successors it gives up after a
lease, or after a second of refusals: then the next endpoint serves the store, and gets the time that a node needs to
notice. The time that is left may be too short for the last answer of a store that is busy: so the messages name the
answer before it.
"""

from __future__ import annotations

import time

from elastic_run.rendezvous.session import Lost, Notice, Waiting
from elastic_run.report.wait_texts import FIRST, LIVE_INTERVAL, Repetition, describe_trouble, trouble_texts
from elastic_run.store.errors import REFUSED, SILENT, UNREADY, UNRESOLVED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.context import SessionContext
    from elastic_run.store.errors import StoreError

#: Seconds after which a host that refuses connections is gone, where another takes over.
GONE_AFTER = 1.0
#: Seconds beyond the lease for which a c10d store is tried whose host refuses connections, or is dark.
REFUSED_FOR = 5.0
DARK_FOR = 60.0


class RetryDeadline:
    """How long one agent waits for its store.

    Args:
        context: The data that the session's threads share.
    """

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._since: float | None = None
        self._refused_since: float | None = None
        self._last_line: float | None = None
        self._repetition = Repetition()
        self._was_reached = False
        self._has_moved = False
        self._answer = ""
        self._listener = ("", "")  # the trouble for which it was looked up, and the clause about it

    def begin(self) -> None:
        """Note that the store is asked for the first time from now on: what that takes counts, too."""
        self._since = time.monotonic()

    @property
    def time_left(self) -> float:
        """Seconds until the store is given up, should it not answer before; any number while it answers."""
        return self._context.config.join_timeout if self._since is None else self._left(time.monotonic())

    @property
    def attempt_limit(self) -> float:
        """Seconds that one attempt may take: `time_left`, and at first no longer than until the first line is due."""
        left = self.time_left
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        return left if self._was_reached or waited >= FIRST else min(left, FIRST - waited)

    @property
    def is_tried(self) -> bool:
        """Whether the last attempt failed."""
        return self._since is not None

    def recovered(self) -> str:
        """Note that the store answers.

        Returns:
            A line for the user if there were some before, else an empty string.
        """
        silent_for = 0.0 if self._since is None else time.monotonic() - self._since
        was_told, verb = self._last_line is not None, "answers again" if self._was_reached else "answers"
        self._since = self._last_line = self._refused_since = None
        self._was_reached = True
        self._has_moved = False
        self._answer = ""
        return f"the store at {self._context.backend.name} {verb} after {silent_for:.0f} s" if was_told else ""

    def restart(self) -> None:
        """Begin again: another endpoint is tried from now on."""
        self._since = time.monotonic()
        self._refused_since = None
        self._has_moved = True
        self._answer = ""

    def failed(self, error: StoreError, asked_at: float) -> Notice | Waiting | Lost | None:
        """Note that an attempt failed.

        Args:
            error: What was wrong.
            asked_at: Monotonic seconds at which the store was asked.

        Returns:
            An event for the agent: a line when one is due, `Lost` after too long a time; otherwise None.
        """
        now = time.monotonic()
        reason, trouble = getattr(error, "reason", SILENT), getattr(error, "cause", str(error))
        if reason == UNRESOLVED and not self._was_reached:
            trouble = (
                f"{trouble}; if the name stays unknown, give all nodes an address in its place{self._describe_hint()}"
            )
        self._answer = (trouble if reason == UNREADY else getattr(error, "answer", "")) or self._answer
        if reason == SILENT and self._answer:
            trouble = f"{trouble}; its last answer: {self._answer}"
        fenced_for = self._context.signals.fenced_at - self._context.sender.last_heartbeat_at
        if fenced_for > 0:
            trouble = f"{trouble}; the workers were stopped after {fenced_for:.0f} s (--fence-after=lease)"
        if self._since is None:
            # The wait for the answer counts, unless this process was stopped meanwhile: that says nothing of the store.
            self._since = max(asked_at, now - self._context.answer_timeout)
            self._last_line = None
        self._refused_since = (self._refused_since or now) if reason == REFUSED else None
        left = self._left(now)
        if left > 0 and not self._is_line_due(trouble, now):
            return None
        if trouble != self._listener[0]:
            self._listener = trouble, self._context.backend.describe_listener(reason)
        trouble, reason = (f"{text}{self._listener[1]}" for text in (trouble, reason))
        if left <= 0:
            return self._lost(now, trouble)
        self._last_line = now
        name, since, until = self._context.backend.name, self._since, now + left
        if not self._context.shows_waiting:
            return Notice(describe_trouble(name, trouble, now - since, left))
        return Waiting(
            lambda at: trouble_texts(name, trouble, at - since, until - at, reason=reason), is_for_nodes=False
        )

    def _is_line_due(self, trouble: str, now: float) -> bool:
        is_live = self._context.shows_waiting
        if self._last_line is None:
            self._repetition = Repetition()
            first = self._context.config.lease if self._was_reached else LIVE_INTERVAL if is_live else FIRST
            return now - (self._since or now) >= first and self._repetition.is_due(trouble, now)
        return now - self._last_line >= LIVE_INTERVAL if is_live else self._repetition.is_due(trouble, now)

    def _describe_hint(self) -> str:
        """Name the host where srun was started. It may be a login node, so that it is only named."""
        address = self._context.node_config.launch_address
        return f" ({address} if srun was started on the first node: SLURM_LAUNCH_NODE_IPADDR)" if address else ""

    def _left(self, now: float) -> float:
        config = self._context.config
        since = self._since or now
        left = since + config.join_timeout - now
        if not self._was_reached or not self._context.backend.dies_with_host:
            return left
        if self._context.backend.successors and not self._has_moved:
            left = min(left, since + config.lease - now)
            return left if self._refused_since is None else min(left, self._refused_since + GONE_AFTER - now)
        left = min(left, since + config.lease + DARK_FOR - now)
        if self._refused_since is not None:
            left = min(left, self._refused_since + config.lease + REFUSED_FOR - now)
        return left

    def _lost(self, now: float, trouble: str) -> Lost:
        silent_for = now - (self._since or now)
        name = self._context.backend.name
        if not self._was_reached:
            return Lost("rendezvous", f"the store at {name} could not be reached for {silent_for:.0f} s: {trouble}")
        backend = self._context.backend
        gone = "; the node that served it is gone" if backend.dies_with_host else ""
        if gone and backend.kind == "c10d" and not backend.successors:
            gone += "; with several endpoints (--rdzv-endpoint=a,b,c) the job goes on at the next endpoint"
        return Lost("store_lost", f"the store at {name} has been out of reach for {silent_for:.0f} s: {trouble}{gone}")
