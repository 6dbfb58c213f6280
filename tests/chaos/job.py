"""One training job on virtual hosts, an elastic-run on each, followed through its faults."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.accounts import Progress, audit, read_progress
from tests.support.launch import ELASTIC_RUN
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.host_process import HostProcess
    from tests.support.hosts import VirtualHost, VirtualHosts

_TRAINING = Path(__file__).with_name("accounted_training.py")
#: The store's port on the hosts, or etcd's on the hub.
PORT = 29400
#: Keep-alives: a node is lost after three seconds of silence.
LEASE = 3.0
#: Law 6: seconds that workers may outlive their agent.
_ORPHAN_DEADLINE = 2.0
#: Seconds until an agent that the job has no use for has ended.
_REFUSAL = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What job is run.

    Attributes:
        backend: The rendezvous backend.
        endpoint: Where it is.
        workers: Workers on each node.
        launcher: The launcher's command.
        flags: More of its flags.
    """

    backend: str
    endpoint: str
    workers: int = 1
    launcher: Sequence[str] = ELASTIC_RUN
    flags: Sequence[str] = (
        "--max-restarts=1000",
        "--max-backoff=1",
        "--shutdown-timeout=3",
        "--membership-window=100000/1h",  # faults come quicker than changes of membership do in a job
        "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120",
    )

    def command(self, nodes: int, directory: Path) -> list[str | Path]:
        """Return the command line of every agent."""
        rendezvous = [f"--rdzv-backend={self.backend}", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=chaos"]
        size = [f"--nnodes=2:{nodes}", f"--nproc-per-node={self.workers}"]
        return [
            *self.launcher,
            *size,
            *rendezvous,
            *self.flags,
            f"--log-dir={directory / 'logs'}",
            _TRAINING,
            directory,
        ]


@dataclass(slots=True)
class Node:
    """One host's part in the job.

    Attributes:
        host: The host.
        agent: Its elastic-run.
        past: The agents before it, with how they ended: pairs of exit code and output.
    """

    host: VirtualHost
    agent: HostProcess
    past: list[tuple[int, str]] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether the agent runs."""
        return self.host.is_on and self.agent.process.poll() is None

    @property
    def output(self) -> str:
        """All that agents on this host have written so far."""
        return "".join(text for _, text in self.past) + self.agent.stdout

    def workers(self) -> list[int]:
        """Return the pids of the host's workers, as this machine sees them."""
        found = []
        for pid in self.host.processes():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"\0LOCAL_RANK=" in b"\0" + environment and _TRAINING.name.encode() in command:
                found.append(pid)
        return found


def _find_orphans(node: Node) -> list[int]:
    return node.host.processes()


class ManyNodeJob:
    """The job.

    Args:
        hosts: Where it runs, one agent on each.
        plan: What is run.
        directory: For its checkpoint, books and logs.

    Attributes:
        orphan_deadline: Seconds that anything may live on after an agent.
    """

    def __init__(self, hosts: VirtualHosts, plan: Plan, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self._command = plan.command(len(hosts), directory)
        self._ranks = len(hosts) * plan.workers
        self.orphan_deadline = _ORPHAN_DEADLINE
        self.nodes = [Node(host, self._start_agent(host)) for host in hosts]

    def progress(self) -> Progress | None:
        """Return what the newest checkpoint says."""
        return read_progress(self.directory)

    def wait_progress(self, *, deadline: float) -> Progress:
        """Wait until all nodes together have written two checkpoints from now on.

        An agent that ends meanwhile has given the job up: that is a failure here.

        Raises:
            AssertionError: It did not happen; the message has what every agent wrote.
        """
        before = self.progress()
        seen: set[int] = set()

        def has_gone_on() -> Progress | None:
            self._assert_running()
            now = self.progress()
            if now and now.ranks == self._ranks and (before is None or now.step > before.step):
                seen.add(now.step)
            return now if len(seen) > 1 else None

        try:
            progress = wait_until(has_gone_on, deadline=deadline, what=f"progress of {self._ranks} ranks")
        except DeadlinePassedError as error:
            message = f"{error}\n{self.transcript()}"
            raise AssertionError(message) from error
        assert progress is not None
        return progress

    def restart_agents(self, ended: Node | None) -> list[int]:
        """Start an agent where a fault has ended one.

        Args:
            ended: The one node whose agent may have ended.

        Returns:
            The exit code of the agent that is gone, if one is.

        Raises:
            AssertionError: Another agent has ended.
        """
        self._assert_running(ended)
        codes = []
        for node in self.nodes:
            assert node.host.is_on
            if not node.is_running:
                codes.append(self.start_again(node))
        return codes

    def start_again(self, node: Node) -> int:
        """Start an agent on a node whose agent has ended; returns the exit code of that one."""
        code = node.agent.wait_exit()
        node.past.append((code, node.agent.stdout))
        node.agent = self._start_agent(node.host)
        return code

    def ask_worker(self, node: Node, command: str) -> None:
        """Let a worker on a node run a shell command, soon."""
        partial = self.directory / "ask.partial"
        partial.write_text(command, encoding="ascii")
        partial.replace(self.directory / f"ask.{node.host.name}")

    def run_another_script(self, node: Node) -> tuple[int, str]:
        """Start an elastic-run with the flags of the job and another script on a node.

        Returns:
            Its exit code and its output. The script, if it runs, writes the file `another.ran`.
        """
        script = self.directory / "another.py"
        script.write_text("import pathlib, sys\npathlib.Path(sys.argv[1], 'another.ran').touch()\n", encoding="ascii")
        agent = self._start(node.host, [script if part == _TRAINING else part for part in self._command])
        return agent.wait_exit(deadline=_REFUSAL), agent.stdout

    def wait_no_orphans(self, node: Node) -> None:
        """Wait until a host whose agent is gone runs nothing any more, within the time that it is given (law 6)."""
        try:
            wait_until(lambda: not _find_orphans(node), deadline=self.orphan_deadline, what=f"orphans on {node.host}")
        except DeadlinePassedError as error:
            message = f"{error}\n{self.transcript()}"
            raise AssertionError(message) from error

    def finish(self, *, deadline: float) -> None:
        """Let the training end, and see that it ends well everywhere, with nothing left and nothing lost."""
        (self.directory / "enough").touch()
        codes = [node.agent.wait_exit(deadline=deadline) for node in self.nodes]
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.transcript()}"
        for node in self.nodes:
            self.wait_no_orphans(node)
        progress = self.progress()
        assert progress is not None
        assert audit(progress, self.directory) == []

    def transcript(self, *, lines: int = 60) -> str:
        """Return the last lines of every agent, for messages."""
        parts = []
        for node in self.nodes:
            text = "\n".join(node.output.splitlines()[-lines:])
            parts.append(f"--- {node.host}, past exit codes {[code for code, _ in node.past]}\n{text}")
        return "\n".join(parts)

    def close(self) -> None:
        """Stop what still runs."""
        for node in self.nodes:
            node.agent.send(signal.SIGCONT)
            node.agent.close()

    def _start_agent(self, host: VirtualHost) -> HostProcess:
        return self._start(host, self._command)

    def _start(self, host: VirtualHost, command: Sequence[str | Path]) -> HostProcess:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        return host.start(command, env=environment, merge=True)

    def _assert_running(self, excused: Node | None = None) -> None:
        over = [node.host.name for node in self.nodes if not node.is_running and node is not excused]
        assert not over, f"elastic-run ended on {over}\n{self.transcript()}"
