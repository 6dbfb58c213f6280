"""Brings an agent into its rounds: through its job of several nodes, or through a rendezvous handler.

A handler that blocks waits in a thread of its own, so that the agent answers a signal at any moment.
"""

from __future__ import annotations

from elastic_run.core.agent.messages import RoundFailed, RoundFormed
from elastic_run.rendezvous.errors import RendezvousGracefulExitError, is_kind
from elastic_run.signals import restore_signals
from elastic_run.store.tcpstore.listener import PortTakenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.core.agent.messages import Event


class Joining:
    """Joins the rounds of one agent.

    Args:
        parts: The parts of the agent.

    Attributes:
        began_at: Monotonic seconds at which the last round was asked for.
        handler_error: The exception of a foreign handler, or None.
    """

    def __init__(self, parts: AgentParts) -> None:
        self.began_at = 0.0
        self.handler_error: Exception | None = None
        self._context = parts.context
        self._round_join = parts.round_join
        self._job = parts.job
        self._loop = parts.loop
        self._feed = parts.feed

    def begin(self, number: int, *, is_joined: bool) -> None:
        """Join a round; an event tells when it is formed, or that it can't be.

        Args:
            number: The agent's number of the round.
            is_joined: Whether that has happened already (`early_start`).
        """
        self.began_at = self._loop.now()
        if is_joined:
            self._feed(RoundFormed(number))
            return
        try:
            if self._job is not None:
                self._job.join()
                self._job.entrust_connections(self._context.guardian)
                return
            self._round_join.offer_store()
        except PortTakenError as error:
            detail = self._round_join.describe_taken_port(error)
            self._feed(RoundFailed(number, verdict="usage", detail=detail))
            return
        except (ValueError, OSError) as error:
            verdict = "usage" if isinstance(error, ValueError) else "cannot_start"
            self._feed(RoundFailed(number, verdict=verdict, detail=str(error)))
            return
        if self._round_join.is_immediate:
            self._ask_handler(number)
        else:
            import threading

            threading.Thread(target=self._ask_handler, args=(number,), daemon=True).start()

    def _ask_handler(self, number: int) -> None:
        """Ask the handler for a place, in any thread, and bring the answer to the loop's thread."""
        event: Event
        if not self._round_join.is_immediate and self._context.mask is not None:
            # A process that a plug-in starts here must not begin with signals blocked.
            restore_signals(self._context.mask)
        try:
            self._round_join.take_place()
            event = RoundFormed(number)
        except Exception as error:  # noqa: BLE001 - a plug-in's error; torch's classes of errors are not ours
            from elastic_run.utils.exceptions import describe_exception

            self.handler_error = error
            is_exit = is_kind(error, RendezvousGracefulExitError)
            detail = str(error) if is_exit else describe_exception(error)
            event = RoundFailed(number, verdict="success" if is_exit else "rendezvous", detail=detail)
        self._loop.call_soon_threadsafe(lambda: self._feed(event))
