"""A host's side of --hosts: ssh runs `main`, which starts the host's launcher when it has the order, and ends it.

- The launcher reads and checks its command line as everywhere, says `ready`, and waits: no launcher starts a worker
  before all hosts are ready (`say_ready`, `wait_start`).
- The end of the ssh connection ends the launcher, as SIGTERM would. If the network is silent, no connection ends here:
  so the command sends signs of life, and a long silence counts as the end.
- If this process is killed, the kernel sends the launcher SIGTERM. If the launcher is killed, its guardian ends the
  workers.
- The order comes through stdin, and no secret of it is in a command line.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

from elastic_run import contract, signals
from elastic_run.hosts.protocol import LONGEST_SILENCE, VERSION, write_marked, write_message
from elastic_run.loop import Loop
from elastic_run.multiprocessing.fork_exec import start_process
from elastic_run.notices import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: What Python runs in a host's ssh, with -I -S, and as its launcher; the first argument is the package's directory. In
#: the launcher it takes the place of the working directory, where any module may have the name of a standard one.
CODE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from elastic_run.hosts.remote import main; main()"
_LAUNCHER = "import sys; sys.path[0] = sys.argv.pop(1); from elastic_run.__main__ import main; main()"
_READ_SIZE = 1 << 16
#: Of prctl(2).
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run one host's part of a job, say how it has ended, and leave with the launcher's exit code."""
    with Loop() as loop:
        side = HostSide(loop)
        loop.run_until(lambda: side.exit_code is not None)
    with suppress(OSError):  # nobody may listen any more
        os.write(1, write_marked(side.mark, exit=side.exit_code))
    sys.exit(side.exit_code)


class HostSide:
    """The launcher of this host and its connection; `exit_code` is the launcher's, None as long as it runs."""

    def __init__(self, loop: Loop) -> None:
        self.exit_code: int | None = None
        self._loop = loop
        self._unread = b""
        self.mark = ""
        self._gate = -1
        self._pid = 0
        self._stop_time = 0.0
        self._silence = loop.call_later(LONGEST_SILENCE, self._end)
        loop.add_reader(0, self._read)
        loop.watch_signals(signals.ENDING, self._pass_on)

    def _read(self) -> None:
        data = os.read(0, _READ_SIZE)
        self._silence.cancel()
        if not data:
            self._loop.remove_reader(0)
            self._end()
            return
        self._silence = self._loop.call_later(LONGEST_SILENCE, self._end)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, message: dict[str, Any]) -> None:
        if "words" in message:
            self._begin(message)
        elif "start" in message and self._gate >= 0:
            with suppress(OSError), open(self._gate, "wb") as gate:  # the launcher may have ended
                gate.write(write_message(**message))
            self._gate = -1
        elif "signal" in message:
            self._pass_on(message["signal"])

    def _begin(self, order: dict[str, Any]) -> None:
        """Start the launcher in the directory of the command, if that is there."""
        self.mark, directory, self._stop_time = order["mark"], order["directory"], order["stop_time"]
        problem = "" if order["version"] == VERSION else "this host has another release of elastic-run"
        try:
            os.chdir(directory)
        except OSError as error:
            problem = f"directory {directory!r}: {(error.strerror or str(error)).lower()}"
        if problem:
            say(f"error: {problem}")
            self.exit_code = contract.EXIT_USAGE
            return
        # The command has read the variables of flags: those of this host would say something else, or --hosts again.
        own = {name: text for name, text in os.environ.items() if not name.startswith(contract.ENV_FLAG_PREFIX)}
        secrets = {contract.ENV_HOSTS_MARK: self.mark, contract.ENV_RDZV_TOKEN: order["token"]}
        gate, self._gate = os.pipe()
        argv = [sys.executable, "-c", _LAUNCHER, sys.path[0], *order["words"]]
        self._pid = start_process(argv, {**own, "PWD": directory, **order["environment"], **secrets}, stdin=gate)
        os.close(gate)
        self._loop.watch_exit(self._pid, self._on_exit)

    def _pass_on(self, number: int) -> None:
        if self._pid:
            os.kill(self._pid, number)
        elif self.exit_code is None:
            self.exit_code = contract.EXIT_SIGNAL_BASE + number

    def _end(self) -> None:
        """End the launcher and what it has started: nobody is left who could."""
        self._pass_on(signals.SIGTERM)
        self._loop.call_later(self._stop_time, lambda: self._pass_on(signals.SIGKILL))

    def _on_exit(self, code: int) -> None:
        self._pid = 0
        self.exit_code = code if code >= 0 else contract.EXIT_SIGNAL_BASE - code


# --- in the launcher -------------------------------------------------------------------------------------------------
def say_ready(mark: str) -> None:
    """Tell the command that this host is ready, and where other nodes reach it.

    The address is the one by which ssh has come here: the nodes may not know the name that only ssh's configuration
    explains.
    """
    import socket

    from elastic_run.rendezvous.addresses import find_outward_address, names_loopback
    from elastic_run.store.connecting import format_endpoint

    signals.call_libc("prctl", _PR_SET_PDEATHSIG, signals.SIGTERM)
    # SSH_CONNECTION has the client's address and port, then the server's.
    address = os.environ.get("SSH_CONNECTION", "").split(" ")[2:3]
    host = address[0] if address and not names_loopback(address[0]) else find_outward_address()
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        port = listener.getsockname()[1]
    os.write(1, write_marked(mark, ready=format_endpoint(host, port)))


def wait_start() -> str:
    """Wait until all hosts are ready; return the endpoints, or "". SystemExit: the job does not start."""
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(contract.EXIT_SIGNAL_BASE + signals.SIGTERM)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the workers' stdin
    return ",".join(json.loads(line)["start"])
