"""The first round's workers, started before the launcher has imported what watches over them.

Workers take longer to boot than we to import, so both go on side by side. It is no other way of starting: the same
functions as in every round, called earlier, and the supervisor takes over what they return. Only where nothing can keep
it waiting: a rendezvous that forms at once, no template that has to import, and the launcher alone in its process. What
fails here is left alone; the supervisor tries it again and tells the user.

After that the launcher stands aside until one of the workers wants something, or has had time to boot: they need the
processors more than its imports do (a tenth of the time from the command to the last worker's first line).

Until its signal handlers stand a stop signal would end the launcher without a word. So the signals are held back from
before the first worker until then.
"""

from __future__ import annotations

import select

from elastic_run.agent.joining import Joining
from elastic_run.agent.launched import launch_workers
from elastic_run.signals import block_signals, restore_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from elastic_run.agent.launched import LaunchedWorkers
    from elastic_run.agent.surroundings import Surroundings

#: Milliseconds that a small program takes to boot.
_BOOT = 30


class HeadStart:
    """A first round that is under way.

    Args:
        joining: Has taken this node's place in it.
        launched: Its workers.
        mask: Signals that were blocked before.
    """

    __slots__ = ("joining", "launched", "mask")

    def __init__(self, joining: Joining, launched: LaunchedWorkers, mask: Collection[int]) -> None:
        self.joining = joining
        self.launched = launched
        self.mask = mask

    def release_signals(self) -> None:
        """Let the signals through that were held back: somebody answers them now."""
        restore_signals(self.mask)


def take_head_start(around: Surroundings) -> HeadStart | None:
    """Start the first round's workers, if nothing has to be waited for.

    Args:
        around: What the rounds of one agent share.

    Returns:
        The round, or None: then the supervisor begins with it.
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
    mask = block_signals((*around.options.signals, *around.options.forwarded))
    launched = launch_workers(around, restart_count=0, use_agent_store=joining.use_agent_store, mask=mask)
    _stand_aside(joining, launched)
    return HeadStart(joining, launched, mask)


def _stand_aside(joining: Joining, launched: LaunchedWorkers) -> None:
    """Wait until a worker writes, ends (its pipe does too) or connects, but not longer than it takes one to boot."""
    descriptors = [line.reading for lines in launched.wiring.lines.values() for line in lines]
    if joining.store is not None and joining.store.listening >= 0:
        descriptors.append(joining.store.listening)
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(0 if launched.error is not None else _BOOT)
