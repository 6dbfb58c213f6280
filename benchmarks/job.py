"""A program under the clock: when it was started, when its lines came, when it ended, what CPU time it took.

Unlike `tests.support.launch` no thread and no polling wait stands between an event and its time: one poll over the
output and the program's pidfd.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.support.launch import clean_environment
from tests.support.processes import descendants_of, kill_processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import NoReturn

#: Seconds that anything here may take.
DEADLINE = 60.0
#: The kernel counts CPU time in so many ticks per second.
TICKS = os.sysconf("SC_CLK_TCK")


class BenchmarkError(Exception):
    """A program did not do what is to be measured."""


class Job:
    """A running program. Times are nanoseconds of the host's monotonic clock.

    Args:
        command: The program and its arguments.
        directory: Its working directory.
        console: A descriptor that it gets as stdout and stderr; else its stdout is read by this class.
        env: Variables on top of a clean environment; None takes one away.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: Path,
        console: int | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed in close()
        self._output = b""
        self.ended_at = 0
        self.cpu_seconds = 0.0
        environment = clean_environment(env)
        self.started_at = time.monotonic_ns()
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if console is None else console,
            stderr=self._errors if console is None else console,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        if self.process.stdout:
            os.set_blocking(self.process.stdout.fileno(), False)
            self._poll.register(self.process.stdout.fileno(), select.POLLIN)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def lines(self) -> list[str]:
        """The whole lines of stdout so far."""
        return self._output[: self._output.rfind(b"\n") + 1].decode(errors="replace").splitlines()

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait_lines(self, count: int, *, starting: str = "", deadline: float = DEADLINE) -> list[list[str]]:
        """Wait until so many lines came."""
        end = time.monotonic() + deadline
        while len(found := [line.split() for line in self.lines if line.startswith(starting)]) < count:
            if self.ended_at:
                self._fail(f"ended after {len(found)} of {count} lines")
            self._step(end)
        return found

    def wait_end(self, *, deadline: float = DEADLINE, code: int | None = 0) -> int:
        """Wait for the program's end."""
        end = time.monotonic() + deadline
        while not self.ended_at:
            self._step(end)
        if code is not None and self.process.returncode != code:
            self._fail(f"ended with {self.process.returncode}")
        return self.ended_at

    def poke(self) -> None:
        """Send one byte to its stdin, which its workers inherit."""
        os.write(self.process.stdin.fileno(), b"\n")  # type: ignore[union-attr] # it is a pipe

    def send(self, number: int) -> int:
        """Send it a signal; returns the time at which that was done."""
        os.kill(self.pid, number)
        return time.monotonic_ns()

    def read(self) -> None:
        """Take in what it has written so far."""
        if self.process.stdout and not self.ended_at:
            self._read()

    def close(self) -> None:
        """Kill it and what is below it, if it runs, and close its pipes."""
        if self.process.poll() is None:
            kill_processes([self.pid, *descendants_of(self.pid)])
            self.process.wait()
        os.close(self._pidfd)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream:
                stream.close()

    def _step(self, end: float) -> None:
        ready = [fd for fd, _ in self._poll.poll(max(0.0, (end - time.monotonic()) * 1000))]
        now = time.monotonic_ns()
        if not ready:
            self._fail("not in time")
        if self._pidfd in ready:
            self.ended_at = now
            self.cpu_seconds = _own_cpu_seconds(self.pid)
            self.process.wait()
            self._poll.unregister(self._pidfd)
        self._read()

    def _read(self) -> None:
        if not self.process.stdout:
            return
        fd = self.process.stdout.fileno()
        try:
            while chunk := os.read(fd, 1 << 16):
                self._output += chunk
        except BlockingIOError:
            return
        if not self.ended_at:
            self._poll.unregister(fd)

    def _fail(self, what: str) -> NoReturn:
        message = f"{what}: {self.process.args!r}\n{self._output[-2000:]!r}\n{self.errors[-4000:]}"
        raise BenchmarkError(message)


def _own_cpu_seconds(pid: int) -> float:
    """Return what a process, a zombie by now, used itself, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
