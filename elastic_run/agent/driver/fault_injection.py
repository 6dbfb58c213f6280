"""Injects the faults of --inject-fault into a round: by signals, by a request to the worker, by what the agent does.

A line of the launcher says that a fault was asked for, so that no user looks for its cause.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from elastic_run.core.agent.faults import ACTIONS, plan_faults
from elastic_run.diagnosis.recorder import send_request
from elastic_run.report.text import signal_name, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.faults import PlannedFault

#: Seconds until a worker whose Python starts must have heard a request, and between two attempts.
_WAIT_LIMIT = 10.0
_PAUSE = 0.01
#: Seconds in which a slow worker runs once.
_PERIOD = 0.5


def inject_faults(context: AgentContext, started: Round) -> Callable[[], None]:
    """Set the timers of a round's faults; returns what ends the faults that last, when the round is over."""
    workers = context.group.workers
    local_ranks = {worker.global_rank: worker.local_rank for worker in workers}
    planned = plan_faults(context.options.faults, attempt=started.restart_count, world_size=workers[0].world_size)
    injections = [
        _Injection(context, started, each, local_ranks[each.rank]) for each in planned if each.rank in local_ranks
    ]
    for injection in injections:
        if injection.action == "import":  # the worker makes it itself; a timer might come after the worker's end
            injection.begin()
        else:
            context.loop.call_later(injection.delay, injection.begin)

    def end() -> None:
        for injection in injections:
            injection.end()

    return end


class _Injection:
    """One fault of a round."""

    def __init__(self, context: AgentContext, started: Round, planned: PlannedFault, local_rank: int) -> None:
        self.delay = planned.delay
        self._fault = planned.fault
        self.action, _, self._value = planned.fault.action.partition(" ")
        self._round = started
        self._local_rank = local_rank
        self._loop = context.loop
        self._say = context.say
        self._rank = f"rank {planned.rank}"
        self._moment = f"after {span(planned.delay)} (--inject-fault)"
        self._listener: socket.socket | None = None
        self._is_over = False

    @property
    def _pid(self) -> int | None:
        """The worker's pid; None if it has ended, and its number may be another process's."""
        alive = self._local_rank in self._round.workers.alive
        return self._round.workers.pids[self._local_rank] if alive else None

    def begin(self) -> None:
        """Inject the fault, if the worker still runs."""
        pid, fault, action = self._pid, self._fault, self.action
        if pid is None:
            return
        if action == "import":
            self._say(f"{ACTIONS[action]} {self._value}: {self._rank} (pid {pid}) from its start (--inject-fault)")
        elif fault.is_of_worker:
            self._request(until=self._loop.now() + _WAIT_LIMIT)
        elif action == "agent":
            self._write(f"SIGKILL to this agent, of {self._rank}, {self._moment}")
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "freeze":
            self._freeze()
        elif action == "port":
            self._take_port(int(self._value))
        elif action == "slow":
            self._say(f"1/{self._value} of the time: {self._rank} (pid {pid}) {self._moment}")
            self._slow_down(_PERIOD / int(self._value))
        elif fault.is_for_child:
            self._send_to_child(pid, signal_name(fault.signal))
        else:
            self._say(f"{signal_name(fault.signal)} to {self._rank} (pid {pid}) {self._moment}")
            os.killpg(pid, fault.signal)
            if fault.pause:
                self._loop.call_later(fault.pause, lambda: self._signal(signal.SIGCONT))

    def end(self) -> None:
        """End what lasts: the round is over."""
        self._is_over = True
        if self.action == "slow":
            self._signal(signal.SIGCONT)
        if self._listener is not None:
            self._listener.close()

    def _signal(self, number: int) -> None:
        if (pid := self._pid) is not None:
            os.killpg(pid, number)

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

    def _take_port(self, port: int) -> None:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        try:
            self._listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
        except OSError as error:
            self._say(f"port {port} is not taken on the node of {self._rank}: {error.strerror} {self._moment}")
        else:
            self._say(f"port {port} is taken on the node of {self._rank} {self._moment}")

    def _slow_down(self, seconds: float) -> None:
        """Let the worker run for this many seconds of each period."""
        if self._pid is None or self._is_over:
            return
        self._signal(signal.SIGCONT)
        self._loop.call_later(seconds, lambda: None if self._is_over else self._signal(signal.SIGSTOP))
        self._loop.call_later(_PERIOD, lambda: self._slow_down(seconds))

    def _send_to_child(self, pid: int, name: str) -> None:
        child = _find_child(pid)
        if child is None:
            self._say(f"no {name}: {self._rank} (pid {pid}) has no child process {self._moment}")
            return
        self._say(f"{name} to pid {child}, a child process of {self._rank}, {self._moment}")
        os.kill(child, self._fault.signal)

    def _request(self, *, until: float) -> None:
        """Ask the worker for the fault; again and again while its Python starts."""
        if (pid := self._pid) is None:
            return
        what = f"{ACTIONS[self.action]} with code {self._value}" if self._value else ACTIONS[self.action]
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


def _find_child(pid: int) -> int | None:
    """Return the newest living process below a process, or None."""
    import psutil

    with suppress(psutil.Error, OSError):
        for child in sorted(psutil.Process(pid).children(recursive=True), key=psutil.Process.create_time, reverse=True):
            with suppress(psutil.Error, OSError):
                if child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
    return None
