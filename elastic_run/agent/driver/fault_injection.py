"""Injects the faults of --inject-fault into the workers of a round: by signals, and by the agent's own end.

A line of the launcher says that a fault was asked for, so that no user looks for its cause.
"""

from __future__ import annotations

import os
import signal

from elastic_run.core.agent.faults import plan_faults
from elastic_run.report.wording import signal_name, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.agent.api import WorkerGroup
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.faults import Fault, PlannedFault
    from elastic_run.loop import Loop


def inject_faults(
    faults: Sequence[Fault], started: Round, group: WorkerGroup, *, loop: Loop, say: Callable[[str], None]
) -> None:
    """Set the timers of a round's faults."""
    local_ranks = {worker.global_rank: worker.local_rank for worker in group.workers}
    world_size = group.workers[0].world_size
    for planned in plan_faults(faults, attempt=started.restart_count, world_size=world_size):
        if planned.rank in local_ranks:
            local_rank = local_ranks[planned.rank]
            loop.call_later(planned.delay, _make_injection(planned, started, local_rank, loop=loop, say=say))


def _make_injection(
    planned: PlannedFault, started: Round, local_rank: int, *, loop: Loop, say: Callable[[str], None]
) -> Callable[[], None]:
    fault = planned.fault

    def inject() -> None:
        if local_rank not in started.workers.alive:
            return  # it has ended, and its number may be another process's
        pid = started.workers.pids[local_rank]
        moment = f"after {span(planned.delay)} (--inject-fault)"
        if not fault.signal:
            # The console writes through the loop, which ends here.
            os.write(2, f"elastic-run: SIGKILL to this agent, of rank {planned.rank}, {moment}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        say(f"{signal_name(fault.signal)} to rank {planned.rank} (pid {pid}) {moment}")
        os.killpg(pid, fault.signal)
        if fault.pause:
            loop.call_later(fault.pause, go_on)

    def go_on() -> None:
        if local_rank in started.workers.alive:
            os.killpg(started.workers.pids[local_rank], signal.SIGCONT)

    return inject
