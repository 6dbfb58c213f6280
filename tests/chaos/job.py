"""One training job on virtual hosts, an elastic-run on each, followed through its faults; the audit of its books."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.launch import ELASTIC_RUN
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts

_TRAINING = Path(__file__).with_name("accounted_training.py")
#: The store's port on the hosts, or etcd's on the hub.
PORT = 29400
#: Keep-alives: a node is lost after three seconds of silence.
LEASE = 3.0
#: Law 6: seconds that workers may outlive their agent.
_ORPHAN_DEADLINE = 2.0
#: Seconds until an agent that the job has no use for has ended.
_REFUSAL = 60.0
#: Samples of each step, as in the training programs: these are not imported, since they import torch.
SAMPLES_PER_STEP = 12


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
        """Start an agent where a fault has ended one."""
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
        """Start an elastic-run with the flags of the job and another script on a node."""
        script = self.directory / "another.py"
        script.write_text("import pathlib, sys\npathlib.Path(sys.argv[1], 'another.ran').touch()\n", encoding="ascii")
        agent = self._start(node.host, [script if part == _TRAINING else part for part in self._command])
        return agent.wait_exit(deadline=_REFUSAL), agent.stdout

    def wait_no_orphans(self, node: Node) -> None:
        """Wait until a host whose agent is gone runs nothing any more, within the time that it is given (law 6)."""
        try:
            wait_until(lambda: not node.host.processes(), deadline=self.orphan_deadline, what=f"orphans on {node.host}")
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


# --- the books --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Segment:
    """Steps that the model has from one life.

    Attributes:
        life: The life's name.
        first: The first step.
        last: The step after the last.
        ranks: How many ranks took part.
    """

    life: str
    first: int
    last: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What the newest checkpoint says.

    Attributes:
        step: Steps that are in the model.
        loss: The loss at the last of them.
        life: The life that wrote it.
        ranks: How many ranks that life has.
        ancestry: Where the steps come from, in order.
    """

    step: int
    loss: float
    life: str
    ranks: int
    ancestry: tuple[Segment, ...]


def read_progress(directory: Path) -> Progress | None:
    """Return what the newest checkpoint says, None before the first."""
    try:
        document = json.loads((directory / "progress.json").read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    return Progress(**{**document, "ancestry": tuple(Segment(**segment) for segment in document["ancestry"])})


def read_books(directory: Path, life: str) -> dict[int, dict[int, list[int]]]:
    """Return the books of a life: step -> rank -> samples."""
    books: dict[int, dict[int, list[int]]] = {}
    for path in sorted((directory / "books").glob(f"{life}.*.jsonl")):
        rank = int(path.suffixes[0][1:])
        for line in path.read_text(encoding="ascii").splitlines():
            entry = json.loads(line)
            books.setdefault(entry["step"], {})[rank] = entry["samples"]
    return books


def audit(progress: Progress, directory: Path, samples_per_step: int = SAMPLES_PER_STEP) -> list[str]:
    """Compare a checkpoint's ancestry with the books."""
    wrong = []
    expected = 0
    for segment in progress.ancestry:
        if segment.first != expected:
            wrong.append(f"life {segment.life} begins at step {segment.first}, not {expected}")
        expected = segment.last
        books = read_books(directory, segment.life)
        for step in range(segment.first, segment.last):
            wrong += _audit_step(segment, step, books.get(step, {}), samples_per_step)
    if expected != progress.step:
        wrong.append(f"the ancestry ends at step {expected}, the checkpoint at {progress.step}")
    return wrong


def _audit_step(segment: Segment, step: int, taken: dict[int, list[int]], samples_per_step: int) -> list[str]:
    wrong = []
    if sorted(taken) != list(range(segment.ranks)):
        wrong.append(f"step {step} of life {segment.life}: ranks {sorted(taken)} of {segment.ranks}")
    counts = Counter(sample for samples in taken.values() for sample in samples)
    if counts != Counter(range(step * samples_per_step, (step + 1) * samples_per_step)):
        wrong.append(f"step {step} of life {segment.life}: samples {sorted(counts.elements())}")
    return wrong
