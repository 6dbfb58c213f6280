"""The worker processes of one round: watches for their exits, forwards signals, stops them with all descendants.

- A round is gone if no process of it lives: no worker, no process in a worker's session, no descendant that left the
  session (found by the launcher's token). Only then the caller is told, once.
- `core.agent.shutdown` decides when to signal which process. The process group of a dead worker has no leader to
  protect, so it gets the signal when the stop begins or when its leader ends. No process gets the signal twice. A
  process outside the sessions whose parent lives is left to that parent: a launcher inside a worker tells its own.
"""

from __future__ import annotations

import os

from elastic_run.core.agent import shutdown
from elastic_run.loop import open_pidfd
from elastic_run.multiprocessing import process_table
from elastic_run.multiprocessing.fork_exec import list_handled, start_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.guardian import Guardian
    from elastic_run.multiprocessing.process_table import ProcessStat
    from elastic_run.multiprocessing.starter import StartedWorker

#: Seconds between two looks at leftovers where there are no pidfds.
_LOOK = 0.01
#: Seconds after a success in which processes end that go with their worker: resource trackers, fork servers, pools.
_HELPERS_WAIT = 0.5


class Workers:
    """The processes of one round on this node.

    The guardian was told of every session, so that none outlives the agent, and is told when one is gone. `on_exit`
    gets a worker's local rank and exit code, or minus the signal's number. `on_overdue` is called when workers have not
    stopped shortly before SIGKILL. `adopts` says whether orphans of the workers' descendants come to this process; None
    if they never do. With `is_apart` the launcher's token doesn't count: the round's processes are none of these.
    """

    def __init__(
        self,
        loop: Loop,
        guardian: Guardian,
        *,
        on_exit: Callable[[int, int], None],
        on_overdue: Callable[[], None] = lambda: None,
        adopts: Callable[[], bool] | None = None,
        is_apart: bool = False,
    ) -> None:
        self._loop = loop
        self._guardian = guardian
        self._on_exit = on_exit
        self._on_overdue = on_overdue
        self._adopts = adopts
        self._token = "" if is_apart else guardian.token
        self._since = start_time("self")
        self.pids: dict[int, int] = {}
        self.alive: set[int] = set()
        #: By local rank: the fork server's children, of whose ends multiprocessing tells.
        self._served: dict[int, Any] = {}
        self._sessions: dict[int, process_table.Session] = {}
        self._ended_before_stop: set[int] = set()
        self._told: set[int] = set()
        self._told_groups: set[int] = set()
        self._stop: shutdown.Stop | None = None
        self._is_hurried = False
        self._on_gone: Callable[[list[int]], None] | None = None
        self._timer: Timer | None = None
        self._watched: dict[int, int] = {}
        self._released_at: float | None = None

    def adopt(self, local_rank: int, started: StartedWorker) -> None:
        """Take charge of a worker that was just started."""
        pid = started.pid
        self._sessions[pid] = process_table.Session(started.born)
        self.pids[local_rank] = pid
        self.alive.add(local_rank)
        served = None if started.function is None else started.function.served
        if served is None:
            self._loop.watch_exit(pid, lambda code: self._exited(local_rank, code))
        else:
            self._served[local_rank] = served
            self._loop.add_reader(served.sentinel, lambda: self._served_exited(local_rank))

    def forward(self, number: int) -> None:
        """Send a signal to the workers that live, not to their children."""
        process_table.signal_children((self.pids[rank] for rank in self.alive), number)

    def offer(self, number: int) -> list[int]:
        """Send a signal to the workers that have a handler for it, and return their local ranks; others would end."""
        told = [rank for rank in sorted(self.alive) if number in list_handled(self.pids[rank])]
        process_table.signal_children((self.pids[rank] for rank in told), number)
        return told

    def was_stopped(self, local_rank: int) -> bool:
        """Whether a worker was signalled to stop while it still ran."""
        return self._stop is not None and self._stop.leader_told and local_rank not in self._ended_before_stop

    @property
    def stopped_at(self) -> float | None:
        """Monotonic seconds of the moment at which the stop began, or None."""
        return None if self._stop is None else self._stop.started_at

    def stop(self, number: int, grace: float, on_gone: Callable[[list[int]], None]) -> None:
        """Stop every process of the round with a signal, and SIGKILL after some seconds of grace.

        `on_gone` is called once, with the pids that SIGKILL could not end (usually none).
        """
        self._on_gone = on_gone
        self._stop = shutdown.Stop(started_at=self._loop.now(), signal=number, grace=grace)
        # Some may have ended already without the loop having seen it: they failed, they were not stopped.
        self._ended_before_stop = {rank for rank in self.pids if rank not in self.alive or self._has_ended(rank)}
        self._signal_ended_groups(pid for rank, pid in self.pids.items() if rank not in self.alive)
        self._advance()

    def release(self, on_released: Callable[[list[int]], None]) -> None:
        """Let what the workers, which have all ended, left in the background live on, but for what is about to end."""
        self._on_gone = on_released
        self._released_at = self._loop.now() + _HELPERS_WAIT
        self._timer = self._loop.call_at(self._released_at, self._look_again)
        self._look_again()

    def _look_again(self) -> None:
        if self._released_at is None or self._stop is not None or self._on_gone is None:
            return
        survivors = self.find_survivors()
        if survivors and self._loop.now() < self._released_at and not self._is_hurried:
            self._await(survivors)
        else:
            self._end_watching()
            on_released, self._on_gone = self._on_gone, None
            on_released([*survivors])

    def hurry(self) -> None:
        """Send SIGKILL now, if a stop is under way."""
        self._is_hurried = True
        if self._stop is not None:
            self._advance()
        self._look_again()

    def _served_exited(self, local_rank: int) -> None:
        served = self._served.pop(local_rank)
        self._loop.remove_reader(served.sentinel)
        code = served.poll()
        served.close()
        self._exited(local_rank, code)

    def _exited(self, local_rank: int, code: int) -> None:
        self.alive.discard(local_rank)
        pid = self.pids[local_rank]
        if self._stop is not None:
            self._signal_ended_groups((pid,))
        else:
            self._sessions[pid].ended = process_table.ticks_since_boot()
            self._guardian.report_end(pid, self._sessions[pid].ended)
        self._on_exit(local_rank, code)
        if self._stop is not None and not self.alive:
            self._advance()

    def _has_ended(self, local_rank: int) -> bool:
        served = self._served.get(local_rank)
        return _is_zombie(self.pids[local_rank]) if served is None else served.poll() is not None

    def _signal_ended_groups(self, leaders: Iterable[int]) -> None:
        """Send the signal to the remaining processes in the groups of ended workers."""
        untold = {leader: self._sessions[leader] for leader in leaders if leader not in self._told_groups}
        groups = process_table.find_groups(untold)
        for group in groups:
            untold[group].ended = 0  # the number stays theirs for the time of a stop, whatever they fork
        self._told_groups.update(groups)
        if self._stop is not None:
            process_table.signal_groups(groups, self._stop.signal)

    def find_survivors(self) -> dict[int, ProcessStat]:
        """Return the living processes of the round: workers, their sessions, descendants that left the sessions."""
        return process_table.find_survivors(
            self._sessions,
            self._token,
            since=self._since,
            ignored=(self._guardian.pid, os.getpid()),
            spared=self._guardian.spared,
            is_adopted=self._is_adopted,
        )

    def _is_adopted(self, pid: int, stat: ProcessStat) -> bool:
        """Whether a process is an orphan of the workers: a child of this process that it did not start."""
        if stat.parent != os.getpid() or self._adopts is None or not self._adopts():
            return False
        # A plug-in may have started it in this session, or before the workers.
        is_own = stat.session == os.getsid(0) or stat.started_at < min(each.born for each in self._sessions.values())
        return not is_own and not self._loop.is_watching(pid)

    def _advance(self) -> None:
        """Take the stop's next step, and see whether anything is left."""
        if self._stop is None or self._on_gone is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._stop, step = shutdown.advance(
            self._stop,
            leaders_alive=bool(self.alive),
            is_hurried=self._is_hurried,
            now=self._loop.now(),
            conditions={} if self._stop.killed_at is None else self._read_conditions(),
        )
        if step.tell_leaders:
            self.forward(self._stop.signal)
        is_look_due = not self.alive or step.tell_groups or step.kill or step.give_up
        survivors = self.find_survivors() if is_look_due else {}
        if step.give_up or (not survivors and not self.alive):
            # The first thread of a worker may have ended, and its other threads not yet: no survivor, but not gone.
            self._finish([*survivors] or [self.pids[rank] for rank in self.alive])
            return
        if step.tell_groups:
            self._signal_survivors(survivors, self._stop.signal)
        if step.ask_stacks:
            self._on_overdue()
        if self._stop.killed_at is not None:
            process_table.kill_all(process_table.find_groups(self._sessions), survivors)
        if step.next_at is not None:
            self._timer = self._loop.call_at(step.next_at, self._advance)
        if not self.alive:
            self._await(survivors)

    def _read_conditions(self) -> dict[int, shutdown.Condition]:
        """Read the state of processes that got SIGKILL and still live."""
        pids = {*self.find_survivors(), *(self.pids[rank] for rank in self.alive)}
        stats = {pid: process_table.read_stat(pid) for pid in pids}
        return {
            pid: shutdown.Condition(bool(process_table.list_running_threads(pid)), memory=stat.memory, cpu=stat.cpu)
            for pid, stat in stats.items()
            if stat is not None
        }

    def _signal_survivors(self, survivors: Mapping[int, ProcessStat], number: int) -> None:
        """Send a signal to what is left, but to nobody twice and to nobody whose own parent passes it on."""
        leaders = {self.pids[rank] for rank in self.alive}
        sessions, known = set(self.pids.values()), {*survivors, *leaders}
        for pid, stat in survivors.items():
            if pid in leaders or pid in self._told or stat.group in self._told_groups:
                continue
            if stat.session in sessions or stat.parent not in known:
                self._told.add(pid)
                process_table.signal_processes({pid: stat}, number)

    def _await(self, survivors: Iterable[int]) -> None:
        """Come back when one of them has ended."""
        for pid in survivors:
            if pid in self._watched:
                continue
            pidfd = open_pidfd(pid)
            if pidfd is None:
                self._loop.call_later(_LOOK, self._advance if self._stop is not None else self._look_again)
                return
            self._watched[pid] = pidfd
            self._loop.add_reader(pidfd, lambda pid=pid: self._survivor_ended(pid))  # type: ignore[misc]

    def _survivor_ended(self, pid: int) -> None:
        pidfd = self._watched.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        if not self._watched:
            self._advance()
            self._look_again()

    def _finish(self, survivors: list[int]) -> None:
        on_gone, self._on_gone = self._on_gone, None
        self._end_watching()
        for pid in self.pids.values():
            self._guardian.forget(pid)
        if on_gone is not None:
            on_gone(survivors)

    def _end_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for pidfd in self._watched.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()


def _is_zombie(pid: int) -> bool:
    """Whether a child is a zombie by now; it stays one."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
