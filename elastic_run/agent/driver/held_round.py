"""A formed round that waits until its warm workers are ready, or are given up and start cold (`--preload`)."""

from __future__ import annotations

from elastic_run.core.agent import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.agent.messages import Event
    from elastic_run.multiprocessing.warm.worker_pool import WorkerPool


class HeldRound:
    """Keeps a round back while its workers are forked."""

    def __init__(self, worker_pool: WorkerPool, begin: Callable[[messages.RoundFormed], None]) -> None:
        self._worker_pool = worker_pool
        self._begin = begin
        self._round: messages.RoundFormed | None = None

    def takes(self, event: Event) -> bool:
        """Whether an event is held back or dropped during the wait; other events may end the wait.

        Args:
            event: The event. A verdict is processed at once, and the round never begins. Any other event of the round
                is processed after the round has begun.
        """
        if isinstance(event, messages.Signalled):
            return False
        if isinstance(event, messages.RoundFormed) and not self._worker_pool.is_settled:
            self._round = event
            self._worker_pool.await_settled(self._release)
            return True
        if self._round is None or isinstance(event, messages.JobOver):
            return False
        if isinstance(event, messages.RoundWarned):
            return True  # there are no workers to warn
        self._release()
        return False

    def _release(self) -> None:
        event, self._round = self._round, None
        if event is not None:
            self._begin(event)
