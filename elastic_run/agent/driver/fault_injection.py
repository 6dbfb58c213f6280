"""Injects the faults of --inject-fault into a round: by signals, by a request to the worker, by what the agent does.

A line of the launcher says that a fault was asked for, so that no user looks for its cause.
"""

from __future__ import annotations

import os
import signal

from elastic_run.core.agent.faults import ACTIONS, plan_faults
from elastic_run.diagnosis.recorder import send_request
from elastic_run.report.text import signal_name, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.faults import PlannedFault

#: Seconds until a worker whose Python starts must have heard a request, and between two attempts.
_WAIT_LIMIT = 10.0
_PAUSE = 0.01


def inject_faults(context: AgentContext, started: Round) -> None:
    """Set the timers of a round's faults."""
    workers = context.group.workers
    local_ranks = {worker.global_rank: worker.local_rank for worker in workers}
    for planned in plan_faults(context.options.faults, attempt=started.restart_count, world_size=workers[0].world_size):
        if planned.rank in local_ranks:
            injection = _Injection(context, started, planned, local_ranks[planned.rank])
            context.loop.call_later(planned.delay, injection.begin)


class _Injection:
    """One fault of a round."""

    def __init__(self, context: AgentContext, started: Round, planned: PlannedFault, local_rank: int) -> None:
        self._fault = planned.fault
        self._round = started
        self._local_rank = local_rank
        self._loop = context.loop
        self._say = context.say
        self._rank = f"rank {planned.rank}"
        self._moment = f"after {span(planned.delay)} (--inject-fault)"

    @property
    def _pid(self) -> int | None:
        """The worker's pid; None if it has ended, and its number may be another process's."""
        alive = self._local_rank in self._round.workers.alive
        return self._round.workers.pids[self._local_rank] if alive else None

    def begin(self) -> None:
        """Inject the fault, if the worker still runs."""
        pid, fault = self._pid, self._fault
        if pid is None:
            return
        if fault.is_of_worker:
            self._request(until=self._loop.now() + _WAIT_LIMIT)
        elif fault.action == "agent":
            self._write(f"SIGKILL to this agent, of {self._rank}, {self._moment}")
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "freeze":
            self._freeze()
        else:
            self._say(f"{signal_name(fault.signal)} to {self._rank} (pid {pid}) {self._moment}")
            os.killpg(pid, fault.signal)
            if fault.pause:
                self._loop.call_later(fault.pause, self._go_on)

    def _go_on(self) -> None:
        if (pid := self._pid) is not None:
            os.killpg(pid, signal.SIGCONT)

    def _write(self, text: str) -> None:
        """Tell the user at once: the console writes through the loop, which stops here."""
        os.write(2, f"elastic-run: {text}\n".encode())

    def _freeze(self) -> None:
        """Stop the workers of this node and this agent: for the other nodes the machine is silent."""
        workers = self._round.workers
        groups = [-workers.pids[local_rank] for local_rank in workers.alive]
        self._write(f"SIGSTOP to this agent and its workers, of {self._rank}, {self._moment}")
        if self._fault.pause:
            pids = " ".join(map(str, (os.getpid(), *groups)))
            wake = f"sleep {self._fault.pause}; kill -s CONT -- {pids}"
            os.posix_spawn("/bin/sh", ["sh", "-c", wake], os.environ)
        for pid in (*groups, os.getpid()):
            os.kill(pid, signal.SIGSTOP)

    def _request(self, *, until: float) -> None:
        """Ask the worker for the fault; again and again while its Python starts."""
        if (pid := self._pid) is None:
            return
        action, _, value = self._fault.action.partition(" ")
        what = f"{ACTIONS[action]} with code {value}" if value else ACTIONS[action]
        connection = send_request(self._round.fault_sockets[self._local_rank], self._fault.action.encode())
        if connection is not None:
            connection.close()
            self._say(f"{what}: {self._rank} (pid {pid}) {self._moment}")
        elif self._loop.now() < until:
            self._loop.call_later(_PAUSE, lambda: self._request(until=until))
        else:
            self._say(
                f"no {what}: {self._rank} (pid {pid}) is not a Python program that has elastic-run {self._moment}"
            )
