"""Ranks whose main thread an exception has ended, and whose process lives: other ranks wait for them without end.

A thread, a pool, an exit function or a destructor keeps such a process alive; an exit function may do useful work, such
as saving a checkpoint. So the user is told after a few seconds, and the rank counts as failed only after the grace
period that every worker gets to end (`--shutdown-timeout`).

A worker tells of the exception that has ended its main thread (`worker_start`). It can't if its program has replaced
`sys.excepthook` by a function that calls no other hook, as the package rich does. So a rank that has written an
exception, and then nothing for a while, is asked for its stacks: the handler in Python tells what no hook has told.

A rank whose Python has no handler tells nothing, and an exception that a program has handled stands on stderr as well.
Of both the last words are shown only where the job hangs or is stopped; nothing else follows from them.
"""

from __future__ import annotations

from elastic_run.core.failure.hang import describe_survival
from elastic_run.core.failure.stacks import is_in_shutdown, parse_stacks
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.multiprocessing.output.worker_output import SILENCE
from elastic_run.report import lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.failure.root_cause import ExceptionText
    from elastic_run.core.failure.stacks import Dump
    from elastic_run.loop import Timer

__all__ = ["FailedRanks", "find_last_words", "keep_last_words"]

#: Seconds from an exception to the line about it; most workers have ended by then.
_PATIENCE = 5.0
#: Seconds from an exception in which Python ends a program that nothing keeps alive.
_LEAST = 1.0
#: Seconds that a rank gets for its stacks.
_WAIT_LIMIT = 1.5
_TRACEBACK = b"Traceback (most recent call last)"
#: An exit code with which an exception counts only if nothing follows it.
_OWN_CODE = 2


class FailedRanks:
    """The ranks of one round that have failed, and live; `fail` lets a local rank count as failed."""

    def __init__(self, parts: AgentParts, current: Round, fail: Callable[[int], None]) -> None:
        self._loop = parts.loop
        self._say = parts.say
        self._round = current
        self._fail = fail
        self._limit = max(parts.context.options.shutdown_timeout, _LEAST)
        self._timers: list[Timer] = []
        self._silences: dict[int, Timer] = {}
        for rank in current.output.activities:
            self.watch_silence(rank)

    def close(self) -> None:
        """Watch no more."""
        for timer in (*self._timers, *self._silences.values()):
            timer.cancel()

    # --- ranks that have told of their exception -------------------------------------------------------------------
    def add(self, rank: int) -> None:
        """Watch a local rank whose worker has told of its exception."""
        at = self._round.uncaught[rank].at
        self._timers += [
            self._loop.call_at(at + min(_PATIENCE, self._limit / 2), lambda: self._ask_survival(rank)),
            self._loop.call_at(at + self._limit, lambda: self._fail(rank) if self._is_alive(rank) else None),
        ]

    def _is_alive(self, rank: int) -> bool:
        return rank in self._round.workers.alive

    def _ask_survival(self, rank: int) -> None:
        if self._is_alive(rank):
            pids, wait_limit = {rank: self._round.workers.pids[rank]}, min(_WAIT_LIMIT, self._limit / 4)
            requests = self._round.listen_for_stacks()
            requests.ask(pids, wait_limit, lambda dumps: self._tell(rank, dumps.get(rank)), spares=True)

    def _tell(self, rank: int, dump: Dump | None) -> None:
        if self._is_alive(rank):
            told = self._round.uncaught[rank]
            self._round.survivals[rank] = survival = describe_survival(told, dump)
            left = told.at + self._limit - self._loop.now()
            self._say(lines.lives_on(self._round.global_ranks[rank], told.exception, survival, left))

    # --- ranks that have become silent -----------------------------------------------------------------------------
    def watch_silence(self, rank: int) -> None:
        """Watch a local rank that has written something after a silence."""
        if rank not in self._silences:
            self._silences[rank] = self._loop.call_later(SILENCE, lambda: self._look(rank))

    def _look(self, rank: int) -> None:
        del self._silences[rank]
        left = self._round.output.activities[rank].last + SILENCE - self._loop.now()
        if left > 0:
            self._silences[rank] = self._loop.call_later(left, lambda: self._look(rank))
        elif self._is_untold(rank) and find_last_words(self._round, rank) is not None:
            self._ask_untold(rank, insists=False)

    def _is_untold(self, rank: int) -> bool:
        return self._is_alive(rank) and rank not in self._round.uncaught

    def _ask_untold(self, rank: int, *, insists: bool) -> None:
        def take(dumps: dict[int, Dump]) -> None:
            stacks = parse_stacks(dumps[rank].text if rank in dumps else "")
            # A main thread that waits for other threads at Python's end does not come to the handler by itself.
            if not insists and self._is_untold(rank) and is_in_shutdown(stacks):
                self._ask_untold(rank, insists=True)

        pids = {rank: self._round.workers.pids[rank]}
        self._round.listen_for_stacks().ask(pids, _WAIT_LIMIT, take, insists=insists, spares=True)


def find_last_words(current: Round, local_rank: int) -> ExceptionText | None:
    """Return the exception that is the last output of a worker on stderr, or None."""
    said = current.output.tail(local_rank, is_thorough=False)
    return parse_exception(said.decode(errors="replace"), exitcode=_OWN_CODE) if _TRACEBACK in said else None


def keep_last_words(current: Round, now: float) -> None:
    """Store the exceptions that are the last output of workers which can't tell of their exceptions, before a stop."""
    for rank in current.workers.alive - current.uncaught.keys():
        written, activity = find_last_words(current, rank), current.output.activities.get(rank)
        if written and not current.listen_for_stacks().has_handler(rank, current.workers.pids[rank]):
            current.last_words[rank] = lines.last_words(written, None if activity is None else now - activity.last)
