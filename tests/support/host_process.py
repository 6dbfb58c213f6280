"""A program that runs on a virtual host, followed from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.launch import Launched, clean_environment
from tests.support.processes import children_of, descendants_of, kill_processes
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ENTER = Path(__file__).with_name("enter_host.py")


class HostProcess(Launched):
    """A program on a virtual host. What `Launched` says of the program is true here of the program on its host.

    Args:
        first_pid: The pid, as this machine sees it, of the host's first process.
        command: The program and its arguments.
        env: Variables set on top of a clean environment; None takes one away.
        cwd: The working directory.
        merge: Whether stderr goes into stdout's pipe.
    """

    def __init__(
        self,
        first_pid: int,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str | None],
        cwd: Path | str | None = None,
        merge: bool = False,
    ) -> None:
        enter = [sys.executable, "-I", "-S", str(_ENTER), str(first_pid)]
        super().__init__([*enter, *map(str, command)], env=clean_environment(env), cwd=cwd, merge=merge)
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The program's pid as this machine sees it.

        Raises:
            ProcessLookupError: It ended before anybody asked. (A number such as 0 would be dangerous to signal.)
        """
        if self._pid is None:
            # It is the only child of the one that entered the host.
            found = wait_until(lambda: self._is_over() or children_of(self.process.pid))
            if found is True:
                raise ProcessLookupError(self.process.args)
            (self._pid,) = found
        return self._pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program alone; one that has ended gets none."""
        if not self._is_over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program, and it alone, with SIGKILL."""
        self.send(signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs and close the pipes; harmless when all is over."""
        if not self._is_over():
            kill_processes([*descendants_of(self.process.pid), self.process.pid])
            self.process.wait(DEADLINE)
        super().close()

    def _is_over(self) -> bool:
        return self.process.poll() is not None
