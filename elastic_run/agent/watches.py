"""What looks after a running round beside the loop, each only where it was asked for: stuck workers, timers, newcomers.

Imported as they are needed: most jobs have none of them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.newcomers import NewcomerWatch
    from elastic_run.agent.round import Round
    from elastic_run.agent.stuck import StuckWatch
    from elastic_run.agent.surroundings import Surroundings
    from elastic_run.agent.timers import TimerWatch
    from elastic_run.loop import Loop
    from elastic_run.timer.requests import FileTimerRequest


class Watches:
    """The watches of one agent.

    Args:
        loop: The agent's loop.
        around: The workers and what the user asked for.
        is_polled: Whether only asking the rendezvous tells that nodes wait, as with a foreign handler.
        say: Tells the user one line.
        on_stuck: Called with a round's number when a worker of it doesn't come out of uninterruptible sleep.
        on_newcomers: Called with a round's number when nodes wait for the next one.
        on_timer: Called with the name of an event of the workers' timers, and the request that it is about.
    """

    def __init__(
        self,
        loop: Loop,
        around: Surroundings,
        *,
        is_polled: bool,
        say: Callable[[str], None],
        on_stuck: Callable[[int], None],
        on_newcomers: Callable[[int], None],
        on_timer: Callable[[str, FileTimerRequest | None], None],
    ) -> None:
        self._loop = loop
        self._around = around
        self._is_polled = is_polled
        self._say = say
        self._on_stuck = on_stuck
        self._on_newcomers = on_newcomers
        self._on_timer = on_timer
        self._round: Round | None = None
        self._stuck: StuckWatch | None = None
        self._timers: TimerWatch | None = None
        self._newcomers: NewcomerWatch | None = None

    def begin(self, current: Round) -> None:
        """Look after a round whose workers run."""
        self._round = current
        if self._around.options.stuck_timeout > 0:
            self._stuck = self._watch_stuck(current)
        if self._around.timers is not None and self._timers is None:
            self._timers = self._watch_timers()
        if self._is_polled:
            self._newcomers = self._watch_newcomers(current.number)

    def end_round(self) -> None:
        """Look no more after this round: its workers are being stopped."""
        if self._timers is not None:
            self._timers.clear()
        for watch in (self._stuck, self._newcomers):
            if watch is not None:
                watch.close()

    def close(self) -> None:
        """Give back what outlasts the rounds."""
        if self._timers is not None:
            self._timers.close()

    def _watch_stuck(self, current: Round) -> StuckWatch:
        from elastic_run.agent.stuck import StuckWatch  # noqa: PLC0415 - see above

        workers = current.workers
        return StuckWatch(
            self._loop,
            self._around.options.stuck_timeout,
            pids=lambda: [workers.pids[rank] for rank in workers.alive],
            on_stuck=lambda _: self._on_stuck(current.number),
        )

    def _watch_timers(self) -> TimerWatch | None:
        from elastic_run.agent.timers import watch_timers  # noqa: PLC0415 - see above

        return watch_timers(self._loop, self._around, lambda: self._round, self._say, self._on_timer)

    def _watch_newcomers(self, number: int) -> NewcomerWatch:
        from elastic_run.agent.newcomers import NewcomerWatch  # noqa: PLC0415 - see above

        spec = self._around.group.spec
        return NewcomerWatch(self._loop, spec.rdzv_handler, spec.monitor_interval, lambda: self._on_newcomers(number))
