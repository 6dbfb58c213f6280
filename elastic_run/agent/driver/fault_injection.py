"""Injects the faults of --inject-fault into a round: by signals, by a request to the worker, by what the agent does.

A line of the launcher says that a fault was asked for, so that no user looks for its cause.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from elastic_run.core.agent.faults import ACTIONS, plan_faults
from elastic_run.diagnosis.worker_sockets import send_request
from elastic_run.report.text import signal_name, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastic_run.agent.api import Worker
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.faults import Fault, PlannedFault
    from elastic_run.loop import Loop

#: Seconds until a worker whose Python starts must have heard a request, and between two attempts.
_WAIT_LIMIT = 10.0
_PAUSE = 0.01
#: Seconds in which a slow worker runs once.
_PERIOD = 0.5


def inject_faults(
    faults: Sequence[Fault], workers: Sequence[Worker], started: Round, *, loop: Loop, say: Callable[[str], None]
) -> Callable[[], None]:
    """Set the timers of a round's faults; returns what ends the faults that last, when the round is over."""
    local_ranks, world_size = {worker.global_rank: worker.local_rank for worker in workers}, workers[0].world_size
    injections = [
        _Injection(planned, started, local_ranks[planned.rank], loop=loop, say=say)
        for planned in plan_faults(faults, attempt=started.restart_count, world_size=world_size)
        if planned.rank in local_ranks
    ]
    for injection in injections:
        if injection.is_from_start:
            injection.begin()  # a timer might come after the worker's end
        else:
            loop.call_later(injection.delay, injection.begin)

    def end() -> None:
        for injection in injections:
            injection.end()

    return end


class _Injection:
    """One fault of a round."""

    def __init__(
        self, planned: PlannedFault, started: Round, local_rank: int, *, loop: Loop, say: Callable[[str], None]
    ) -> None:
        self.delay = planned.delay
        self._fault = planned.fault
        self._round = started
        self._local_rank = local_rank
        self._loop = loop
        self._say = say
        self._rank = f"rank {planned.rank}"
        self._moment = f"after {span(planned.delay)} (--inject-fault)"
        self._listener: socket.socket | None = None
        self._is_over = False

    @property
    def is_from_start(self) -> bool:
        """Whether the worker makes the fault itself at its start; the agent then only reports it."""
        return self._fault.action.startswith("import ")

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
        action, _, value = fault.action.partition(" ")
        if action == "import":
            self._say(f"{ACTIONS[action]} {value}: {self._rank} (pid {pid}) from its start (--inject-fault)")
        elif fault.is_of_worker:
            self._request(until=self._loop.now() + _WAIT_LIMIT)
        elif action == "agent":
            self._write(f"SIGKILL to this agent, of {self._rank}, {self._moment}")
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "freeze":
            self._freeze()
        elif action == "port":
            self._take_port(int(value))
        elif action == "slow":
            self._say(f"1/{value} of the time: {self._rank} (pid {pid}) {self._moment}")
            self._slow_down(_PERIOD / int(value))
        elif fault.is_for_child:
            self._send_to_child(pid, signal_name(fault.signal))
        else:
            self._say(f"{signal_name(fault.signal)} to {self._rank} (pid {pid}) {self._moment}")
            os.killpg(pid, fault.signal)
            if fault.pause:
                self._loop.call_later(fault.pause, self._go_on)

    def end(self) -> None:
        """End what lasts: the round is over."""
        self._is_over = True
        if self._fault.action.startswith("slow"):
            self._go_on()
        if self._listener is not None:
            self._listener.close()

    def _write(self, text: str) -> None:
        """Tell the user at once: the console writes through the loop, which stops here."""
        os.write(2, f"elastic-run: {text}\n".encode())

    def _freeze(self) -> None:
        """Stop the workers of this node and this agent: for the other nodes the machine is silent."""
        workers = self._round.workers
        groups = [-workers.pids[local_rank] for local_rank in workers.alive]
        pause = self._fault.pause
        self._write(f"SIGSTOP to this agent and its workers, of {self._rank}, {self._moment}")
        if pause:
            pids = " ".join(map(str, (os.getpid(), *groups)))
            os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep {pause}; kill -s CONT -- {pids}"], os.environ)
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
        self._go_on()
        self._loop.call_later(seconds, self._hold)
        self._loop.call_later(_PERIOD, lambda: self._slow_down(seconds))

    def _hold(self) -> None:
        if (pid := self._pid) is not None and not self._is_over:
            os.killpg(pid, signal.SIGSTOP)

    def _go_on(self) -> None:
        if (pid := self._pid) is not None:
            os.killpg(pid, signal.SIGCONT)

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
        action, _, code = self._fault.action.partition(" ")
        what = f"{ACTIONS[action]} with code {code}" if code else ACTIONS[action]
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
