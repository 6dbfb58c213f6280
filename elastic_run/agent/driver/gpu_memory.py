"""Waits until the GPUs have taken back the memory of workers that have ended.

The driver frees the memory of a process when the last of its descriptors is closed, which may come after the
process's end: workers that start at once find their GPU full. nvidia-smi lists the processes that hold memory. It
can't wait for a change, so it is run again and again (a case of law 2's list), for some seconds at most. In a container
that hides the processes of the host nvidia-smi lists none, and nothing is waited for.
"""

from __future__ import annotations

import os

from elastic_run.agent.driver.check_process import CheckEnd, CheckProcess
from elastic_run.cluster.gpu_use import read_pids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.loop import Loop, Timer

#: Seconds for all of it; a driver that is stuck does not answer at all.
WAIT_LIMIT = 10.0
_PAUSE = 0.1


class GpuMemoryWait:
    """One wait.

    Args:
        loop: The agent's loop.
        context: The state that all rounds of the agent share.
        say: Tells the user one line.
        on_end: Called once, when the memory is free or the time is over, unless it was cancelled.
    """

    def __init__(
        self, loop: Loop, context: AgentContext, *, say: Callable[[str], None], on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._say = say
        self._on_end = on_end
        self._context = context
        self._process: CheckProcess | None = None
        self._timer: Timer | None = None
        self._began_at = loop.now()
        self._has_said = False

    @property
    def is_running(self) -> bool:
        """Whether a process of it lives."""
        return self._process is not None and self._process.is_running

    def begin(self, query: tuple[str, ...], pids: Collection[int]) -> None:
        """Wait for the memory of workers that have ended; for `query` see `gpu_processes.find_query`."""
        left = self._began_at + WAIT_LIMIT - self._loop.now()
        self._process = CheckProcess(self._loop, self._context, lambda end: self._take(query, pids, end))
        try:
            self._process.start(query, max(left, _PAUSE))
        except OSError:
            self._on_end()  # the query can't be started, so nothing is known of the memory

    def cancel(self) -> None:
        """End the wait; `on_end` is not called."""
        self._on_end = lambda: None
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.cancel()

    def _take(self, query: tuple[str, ...], pids: Collection[int], end: CheckEnd) -> None:
        holders = sorted(read_pids(end.output) & set(pids))
        name, all_the_same = os.path.basename(query[0]), "the workers start anyway"
        if end.is_late:
            self._say(f"{name} did not answer within {WAIT_LIMIT:g} s; {all_the_same}")
        elif holders and self._loop.now() + _PAUSE >= self._began_at + WAIT_LIMIT:
            self._say(f"GPU memory of {_describe(holders)} is not free after {WAIT_LIMIT:g} s; {all_the_same}")
        elif holders:
            if not self._has_said:
                self._say(f"waiting until the GPU memory of {_describe(holders)} is free")
                self._has_said = True
            self._timer = self._loop.call_later(_PAUSE, lambda: self.begin(query, pids))
            return
        self._on_end()


def _describe(pids: list[int]) -> str:
    return f"the old worker{'s' * (len(pids) > 1)} (pid {', '.join(map(str, pids))})"
