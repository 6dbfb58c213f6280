"""The nodes of one job on this machine: agents under the clock, and what their workers say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.job import DEADLINE, Job
from tests.support.local_rendezvous import wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from tests.benchmarks.installation import Installation

_RUN_ID = "nodes"
_HOST = "localhost"
#: As /proc/net/tcp has it.
_ESTABLISHED = "01"


class NodeGroup:
    """A job; its nodes meet at the first one's address.

    Args:
        installation: The commands.
        nnodes: What `--nnodes` is given.
        launcher: `elastic-run` or `torchrun`.
        script: One of the workers' scripts.
        options: More options of all nodes.
        arguments: The script's.
        nproc: Workers per node.
    """

    def __init__(
        self,
        installation: Installation,
        nnodes: str,
        *options: str,
        launcher: str = "elastic-run",
        script: str = "node_worker",
        arguments: Sequence[str] = (),
        nproc: int = 2,
    ) -> None:
        self.nproc = nproc
        self.port = free_port()
        self._directory = installation.directory
        program = {"elastic-run": installation.elastic_run, "torchrun": installation.torchrun}[launcher]
        place = ("--rdzv-backend=c10d", f"--rdzv-endpoint={_HOST}:{self.port}", f"--rdzv-id={_RUN_ID}")
        self._command = (*program, f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", *place, *options)
        self._script = (installation.worker(script), *arguments)
        self._nodes: list[Job] = []

    def __enter__(self) -> NodeGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The host of the store last, so that the others' guardians need not look for it.
        for node in reversed(self._nodes):
            node.close()

    def start(self, *options: str) -> Job:
        """Start a node, with options of its own."""
        node = Job([*self._command, *options, *self._script], directory=self._directory)
        self._nodes.append(node)
        return node

    def start_many(self, count: int) -> list[Job]:
        """Start nodes, one right after the other; any of them may become the host of the store."""
        return [self.start() for _ in range(count)]

    def start_host(self, *options: str) -> Job:
        """Start the node that serves the store."""
        host = self.start(*options)
        self.wait_present(1)
        return host

    def forget(self, node: Job) -> None:
        """Wait until a node's agent has ended, and close what is left of it."""
        node.wait_end(code=None)
        self._nodes.remove(node)
        node.close()

    def wait_present(self, count: int) -> None:
        """Wait until the coordinator has the connections of so many nodes, those that wait included."""
        wait_coordinated(self.port, run_id=_RUN_ID)
        # Its own node needs none.
        wait_until(lambda: _count_connections(self.port) == count - 1, what=f"{count} nodes present")


class Watch:
    """What the workers of some nodes say.

    Args:
        nodes: The nodes.
        word: What their lines begin with.
        nproc: Workers per node.
        from_start: Whether what they have said already counts.
    """

    def __init__(self, nodes: Sequence[Job], word: str, nproc: int, *, from_start: bool = False) -> None:
        self._word = word
        self._nproc = nproc
        self._before = [(node, 0 if from_start else _count(node, word)) for node in nodes]

    def wait(self, *, deadline: float = DEADLINE) -> list[list[str]]:
        """Wait for a line of every worker of these nodes; returns their words."""
        found = []
        for node, before in self._before:
            count = before + self._nproc
            found += node.wait_lines(count, starting=self._word, deadline=deadline)[before:count]
        return found

    def wait_last(self, *, deadline: float = DEADLINE) -> int:
        """Return the time of the last of these lines."""
        return max(int(words[1]) for words in self.wait(deadline=deadline))


def _count(node: Job, word: str) -> int:
    node.read()
    return sum(line.startswith(word) for line in node.lines)


def _count_connections(port: int) -> int:
    """Return how many connections there are to a port of this machine."""
    tables = [Path(f"/proc/net/{name}").read_text("ascii") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    return sum(words[2].endswith(f":{port:04X}") and words[3] == _ESTABLISHED for words in lines)
