"""The checks before this node takes part in a round: the old workers' GPU memory is free, the health check passes.

The checks run between two rounds, or before the first one. Heartbeats and the loop go on during the checks, and no
round waits for a node that has not said that it is ready. Most jobs have no check, and import none of this.
"""

from __future__ import annotations

import os
import re
import shlex

from elastic_run.agent.driver.check_process import CheckEnd, CheckProcess
from elastic_run.agent.driver.gpu_memory import GpuMemoryWait
from elastic_run.cluster.gpu_use import find_query
from elastic_run.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.loop import Loop

#: Lines of the command's output that the reason holds, and characters of each.
_LINES = 3
_CHARACTERS = 160
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class RoundChecks:
    """The checks before one round.

    Args:
        loop: The agent's loop.
        context: The state that all rounds of the agent share.
        say: Tells the user one line.
        on_ready: Called when all checks have passed.
        on_unhealthy: Called with the reason when the health check has failed.
    """

    def __init__(
        self,
        loop: Loop,
        context: AgentContext,
        *,
        say: Callable[[str], None],
        on_ready: Callable[[], None],
        on_unhealthy: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._say = say
        self._on_ready = on_ready
        self._on_unhealthy = on_unhealthy
        self._wait: GpuMemoryWait | None = None
        self._check: CheckProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether a process of a check lives."""
        return any(part is not None and part.is_running for part in (self._wait, self._check))

    def begin(self, former: Collection[int]) -> None:
        """Begin.

        Args:
            former: Pids of the workers of the round before.
        """
        query = find_query(os.environ) if former else None
        if query is None:
            self._check_health()
            return
        self._wait = GpuMemoryWait(self._loop, self._context, say=self._say, on_end=self._check_health)
        self._wait.begin(query, former)

    def cancel(self) -> None:
        """End the checks; no callback is called."""
        for part in (self._wait, self._check):
            if part is not None:
                part.cancel()

    def _check_health(self) -> None:
        config = self._context.options.node_config
        if not config.health_check:
            self._on_ready()
            return
        self._check = CheckProcess(self._loop, self._context, self._judge)
        try:
            self._check.start(shlex.split(config.health_check), config.health_check_timeout)
        except OSError as error:
            self._on_unhealthy(f"{config.health_check} can't be started: {error.strerror}")

    def _judge(self, end: CheckEnd) -> None:
        if end.exitcode == 0 and not end.is_late:
            self._on_ready()
        else:
            self._on_unhealthy(describe_end(end, self._context.options.node_config.health_check_timeout))


def describe_end(end: CheckEnd, timeout: float) -> str:
    """Say how a health check failed, with its last lines, in a clause of one line."""
    if end.is_late:
        what = f"the health check did not end within {timeout:g} s"
    elif end.exitcode < 0:
        what = f"the health check was killed by {signal_name(-end.exitcode)}"
    else:
        what = f"the health check ended with exit code {end.exitcode}"
    if end.survivors:
        what += f", and SIGKILL does not end it (pid {', '.join(map(str, end.survivors))})"
    lines = [_make_plain(line) for line in end.output.splitlines()]
    shown = " | ".join([line[-_CHARACTERS:] for line in lines if line][-_LINES:])
    return f"{what}: {shown}" if shown else what


def _make_plain(line: str) -> str:
    """Return a line without colours, tabs and other characters that a terminal obeys."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in _ESCAPE.sub("", line)).split())
