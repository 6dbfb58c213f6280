"""The command's side of --hosts: an ssh for each host, their output, and the end of the job.

- All hosts are asked side by side, and a job starts when all are ready. If one is not, nothing starts anywhere.
- The command reads no output that the console can't take, so that its memory stays bounded.
- A host that has ended or is lost is not started again. If fewer hosts are left than the job needs, the others would
  wait in vain, and are stopped.
- Each host's launcher sends its report as a message: all have the same cause, and the user gets one report.
- ssh's end is its process's end, and not that of its pipes: the master of a shared connection (ControlPersist) lives on
  and holds them.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from contextlib import closing

from elastic_run import contract, signals
from elastic_run.core.job.short_lists import list_hosts
from elastic_run.hosts.protocol import BEAT, MOST_ENDPOINTS, MarkedMessages, write_message
from elastic_run.loop import Loop
from elastic_run.multiprocessing.fork_exec import inherited_environment, start_process
from elastic_run.multiprocessing.output.console import Console
from elastic_run.multiprocessing.output.tail import Activity
from elastic_run.multiprocessing.output.worker_lines import Teed
from elastic_run.multiprocessing.wiring import STDERR, STDOUT, TEED, Line
from elastic_run.report.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from elastic_run.hosts.protocol import HostsJob

#: ssh's exit code for errors of its own.
_SSH_FAILED = 255
#: Seconds after the first failure of a host in which others may fail too, to be named with it.
_OTHER_FAILURES = 0.5
#: Seconds that ssh may take to end after the launcher, or after the command has closed its stdin: background processes
#: of workers may hold its output open.
_LINGER = 3.0
#: Bytes of a host's stderr before the start that are kept, and lines of it that are shown.
_MOST_SAID, _MOST_LINES = 1 << 16, 3
_LINE_LIMIT = 1 << 20
_STOPPING = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP)
#: Exit codes of a node that doesn't know how the job has ended, or has left it before.
_OF_ONE_NODE = range(contract.EXIT_NODES_LOST, contract.EXIT_HUNG)


def run_on_hosts(job: HostsJob) -> int:
    """Run a job on several hosts, and return its exit code."""
    if signals.is_ignored(signals.SIGCHLD):
        signals.default_signal(signals.SIGCHLD)  # else the kernel throws exit codes away
    gc.enable()
    with Loop() as loop, closing(Console(loop)) as console:
        return _Command(loop, console, job).run()


def choose_exit_code(codes: Sequence[int | None], *, has_too_few: bool) -> int:
    """Return the job's exit code from those of its hosts in the order of their ends; None stands for a lost host.

    The last hosts know best how the job has ended, unless they were stopped because the others were missing.
    """
    known = [code for code in codes if code is not None]
    if has_too_few or not known:
        return contract.EXIT_NODES_LOST
    return next((code for code in reversed(known) if code not in _OF_ONE_NODE), known[-1])


class _Command:
    """Connects all hosts, starts the job when all are ready, and runs until all have ended."""

    def __init__(self, loop: Loop, console: Console, job: HostsJob) -> None:
        self.loop, self.console, self.job = loop, console, job
        self._is_running = self._is_failed = self._has_too_few = False
        self._signal: int | None = None
        self._ended: list[Connection] = []
        self._connections: list[Connection] = []
        loop.watch_signals(dict.fromkeys((*signals.ENDING, *signals.OFFERED)), self._on_signal)

    def run(self) -> int:
        """Run the job, and return its exit code."""
        try:
            for index in range(len(self.job.names)):
                self._connections.append(Connection(self, index))
            self._beat()
            self.loop.run_until(lambda: self._is_failed or self._have_all_ended())
            code = self._finish() if self._is_running else self._give_up()
        finally:
            for connection in self._connections:
                connection.close()
        self.loop.run_until(lambda: self.console.is_idle or self._signal is not None)
        return code

    def _beat(self) -> None:
        for connection in self._connections:
            connection.send()
        self.loop.call_later(BEAT, self._beat)

    # --- until all are ready -----------------------------------------------------------------------------------------
    def on_ready(self) -> None:
        """Start the job if all hosts are ready."""
        endpoints = [connection.endpoint for connection in self._connections]
        if self._is_failed or not all(endpoints):
            return
        self._is_running = True
        for connection in self._connections:
            connection.start(endpoints[:MOST_ENDPOINTS] if self.job.has_own_place else [])

    def _give_up(self) -> int:
        """End what was begun on the hosts, say why, and return the exit code."""
        self.loop.run_until(lambda: self._signal is not None, self.loop.now() + _OTHER_FAILURES)
        failed = [*self._ended]
        self._hang_up()
        self.loop.run_until(self._have_all_ended, self.loop.now() + _LINGER)
        if self._signal is not None:
            self.console.say(f"stopped by {signals.signal_name(self._signal)}; nothing was started")
            return contract.EXIT_SIGNAL_BASE + self._signal
        causes: defaultdict[str, list[Connection]] = defaultdict(list)
        for connection in failed:
            causes[connection.describe_failure()].append(connection)
        for words, connections in causes.items():
            self.console.say(f"error: {_list(connections)}: {words}; nothing was started")
        is_unreachable = any(connection.ssh_code == _SSH_FAILED for connection in failed)
        return contract.EXIT_RENDEZVOUS if is_unreachable else contract.EXIT_USAGE

    # --- while the job runs ------------------------------------------------------------------------------------------
    def on_end(self, connection: Connection) -> None:
        """Take note that a host's ssh has ended; the others go on if the job may."""
        self._ended.append(connection)
        if not self._is_running:
            self._is_failed = True
            return
        if connection.exit_code is None:
            self.console.say(f"the connection to {connection.name} is lost: ssh has ended with {connection.ssh_code}")
        left = len(self._connections) - len(self._ended)
        if connection.exit_code != 0 and left < self.job.least:
            # The others end by themselves if the job has failed.
            self.loop.call_later(_LINGER if connection.exit_code is None else self.job.stop_time, self._stop_rest)

    def _stop_rest(self) -> None:
        left = [one for one in self._connections if one not in self._ended]
        if left and self._signal is None and not self._has_too_few:
            self._has_too_few = True
            self.console.say(f"the job needs {self.job.least} hosts, so elastic-run stops it on {_list(left)}")
            self._stop(signals.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if not self._is_running:
            if number in signals.ENDING:
                self._signal, self._is_failed = number, True
            return
        if number in _STOPPING:
            self._signal = number
        self._stop(number)

    def _stop(self, number: int) -> None:
        """Pass a signal on; if it ends the job, end connections that don't follow."""
        for connection in self._connections:
            connection.send(signal=number)
        if number in _STOPPING:
            self.loop.call_later(self.job.stop_time, self._hang_up)

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.hang_up()

    def _have_all_ended(self) -> bool:
        return len(self._ended) == len(self._connections)

    def _finish(self) -> int:
        """Show one report of all, and return the job's exit code."""
        code = choose_exit_code([one.exit_code for one in self._ended], has_too_few=self._has_too_few)
        reports = [one.report for one in self._ended if one.report]
        reports = [one for one in reports if one["exit_code"] == code] or ([] if self._has_too_few else reports)
        if reports:
            self.console.write(
                STDERR, max(reports, key=lambda one: int(one["place"]))["report"].encode(errors="replace")
            )
        return code


def _list(connections: Iterable[Connection]) -> str:
    return ", ".join(list_hosts([connection.name for connection in connections]))


class HostOutput(Teed):
    """A stream of a host: its messages go to the connection, and the rest to the console.

    Until the job starts the rest is `held`: login shells and ssh write there too.
    """

    def __init__(self, connection: Connection, mark: str, line: Line) -> None:
        self.held: bytes | None = b""
        self._connection = connection
        self._messages = MarkedMessages(mark)
        command = connection.command
        prefix = f"[{connection.name}] ".encode() if len(command.job.names) > 1 else b""
        common = (command.loop, command.console.stream(line.fd), line, Activity(0, 0.0, lambda *_: None), None, None)
        super().__init__(*common, prefix=prefix, limit=_LINE_LIMIT)

    def cut(self, data: bytes) -> None:
        """Make pieces of what is no message."""
        shown, found = self._messages.cut(data)
        for message in found:  # not within a turn on the console
            self._loop.call_soon(lambda message=message: self._connection.obey(message))  # type: ignore[misc]
        if self.held is not None:
            self.held = (self.held + shown)[-_MOST_SAID:]
        elif shown:
            super().cut(shown)

    def release(self) -> None:
        """Show what ssh and the launcher have said before the start, and from now on all."""
        held, self.held = self.held, None
        if held and self.line.fd == STDERR:
            self.add(held)


class Connection:
    """The ssh of one host.

    `endpoint` is the host's address and port, "" until it is ready. `exit_code` is the launcher's, or None.
    """

    def __init__(self, command: _Command, index: int) -> None:
        """Start ssh, and give the host its order."""
        job, self.name = command.job, command.job.names[index]
        self.endpoint = ""
        self.exit_code: int | None = None
        self.ssh_code = 0
        self.report: dict[str, Any] = {}
        self.command, self._loop = command, command.loop
        self._unsent = bytearray()
        self._outputs: list[HostOutput] = []
        mark, environment = os.urandom(8).hex(), inherited_environment()
        stdin, self._stdin = os.pipe()
        os.set_blocking(self._stdin, False)
        ends = [stdin]
        try:
            for fd in (STDOUT, STDERR):
                reading, writing = os.pipe()
                ends.append(writing)
                os.set_blocking(reading, False)
                self._outputs.append(HostOutput(self, mark, Line(fd, TEED, reading)))
            self._pid = start_process(job.commands[index], environment, stdin=stdin, stdout=ends[1], stderr=ends[2])
        finally:
            for end in ends:
                os.close(end)
        self._loop.watch_exit(self._pid, self._on_exit)
        self.send(**job.order, mark=mark, words=job.words[index])

    def send(self, **fields: Any) -> None:
        """Send a message; a sign of life, which has no fields, is left out if older messages wait."""
        if self._stdin >= 0 and (fields or not self._unsent):
            self._unsent += write_message(**fields)
            self._write()

    def _write(self) -> None:
        try:
            del self._unsent[: os.write(self._stdin, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # ssh has ended
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._stdin, self._write)
        else:
            self._loop.remove_writer(self._stdin)

    def start(self, endpoints: Sequence[str]) -> None:
        """Let the host's launcher begin."""
        for output in self._outputs:
            output.release()
        self.send(start=endpoints)

    def obey(self, message: dict[str, Any]) -> None:
        """Take a message of the host."""
        if "ready" in message:
            self.endpoint = message["ready"]
            self.command.on_ready()
        elif "exit" in message:
            self.exit_code = message["exit"]
            self.hang_up()
        elif "report" in message:
            self.report = message

    def _on_exit(self, code: int) -> None:
        self._pid, self.ssh_code = 0, code if code >= 0 else contract.EXIT_SIGNAL_BASE - code
        for output in self._outputs:
            output.finish()
        self._loop.call_soon(lambda: self.command.on_end(self))  # behind the last messages

    def describe_failure(self) -> str:
        """Say why this host is not ready, in ssh's words or in those of its launcher."""
        said = (self._outputs[1].held or b"").decode(errors="replace").splitlines()
        most = _MOST_LINES if self.ssh_code == _SSH_FAILED else 1  # a jump host's ssh comes before the last line
        words = "; ".join([line for line in said if line.strip()][-most:])
        return printable(words.removeprefix("elastic-run: error: ") or f"ssh has ended with {self.ssh_code}")

    def hang_up(self) -> None:
        """Close the host's stdin, which ends its launcher if that runs; if ssh doesn't end then, end it."""
        if self._stdin >= 0:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
            self._loop.call_later(_LINGER, self._close_late)

    def _close_late(self) -> None:
        """End ssh when the console has shown what it has said."""
        if self.command.console.is_idle:
            self.close()
        else:
            self._loop.call_later(_LINGER, self._close_late)

    def close(self) -> None:
        """End ssh, and with it the connection; harmless when it has ended."""
        if self._pid:
            os.kill(self._pid, signals.SIGKILL)
