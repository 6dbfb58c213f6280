"""Exceptions that are the last output of a rank: the weaker sign of a failed rank that lives.

A worker tells of the exception that has ended its main thread (`worker_start`). It can't if its program has replaced
`sys.excepthook` by a function that calls no other hook, as the package rich does. So a rank that has written an
exception, and then nothing for a while, is asked for its stacks: the handler in Python tells what no hook has told.

A rank whose Python has no handler tells nothing, and an exception that a program has handled stands on stderr as well.
Of both the last words are shown only where the job hangs or is stopped; nothing else follows from them.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stacks import is_in_shutdown, parse_stacks
from elastic_run.core.failure.traceback_text import parse_exception
from elastic_run.multiprocessing.output.worker_output import SILENCE
from elastic_run.report.lines import last_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.diagnosis.stacks import Dump
    from elastic_run.core.failure.root_cause import ExceptionText
    from elastic_run.loop import Loop, Timer

__all__ = ["LastWords", "find_last_words", "keep_last_words"]

_TRACEBACK = b"Traceback (most recent call last)"
#: An exit code with which an exception counts only if nothing follows it.
_OWN_CODE = 2
#: Seconds that a rank gets for its stacks.
_WAIT_LIMIT = 1.5


def find_last_words(current: Round, local_rank: int) -> ExceptionText | None:
    """Return the exception that is the last output of a worker on stderr, or None."""
    said = current.output.tail(local_rank, is_thorough=False)
    return parse_exception(said.decode(errors="replace"), exitcode=_OWN_CODE) if _TRACEBACK in said else None


def keep_last_words(current: Round, now: float) -> None:
    """Keep the exceptions that are the last output of workers which can't tell of their exceptions, before a stop."""
    for rank in current.workers.alive - current.uncaught.keys():
        written, activity = find_last_words(current, rank), current.output.activities.get(rank)
        if written and not current.listen_for_stacks().has_handler(rank, current.workers.pids[rank]):
            current.last_words[rank] = last_words(written, None if activity is None else now - activity.last)


class LastWords:
    """Looks at each rank of a round that has begun to be silent.

    Args:
        loop: The agent's.
        current: The round.
    """

    def __init__(self, loop: Loop, current: Round) -> None:
        self._loop = loop
        self._round = current
        self._timers: dict[int, Timer] = {}
        for rank in current.output.activities:
            self.note_output(rank)

    def note_output(self, rank: int) -> None:
        """Watch a local rank that has written something after a silence."""
        if rank not in self._timers:
            self._timers[rank] = self._loop.call_later(SILENCE, lambda: self._look(rank))

    def close(self) -> None:
        """Look no more."""
        for timer in self._timers.values():
            timer.cancel()

    def _look(self, rank: int) -> None:
        del self._timers[rank]
        left = self._round.output.activities[rank].last + SILENCE - self._loop.now()
        if left > 0:
            self._timers[rank] = self._loop.call_later(left, lambda: self._look(rank))
        elif self._is_silent(rank) and find_last_words(self._round, rank) is not None:
            self._ask(rank, insists=False)

    def _is_silent(self, rank: int) -> bool:
        return rank in self._round.workers.alive and rank not in self._round.uncaught

    def _ask(self, rank: int, *, insists: bool) -> None:
        pids = {rank: self._round.workers.pids[rank]}

        def take(dumps: dict[int, Dump]) -> None:
            stacks = parse_stacks(dumps[rank].text if rank in dumps else "")
            # A main thread that waits for other threads at Python's end does not come to the handler by itself.
            if not insists and self._is_silent(rank) and is_in_shutdown(stacks):
                self._ask(rank, insists=True)

        self._round.listen_for_stacks().ask(pids, _WAIT_LIMIT, take, insists=insists, spares=True)
