"""The worker processes of one round: start them, see them end, pass signals on, stop them with all their descendants.

Rules
- A round is gone when no process of it lives: not the workers, not what is left in their sessions, not a descendant
  that left the session (found by the launcher's token). Only then the caller hears of it, once.
- When to signal whom is decided by `core.shutdown`; this file carries it out. A dead worker's group has no leader left
  to protect, so it is told as soon as the stop begins or the leader ends.
- What is left is awaited through pidfds like the workers themselves; where there are none, looked at every `_LOOK`.
"""

from __future__ import annotations

import os

from elastic_run.core import shutdown
from elastic_run.loop import open_pidfd
from elastic_run.multiprocessing import processes
from elastic_run.multiprocessing.children import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.guardian import Guardian

#: Seconds between two looks at leftovers that can't be waited for (a case of law 2's list).
_LOOK = 0.01


class Workers:
    """The processes of one round on this node.

    Args:
        loop: The agent's loop.
        guardian: Is told of every session, so that none outlives the agent.
        on_exit: Called with a worker's local rank and exit code (minus the signal's number) when it has ended.
    """

    def __init__(self, loop: Loop, guardian: Guardian, *, on_exit: Callable[[int, int], None]) -> None:
        self._loop = loop
        self._guardian = guardian
        self._on_exit = on_exit
        self._since = getattr(processes.read_stat("self"), "started_at", 0)
        self.pids: dict[int, int] = {}
        self.alive: set[int] = set()
        self._stop: shutdown.Stop | None = None
        self._is_hurried = False
        self._on_gone: Callable[[list[int]], None] | None = None
        self._timer: Timer | None = None
        self._watched: dict[int, int] = {}

    def start(
        self,
        local_rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdout: int = 1,
        stderr: int = 2,
        affinity: frozenset[int] | None = None,
    ) -> int:
        """Start one worker.

        Args:
            local_rank: Its number on this node.
            argv: The program and its arguments.
            env: Its whole environment.
            stdout: Descriptor that it gets as 1.
            stderr: Descriptor that it gets as 2.
            affinity: Logical CPUs, or None.

        Returns:
            Its pid.

        Raises:
            OSError: It can't be started.
        """
        pid = spawn(argv, env, stdout=stdout, stderr=stderr, affinity=affinity)
        self._guardian.watch(pid)
        self.pids[local_rank] = pid
        self.alive.add(local_rank)
        self._loop.watch_exit(pid, lambda code: self._exited(local_rank, code))
        return pid

    def forward(self, number: int) -> None:
        """Send a signal to the workers that live, not to their children."""
        processes.signal_processes((self.pids[rank] for rank in self.alive), number)

    @property
    def was_told_to_stop(self) -> bool:
        """Whether the workers have been signalled to stop."""
        return self._stop is not None and self._stop.leader_told

    @property
    def was_killed(self) -> bool:
        """Whether the workers have been sent SIGKILL."""
        return self._stop is not None and self._stop.killed_at is not None

    def stop(self, number: int, grace: float, on_gone: Callable[[list[int]], None]) -> None:
        """Stop every process of the round.

        Args:
            number: The signal that they get first.
            grace: Seconds until SIGKILL.
            on_gone: Called once, with the pids that SIGKILL could not end (usually none).
        """
        self._on_gone = on_gone
        self._stop = shutdown.Stop(started_at=self._loop.now(), signal=number, grace=grace)
        dead = [pid for rank, pid in self.pids.items() if rank not in self.alive]
        processes.signal_groups(self._ours(dead), number)
        self._advance()

    def hurry(self) -> None:
        """Send SIGKILL now, if a stop is under way."""
        self._is_hurried = True
        if self._stop is not None:
            self._advance()

    def _exited(self, local_rank: int, code: int) -> None:
        self.alive.discard(local_rank)
        if self._stop is not None:
            processes.signal_groups((self.pids[local_rank],), self._stop.signal)
        self._on_exit(local_rank, code)
        if self._stop is not None and not self.alive:
            self._advance()

    def _ours(self, sessions: Sequence[int]) -> list[int]:
        token = self._guardian.token
        return [session for session in sessions if not processes.is_recycled(session, token)]

    def _survivors(self) -> list[int]:
        ignored = (self._guardian.pid, os.getpid())
        sessions = frozenset(self._ours(list(self.pids.values())))
        return processes.find_survivors(sessions, self._guardian.token, since=self._since, ignored=ignored)

    def _advance(self) -> None:
        """Take the stop's next step, and see whether anything is left."""
        if self._stop is None or self._on_gone is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._stop, step = shutdown.advance(
            self._stop, leaders_alive=bool(self.alive), is_hurried=self._is_hurried, now=self._loop.now()
        )
        if step.tell_leaders:
            self.forward(self._stop.signal)
        survivors = [] if self.alive and not (step.tell_groups or step.kill or step.give_up) else self._survivors()
        if not survivors and not self.alive:
            self._finish([])
            return
        if step.give_up:
            self._finish(survivors)
            return
        if step.tell_groups:
            processes.signal_processes(survivors, self._stop.signal)
        if self._stop.killed_at is not None:
            processes.kill_all(self._ours(list(self.pids.values())), survivors)
        if step.next_at is not None:
            self._timer = self._loop.call_at(step.next_at, self._advance)
        if not self.alive:
            self._await(survivors)

    def _await(self, survivors: Sequence[int]) -> None:
        """Come back when one of them has ended."""
        for pid in survivors:
            if pid in self._watched:
                continue
            pidfd = open_pidfd(pid)
            if pidfd is None:
                self._loop.call_later(_LOOK, self._advance)
                return
            self._watched[pid] = pidfd
            self._loop.add_reader(pidfd, lambda pid=pid: self._survivor_ended(pid))  # type: ignore[misc]

    def _survivor_ended(self, pid: int) -> None:
        pidfd = self._watched.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._advance()

    def _finish(self, survivors: list[int]) -> None:
        on_gone, self._on_gone = self._on_gone, None
        if self._timer is not None:
            self._timer.cancel()
        for pidfd in self._watched.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()
        for pid in self.pids.values():
            self._guardian.forget(pid)
        if on_gone is not None:
            on_gone(survivors)
