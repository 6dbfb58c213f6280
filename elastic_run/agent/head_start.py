"""The first round's workers, started before the launcher has imported what watches over them.

Workers take longer to boot than we to import, so both go on side by side. It is no other way of starting: the same
functions as in every round, called earlier, and the supervisor takes over what they return. Only where nothing can keep
it waiting: a rendezvous that forms at once, no template that has to import, and the launcher alone in its process. What
fails here is left alone; the supervisor tries it again and tells the user.

Then the launcher stands aside until one of the workers wants something, or has had time to boot: they need the
processors more than its imports do.

What a worker writes first is on the console before the supervisor is imported: who listens comes first, and where the
workers leave a processor free it is there before them.

Until its signal handlers stand a stop signal would end the launcher without a word. So the signals are held back from
before the first worker until then.
"""

from __future__ import annotations

import select
import time

from elastic_run.agent.joining import Joining
from elastic_run.agent.launched import launch_workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.launched import LaunchedWorkers
    from elastic_run.agent.surroundings import Surroundings
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console

#: Seconds that a small program takes to boot.
_BOOT = 0.03


class HeadStart:
    """A first round that is under way.

    Args:
        joining: Has taken this node's place in it.
        launched: Its workers.
        loop: The agent's loop, which listens to them.
        console: The launcher's stdout and stderr.
    """

    __slots__ = ("console", "joining", "launched", "loop")

    def __init__(self, joining: Joining, launched: LaunchedWorkers, loop: Loop, console: Console) -> None:
        self.joining = joining
        self.launched = launched
        self.loop = loop
        self.console = console


def take_head_start(around: Surroundings) -> HeadStart | None:
    """Start the first round's workers, if nothing has to be waited for.

    Args:
        around: What the rounds of one agent share.

    Returns:
        The round, or None: then the supervisor begins with it.

    Raises:
        OSError: Workers were started, and the system refuses what is needed to listen to them.
    """
    joining = Joining(around.group, around.options.worker_store)
    if not (joining.is_immediate and around.options.is_whole_process) or around.warm is not None:
        return None
    try:
        joining.offer_store()
        joining.take_place()
    except OSError:
        joining.close()
        return None
    around.block_signals((*around.options.signals, *around.options.forwarded, *around.options.ending))
    launched = launch_workers(around, restart_count=0, use_agent_store=joining.use_agent_store)
    around.adopt_orphans()  # as early as can be: what leaves a worker before comes to somebody else
    loop, console = _listen_first(around, joining, launched)
    return HeadStart(joining, launched, loop, console)


def _listen_first(around: Surroundings, joining: Joining, launched: LaunchedWorkers) -> tuple[Loop, Console]:
    """Stand aside while the workers boot, and pass on what they write first."""
    ends = _launcher_ends(joining, launched)
    booted_at = time.monotonic() + (0 if launched.error is not None else _BOOT)
    if not _leaves_processor(launched):
        _stand_aside(ends, booted_at)
    loop, console = _listen(around, launched)
    _stand_aside(ends, booted_at)
    loop.run_once()
    return loop, console


def _leaves_processor(launched: LaunchedWorkers) -> bool:
    """Whether there are more processors than workers."""
    from elastic_run.cluster.cpus import available_cpus  # noqa: PLC0415 - the workers come first

    return len(launched.pids) < len(available_cpus())


def _launcher_ends(joining: Joining, launched: LaunchedWorkers) -> list[int]:
    """Return the descriptors by which a worker shows that it wants something: it writes, ends or connects."""
    descriptors = [line.reading for lines in launched.wiring.lines.values() for line in lines]
    if joining.store is not None and joining.store.listening >= 0:
        descriptors.append(joining.store.listening)
    return descriptors


def _stand_aside(descriptors: list[int], deadline: float) -> None:
    """Wait until a worker wants something, but not beyond a time of the monotonic clock."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _listen(around: Surroundings, launched: LaunchedWorkers) -> tuple[Loop, Console]:
    """Listen to the workers from now on."""
    from elastic_run.agent.listening import listen  # noqa: PLC0415 - the workers come first
    from elastic_run.loop import Loop  # noqa: PLC0415 - ditto
    from elastic_run.multiprocessing.output.console import Console  # noqa: PLC0415 - ditto
    from elastic_run.multiprocessing.output.worker_output import WorkerOutput  # noqa: PLC0415 - ditto

    loop = Loop()
    console = Console(loop)
    launched.output = WorkerOutput(loop, console, launched.wiring)
    try:
        listen(launched.output, around, launched, restart_count=0)
    except OSError as error:
        launched.error = launched.error or error
    return loop, console
