"""A process of `SubprocessContext` with torch's names: a handler whose `proc` has the names of `subprocess.Popen`.

The group's thread waits for the process, so `proc` asks the group instead of the kernel.
"""

from __future__ import annotations

import os
import signal
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.multiprocessing.functions.process_group import ProcessGroup

__all__ = ["StartedProcess", "SubprocessHandler"]


class StartedProcess:
    """A process that was started."""

    def __init__(self, group: ProcessGroup, local_rank: int, pid: int, args: tuple[str, ...]) -> None:
        self._group = group
        self._local_rank = local_rank
        self.args = args
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended the process, or None while it runs."""
        return self._group.ended.get(self._local_rank)

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        self._group.wait(lambda: self.returncode is not None, timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class SubprocessHandler:
    """A process and its local rank."""

    def __init__(self, group: ProcessGroup, local_rank: int, pid: int, args: tuple[str, ...]) -> None:
        self.local_rank_id = local_rank
        self.proc = StartedProcess(group, local_rank, pid, args)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the process and its group, unless it has ended."""
        if self.proc.returncode is None:
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
