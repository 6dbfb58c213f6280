"""Ranks whose main thread an exception has ended, and whose process lives: other ranks wait for them without end.

A thread, a pool, an exit function or a destructor keeps such a process alive; an exit function may do useful work, such
as saving a checkpoint. So the user is told after a few seconds, and the rank counts as failed only after the grace
period that every worker gets to end (`--shutdown-timeout`).
"""

from __future__ import annotations

from elastic_run.core.failure.uncaught import describe_survival
from elastic_run.report import lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.round import Round
    from elastic_run.core.diagnosis.stacks import Dump
    from elastic_run.loop import Loop, Timer

#: Seconds from an exception to the line about it; most workers have ended by then.
_PATIENCE = 5.0
#: Seconds from an exception in which Python ends a program that nothing keeps alive.
_LEAST = 1.0
#: Seconds that a rank gets for its stacks.
_WAIT_LIMIT = 1.5


class FailedRanks:
    """The ranks of one round that have failed, and live.

    Args:
        loop: The agent's.
        current: The round.
        limit: Seconds after which they count as failed.
        say: Tells the user one line.
        on_failed: Called with the local rank of a rank that counts as failed from now on.
    """

    def __init__(
        self,
        loop: Loop,
        current: Round,
        *,
        limit: float,
        say: Callable[[str], None],
        on_failed: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._round = current
        self._limit = max(limit, _LEAST)
        self._say = say
        self._on_failed = on_failed
        self._timers: list[Timer] = []

    def add(self, rank: int) -> None:
        """Take a local rank whose worker has told of its exception."""
        at = self._round.uncaught[rank].at
        wait_limit = min(_WAIT_LIMIT, self._limit / 4)
        look_at = at + min(_PATIENCE, self._limit / 2)
        self._timers += [
            self._loop.call_at(look_at, lambda: self._ask(rank, wait_limit)),
            self._loop.call_at(at + self._limit, lambda: self._fail(rank)),
        ]

    def close(self) -> None:
        """Watch no more."""
        for timer in self._timers:
            timer.cancel()

    def _ask(self, rank: int, wait_limit: float) -> None:
        if rank in self._round.workers.alive:
            pids = {rank: self._round.workers.pids[rank]}
            requests = self._round.listen_for_stacks()
            requests.ask(pids, wait_limit, lambda dumps: self._tell(rank, dumps.get(rank)), spares=True)

    def _tell(self, rank: int, dump: Dump | None) -> None:
        if rank not in self._round.workers.alive:
            return
        told = self._round.uncaught[rank]
        self._round.survivals[rank] = survival = describe_survival(told, dump)
        left = told.at + self._limit - self._loop.now()
        self._say(lines.lives_on(self._round.global_ranks[rank], told.exception, survival, left))

    def _fail(self, rank: int) -> None:
        if rank in self._round.workers.alive:
            self._on_failed(rank)
