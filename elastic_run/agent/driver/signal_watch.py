"""Answers the launcher's signals: they stop the job, are passed on, or reach the workers that handle them."""

from __future__ import annotations

from elastic_run.core.agent.messages import Signalled
from elastic_run.multiprocessing.process.process_table import list_handled
from elastic_run.signals import SIGQUIT, SIGTERM, SIGWINCH, restore_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.parts import AgentParts


class SignalWatch:
    """Watches the signals of one agent.

    Args:
        parts: The parts of the agent.
        hurry: Called at each signal that stops the job.
        show_stacks: Called at SIGQUIT; returns whether it shows stacks, so that the signal stops nothing.

    Attributes:
        seen: Number of stop signals so far.
    """

    def __init__(self, parts: AgentParts, *, hurry: Callable[[], None], show_stacks: Callable[[], bool]) -> None:
        self.seen = 0
        self._parts = parts
        self._hurry = hurry
        self._show_stacks = show_stacks

    def begin(self) -> None:
        """Watch from now on; does nothing outside the main thread, where the program around us has the signals."""
        context, loop = self._parts.context, self._parts.loop
        options = context.options
        try:
            loop.watch_signals((*options.signals, *options.unnamed_signals), self._on_stop)
            loop.watch_signals(options.forwarded, self._on_forwarded)
            loop.watch_signals(options.offered, self._on_offered)
            has_senders = options.is_whole_process and not options.is_wrapped and loop.find_senders()
            if options.is_whole_process and not has_senders and context.mask is not None:
                restore_signals(context.mask)
            if SIGWINCH not in list_handled("self"):
                loop.watch_signals((SIGWINCH,), self._on_resize)
            loop.keep_exits()
        except ValueError:
            pass  # not the main thread

    def forward(self, number: int) -> None:
        """Pass a signal on to the workers."""
        if self._parts.current is not None:
            self._parts.current.workers.forward(number)

    def stop_without(self, number: int, reason: str) -> None:
        """Stop the job as this signal would, which nobody has sent, for a reason."""
        self.seen += 1
        self._parts.senders.explain(number, reason)
        self._parts.feed(Signalled(number))

    def _read_sender(self, number: int) -> None:
        self._parts.senders.add(number, self._parts.loop.senders.get(number))

    def _on_stop(self, number: int) -> None:
        if number == SIGQUIT and self._show_stacks():
            return
        self.seen += 1
        self._read_sender(number)
        self._hurry()
        is_named = number in self._parts.context.options.signals
        self._parts.feed(Signalled(number, None if is_named else SIGTERM))

    def _on_forwarded(self, number: int) -> None:
        self._read_sender(number)
        self._parts.feed(Signalled(number))

    def _on_offered(self, number: int) -> None:
        """Pass a signal on to the workers that handle it; in no state that changes anything else."""
        self._read_sender(number)
        current = self._parts.current
        reached = [] if current is None else current.workers.offer(number)
        if reached:
            self._parts.senders.passed_on.add(number)
        workers = self._parts.context.group.workers
        ranks = [worker.global_rank for worker in workers if worker.local_rank in reached]
        has_workers = current is not None and bool(current.workers.alive)
        self._parts.history.tell_offered(number, ranks, has_workers=has_workers)

    def _on_resize(self, _: int) -> None:
        if self._parts.current is not None:
            self._parts.current.output.resize()
