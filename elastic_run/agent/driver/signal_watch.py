"""Answers the launcher's signals: they stop the job, are passed on, or reach the workers that handle them."""

from __future__ import annotations

import os

from elastic_run.core.agent.messages import Signalled
from elastic_run.multiprocessing.process.process_table import has_handler
from elastic_run.signals import SIGQUIT, SIGTERM, SIGWINCH, restore_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round import Round


class SignalWatch:
    """Watches the signals of one agent.

    Args:
        parts: The parts of the agent.
        hurry: Called at each signal that stops the job.
        find_round: Returns the round that runs, or None.
        show_stacks: Called at SIGQUIT; returns whether it shows stacks, so that the signal stops nothing.

    Attributes:
        seen: Number of stop signals so far.
    """

    def __init__(
        self,
        parts: AgentParts,
        *,
        hurry: Callable[[], None],
        find_round: Callable[[], Round | None],
        show_stacks: Callable[[], bool],
    ) -> None:
        self.seen = 0
        self._loop = parts.loop
        self._context = parts.context
        self._senders = parts.senders
        self._feed = parts.feed
        self._find_history = parts.find_history
        self._hurry = hurry
        self._find_round = find_round
        self._show_stacks = show_stacks

    def begin(self) -> None:
        """Watch from now on; does nothing outside the main thread, where the program around us has the signals."""
        options, loop = self._context.options, self._loop
        try:
            loop.watch_signals((*options.signals, *options.unnamed_signals), self._on_stop)
            loop.watch_signals(options.forwarded, self._on_forwarded)
            loop.watch_signals(options.offered, self._on_offered)
            has_senders = options.is_whole_process and not options.is_wrapped and loop.find_senders()
            if options.is_whole_process and not has_senders and self._context.mask is not None:
                restore_signals(self._context.mask)
            if not has_handler(os.getpid(), SIGWINCH):
                loop.watch_signals((SIGWINCH,), self._on_resize)
            loop.keep_exits()
        except ValueError:
            pass  # not the main thread

    def forward(self, number: int) -> None:
        """Pass a signal on to the workers."""
        current = self._find_round()
        if current is not None:
            current.workers.forward(number)

    def stop_without(self, number: int, reason: str) -> None:
        """Stop the job as this signal would, which nobody has sent, for a reason."""
        self.seen += 1
        self._senders.explain(number, reason)
        self._feed(Signalled(number))

    def _note(self, number: int) -> None:
        self._senders.note(number, self._loop.senders.get(number))

    def _on_stop(self, number: int) -> None:
        if number == SIGQUIT and self._show_stacks():
            return
        self.seen += 1
        self._note(number)
        self._hurry()
        is_named = number in self._context.options.signals
        self._feed(Signalled(number, None if is_named else SIGTERM))

    def _on_forwarded(self, number: int) -> None:
        self._note(number)
        self._feed(Signalled(number))

    def _on_offered(self, number: int) -> None:
        """Pass a signal on to the workers that handle it; in no state that changes anything else."""
        self._note(number)
        current = self._find_round()
        told = [] if current is None else current.workers.offer(number)
        if told:
            self._senders.passed_on.add(number)
        ranks = [worker.global_rank for worker in self._context.group.workers if worker.local_rank in told]
        has_workers = current is not None and bool(current.workers.alive)
        self._find_history().tell_offered(number, ranks, has_workers=has_workers)

    def _on_resize(self, _: int) -> None:
        current = self._find_round()
        if current is not None:
            current.output.resize()
