"""Starts the first round's workers before the launcher imports the supervisor.

Workers take longer to boot than the launcher takes to import, so both go on at the same time. The workers are started
by the same functions as in every round, only earlier, and the supervisor takes over the result. An early start needs
three conditions: the rendezvous forms at once, no template has to import modules, and the launcher is alone in its
process. If a step fails here, the supervisor tries it again and tells the user.

After the start the launcher waits until a worker writes, ends or connects, or until the workers had time to boot: they
need the processors more than the launcher's imports do.

The console is ready before the supervisor is imported, so that a worker's first line is shown at once. If the workers
leave a processor free, the console is ready before that line.

Before the signal handlers are installed, a stop signal would end the launcher without a message. So stop signals are
blocked from before the first worker's start until then.
"""

from __future__ import annotations

import select
import time

from elastic_run.agent.driver.round_join import RoundJoin
from elastic_run.agent.driver.worker_launch import launch_workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.worker_launch import LaunchedWorkers
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console

#: Seconds that a small program takes to boot.
_BOOT = 0.03


class EarlyStart:
    """A first round whose workers were started.

    Args:
        round_join: Has taken this node's place in it.
        launched: Its workers.
        loop: The agent's loop, which listens to them.
        console: The launcher's stdout and stderr.
    """

    __slots__ = ("console", "launched", "loop", "round_join")

    def __init__(self, round_join: RoundJoin, launched: LaunchedWorkers, loop: Loop, console: Console) -> None:
        self.round_join = round_join
        self.launched = launched
        self.loop = loop
        self.console = console


def start_early(context: AgentContext) -> EarlyStart | None:
    """Start the first round's workers, if nothing has to be waited for.

    Args:
        context: What the rounds of one agent share.

    Returns:
        The round, or None: then the supervisor begins with it.

    Raises:
        OSError: Workers were started, and the system refuses what is needed to listen to them.
    """
    round_join = RoundJoin(context.group, context.options.worker_store)
    if not (round_join.is_immediate and context.options.is_whole_process) or context.worker_pool is not None:
        return None
    try:
        round_join.offer_store()
        round_join.take_place()
    except OSError:
        round_join.close()
        return None
    context.block_signals((*context.options.signals, *context.options.forwarded, *context.options.unnamed_signals))
    launched = launch_workers(context, restart_count=0, use_agent_store=round_join.use_agent_store)
    context.adopt_orphans()  # as early as can be: what leaves a worker before comes to somebody else
    loop, console = _attach_while_booting(context, round_join, launched)
    return EarlyStart(round_join, launched, loop, console)


def _attach_while_booting(
    context: AgentContext, round_join: RoundJoin, launched: LaunchedWorkers
) -> tuple[Loop, Console]:
    """Wait while the workers boot, and show their first output."""
    ends = _launcher_ends(round_join, launched)
    booted_at = time.monotonic() + (0 if launched.error is not None else _BOOT)
    if not _has_free_processor(launched):
        _wait_for_activity(ends, booted_at)
    loop, console = _listen(context, launched)
    _wait_for_activity(ends, booted_at)
    loop.run_once()
    return loop, console


def _has_free_processor(launched: LaunchedWorkers) -> bool:
    """Whether there are more processors than workers."""
    from elastic_run.cluster.cpus import available_cpus  # noqa: PLC0415 - the workers come first

    return len(launched.pids) < len(available_cpus())


def _launcher_ends(round_join: RoundJoin, launched: LaunchedWorkers) -> list[int]:
    """Return the descriptors that become readable when a worker writes, ends or connects."""
    descriptors = [line.reading for lines in launched.wiring.lines.values() for line in lines]
    if round_join.store is not None and round_join.store.listening >= 0:
        descriptors.append(round_join.store.listening)
    return descriptors


def _wait_for_activity(descriptors: list[int], deadline: float) -> None:
    """Wait until a worker writes, ends or connects, or until a time of the monotonic clock."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _listen(context: AgentContext, launched: LaunchedWorkers) -> tuple[Loop, Console]:
    """Listen to the workers from now on."""
    from elastic_run.agent.driver.output import listen  # noqa: PLC0415 - the workers come first
    from elastic_run.loop import Loop  # noqa: PLC0415 - ditto
    from elastic_run.multiprocessing.output.console import Console  # noqa: PLC0415 - ditto
    from elastic_run.multiprocessing.output.worker_output import WorkerOutput  # noqa: PLC0415 - ditto

    loop = Loop()
    console = Console(loop)
    launched.output = WorkerOutput(loop, console, launched.wiring)
    try:
        listen(launched.output, context, launched, restart_count=0)
    except OSError as error:
        launched.error = launched.error or error
    return loop, console
