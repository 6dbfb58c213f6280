"""Starting elastic-run as users do, and following it: lines as they come, the exit code, signals.

A launched program runs in its own session with pipes for its output. Two threads collect the lines; every wait is a
condition with a deadline.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from tests.support.processes import descendants_of, kill_processes
from tests.support.wait import DEADLINE, DeadlinePassedError, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import TypeAlias

    #: The fixtures `launch`, which starts a launcher, and `worker`, which writes a worker's program.
    Launch: TypeAlias = Callable[..., "Launched"]
    Worker: TypeAlias = Callable[[str], Path]

#: The launcher under test.
ELASTIC_RUN = (sys.executable, "-m", "elastic_run")
#: Comes before a command: root without the right to pass by the modes of files is denied what others are denied.
UNPRIVILEGED = (
    ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all") if os.geteuid() == 0 else ()
)
#: Variables of the surroundings that would change what a test sees.
_UNWANTED = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "PYTHON_EXEC", "LOGLEVEL", "RANK", "WORLD_SIZE")


class Launched:
    """A running program: its lines, its end.

    Args:
        command: The program and its arguments.
        env: Its whole environment.
        cwd: Its working directory.
        stdin: A descriptor, or `subprocess.DEVNULL` or `PIPE`.
        merge: Whether stderr goes into stdout's pipe, as under ``2>&1``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | str | None = None,
        stdin: int = subprocess.DEVNULL,
        merge: bool = False,
    ) -> None:
        stderr = subprocess.STDOUT if merge else subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
        self.started_at = time.monotonic()
        self._news = threading.Condition()
        self._open_pipes = 1 if merge else 2
        self._lines: list[str] = []
        self._output = {"stdout": bytearray(), "stderr": bytearray()}
        pipes = {"stdout": self.process.stdout, "stderr": self.process.stderr}
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True) for name, pipe in pipes.items() if pipe
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The program's pid, which is also its session's and its group's."""
        return self.process.pid

    @property
    def stdout(self) -> str:
        """What came on stdout so far."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """What came on stderr so far."""
        return self._text("stderr")

    def wait_line(self, pattern: str, *, deadline: float = DEADLINE) -> re.Match[str]:
        """Wait for a line, on either stream, in which a regular expression is found."""
        return self.wait_lines(pattern, count=1, deadline=deadline)[0]

    def wait_lines(self, pattern: str, *, count: int, deadline: float = DEADLINE) -> list[re.Match[str]]:
        """Wait for `count` lines in which a regular expression is found, on either stream."""
        expression = re.compile(pattern)
        deadline = stretched(deadline)

        matches: list[re.Match[str]] = []
        seen = 0

        def is_over() -> bool:
            nonlocal seen
            matches.extend(match for line in self._lines[seen:] if (match := expression.search(line)))
            seen = len(self._lines)
            return len(matches) >= count or not self._open_pipes

        with self._news:
            is_there = self._news.wait_for(is_over, deadline)
        if len(matches) < count:
            reason = f"not within {deadline} s" if not is_there else "not before the output ended"
            message = f"{reason}: {count} x {pattern!r} in\n{self.stdout}\n--- stderr\n{self.stderr}"
            raise DeadlinePassedError(message)
        return matches[:count]

    def wait_exit(self, *, deadline: float = DEADLINE) -> int:
        """Wait for the program's end and for the end of its output."""
        deadline = stretched(deadline)
        end = time.monotonic() + deadline
        try:
            code = self.process.wait(deadline)
        except subprocess.TimeoutExpired as error:
            message = f"still running after {deadline} s:\n{self.stdout}\n--- stderr\n{self.stderr}"
            raise DeadlinePassedError(message) from error
        for reader in self._readers:
            reader.join(max(0.1, end - time.monotonic()))
            if reader.is_alive():
                message = f"the program ended with {code}, but somebody holds its output open"
                raise DeadlinePassedError(message)
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program alone."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill what still runs and close the pipes; harmless when all is over."""
        if self.process.poll() is None:
            # A stopped launcher starts no more processes. Its descendants may, and are looked for until none is left.
            os.kill(self.pid, signal.SIGSTOP)
            wait_until(self._has_no_descendants, what="the end of its descendants")
            kill_processes([self.pid])
            self.process.wait(DEADLINE)
        if self.process.stdin:
            self.process.stdin.close()
        for reader in self._readers:
            reader.join(DEADLINE)

    def _has_no_descendants(self) -> bool:
        below = descendants_of(self.pid)
        kill_processes(below)
        return not below

    def _text(self, name: str) -> str:
        with self._news:
            return self._output[name].decode(errors="replace")

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                with self._news:
                    self._output[name] += line
                    self._lines.append(line.decode(errors="replace").rstrip("\r\n"))
                    self._news.notify_all()
        with self._news:
            self._open_pipes -= 1
            self._news.notify_all()


def clean_environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return this process's environment without what would change a launcher's behaviour."""
    environment = {
        name: value for name, value in os.environ.items() if name not in _UNWANTED and not name.startswith("PET_")
    }
    for name, value in (extra or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def launch(
    *arguments: str | Path,
    env: Mapping[str, str | None] | None = None,
    program: Sequence[str] = ELASTIC_RUN,
    cwd: Path | str | None = None,
    stdin: int = subprocess.DEVNULL,
    merge: bool = False,
) -> Launched:
    """Start a launcher with arguments."""
    command = [*program, *map(str, arguments)]
    return Launched(command, env=clean_environment(env), cwd=cwd, stdin=stdin, merge=merge)


#: Behind the script of --print-completion; prints what the last word is completed to.
_COMPLETE = f"""
elastic-run() {{ {sys.executable} -m elastic_run "$@"; }}
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def complete_in_bash(script: str, words: str, directory: Path) -> list[str]:
    """Return to what bash completes the last word behind `elastic-run`, sorted."""
    command = ["bash", "--norc", "-c", script + _COMPLETE, "bash", "elastic-run", *words.split(" ")]
    return sorted(subprocess.check_output(command, cwd=directory, text=True).split())
