"""A round that has formed, and is begun when its warm workers are there or given up (`--preload`)."""

from __future__ import annotations

from elastic_run.core import supervision

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.core.supervision import Event
    from elastic_run.multiprocessing.warm.engagement import WarmWorkers


class HeldRound:
    """Keeps a round back while its workers are forked.

    Args:
        warm: The agent's warm workers.
        begin: Called with the round that begins.
    """

    def __init__(self, warm: WarmWorkers, begin: Callable[[supervision.RoundFormed], None]) -> None:
        self._warm = warm
        self._begin = begin
        self._round: supervision.RoundFormed | None = None

    def takes(self, event: Event) -> bool:
        """Whether an event waits here, or is dropped meanwhile; others may end the wait.

        Args:
            event: What has happened. The verdict finds no round begun; what else concerns the round comes after it.
        """
        if isinstance(event, supervision.Signalled):
            return False
        if isinstance(event, supervision.RoundFormed) and not self._warm.is_settled:
            self._round = event
            self._warm.await_settled(self._release)
            return True
        if self._round is None or isinstance(event, supervision.JobOver):
            return False
        if isinstance(event, supervision.RoundWarned):
            return True  # nobody runs who could be warned
        self._release()
        return False

    def _release(self) -> None:
        event, self._round = self._round, None
        if event is not None:
            self._begin(event)
