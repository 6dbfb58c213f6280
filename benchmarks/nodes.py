"""Jobs of several nodes, from the command line: start, re-formation, and what becomes of a node's end.

All nodes are agents on this machine; their rendezvous is a c10d endpoint, as torchrun's do.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, Comparison, alone, compared, interleave
from benchmarks.job import DEADLINE, Job
from tests.support.local_rendezvous import wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation

_TIMES = 3
#: Seconds for torchrun to form a round of fewer than the maximum: its last call takes 30.
_WAIT_LIMIT = 120.0
_RUN_ID = "nodes"
_HOST = "localhost"
#: As /proc/net/tcp has it.
_ESTABLISHED = "01"


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure all."""
    return [
        _start_figure(installation, effort),
        _figure(
            "2 nodes waiting, exec of the third to the first line of the last worker",
            300.0,
            start_last,
            installation,
            effort,
        ),
        _reform_figure(installation, effort),
        *(
            _figure(name, bar, measure_one, installation, effort)
            for name, bar, measure_one in (
                ("death of a worker to SIGTERM in the workers of the other nodes", 300.0, tell_after_death),
                ("SIGKILL of an agent to the new round of the other nodes", 200.0, reform_after_kill),
                ("SIGTERM of an agent to the new round of the other nodes", 1000.0, reform_after_term),
                ("SIGKILL of an agent to the round in which a spare has taken over", 1000.0, replace_by_spare),
            )
        ),
    ]


def _start_figure(installation: Installation, effort: Effort) -> Figure:
    start_nodes(installation, "elastic-run")  # the page cache is warm for both
    starts = interleave(
        {
            "elastic-run": lambda: start_nodes(installation, "elastic-run"),
            "torchrun": lambda: start_nodes(installation, "torchrun"),
        },
        rounds=effort.pairs,
        times={"elastic-run": _TIMES},
    )
    return compared(
        starts,
        benchmark="nodes",
        name="2 nodes of 2 workers, exec of the last agent to the first line of the last worker",
        unit="ms",
        bar=Bar(0.15, "torchrun"),
        plots={"start": "2 nodes of 2 workers"},
    )


def _reform_figure(installation: Installation, effort: Effort) -> Figure:
    times = {"elastic-run": effort.pairs, "torchrun": 1}
    reforms = Comparison({name: [reform_after_failure(installation, name, count)] for name, count in times.items()})
    return compared(
        reforms,
        benchmark="nodes",
        name="--nnodes=1:4, death of a worker to the new round of the 3 nodes",
        unit="ms",
        bar=Bar(0.1, "torchrun"),
        note="torchrun was measured once: by default it waits 30 s for more nodes (last_call_timeout)",
        plots={"restart": "3 nodes of at most 4"},
    )


def _figure(
    name: str,
    bar: float,
    measure_one: Callable[[Installation, int], list[float]],
    installation: Installation,
    effort: Effort,
) -> Figure:
    values = measure_one(installation, 2 * effort.pairs)
    return alone(
        values,
        benchmark="nodes",
        name=name,
        unit="ms",
        bar=Bar(bar),
        note=f"{min(values):.0f} to {max(values):.0f} ms in {len(values)} trials",
    )


# --- the nodes of one job ---------------------------------------------------------------------------------------------
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
        """Start several nodes at once; each of them may become the one that serves the store."""
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


# --- start -----------------------------------------------------------------------------------------------------------
def start_nodes(installation: Installation, launcher: str) -> float:
    """Start two nodes, and return the milliseconds from the last one's exec to the last worker's first line."""
    with NodeGroup(installation, "2", launcher=launcher, script="first_line") as group:
        nodes = group.start_many(2)
        lines = [words for node in nodes for words in node.wait_lines(group.nproc)]
        for node in nodes:
            node.wait_end()
        return (max(int(words[0]) for words in lines) - nodes[-1].started_at) / 1e6


def start_last(installation: Installation, times: int) -> list[float]:
    """Start a node for which two others wait, so often; return the milliseconds to the last worker's first line."""
    return [_start_last(installation) for _ in range(times)]


def _start_last(installation: Installation) -> float:
    with NodeGroup(installation, "3") as group:
        nodes = group.start_many(2)
        group.wait_present(2)
        nodes.append(group.start())
        return (Watch(nodes, "up", group.nproc, from_start=True).wait_last() - nodes[-1].started_at) / 1e6


# --- a worker's death ------------------------------------------------------------------------------------------------
def reform_after_failure(installation: Installation, launcher: str, times: int) -> list[float]:
    """Let workers of a job of 3 of at most 4 nodes die; return the milliseconds to all workers' next first lines."""
    with NodeGroup(installation, "1:4", f"--max-restarts={times}", launcher=launcher) as group:
        nodes = group.start_many(3)
        Watch(nodes, "up", group.nproc, from_start=True).wait_last(deadline=_WAIT_LIMIT)
        return [_reform(group, nodes, nodes[number % 3]) for number in range(times)]


def _reform(group: NodeGroup, nodes: list[Job], failing: Job) -> float:
    up, died = Watch(nodes, "up", group.nproc), Watch([failing], "died", 1)
    failing.poke()
    return (up.wait_last(deadline=_WAIT_LIMIT) - died.wait_last()) / 1e6


def tell_after_death(installation: Installation, times: int) -> list[float]:
    """Let workers of a job of 3 nodes die; return the milliseconds until all on the other nodes are told."""
    delays = []
    with NodeGroup(installation, "3", f"--max-restarts={times}", "--max-backoff=0") as group:
        nodes = group.start_many(3)
        Watch(nodes, "up", group.nproc, from_start=True).wait()
        for number in range(times):
            failing, others = nodes[number % 3], [node for node in nodes if node is not nodes[number % 3]]
            up, told, died = (
                Watch(nodes, "up", group.nproc),
                Watch(others, "told", group.nproc),
                Watch([failing], "died", 1),
            )
            failing.poke()
            delays.append((told.wait_last() - died.wait_last()) / 1e6)
            up.wait()
    return delays


# --- an agent's end --------------------------------------------------------------------------------------------------
def reform_after_kill(installation: Installation, times: int) -> list[float]:
    """Kill an agent of three, so often; return the milliseconds to the last first line of the others' new round."""
    return _reform_after(installation, signal.SIGKILL, times)


def reform_after_term(installation: Installation, times: int) -> list[float]:
    """Tell an agent of three to end, so often; return the milliseconds to the last line of the others' new round."""
    return _reform_after(installation, signal.SIGTERM, times)


def _reform_after(installation: Installation, number: int, times: int) -> list[float]:
    delays = []
    with NodeGroup(installation, "2:3", "--scale-up-delay=0") as group:
        nodes = [group.start_host(), *group.start_many(2)]
        Watch(nodes, "up", group.nproc, from_start=True).wait()
        for _ in range(times):
            leaver = nodes.pop()
            up = Watch(nodes, "up", group.nproc)
            sent_at = leaver.send(number)
            delays.append((up.wait_last() - sent_at) / 1e6)
            group.forget(leaver)
            up = Watch(nodes, "up", group.nproc)
            nodes.append(group.start())
            up.wait()
            nodes[-1].wait_lines(group.nproc, starting="up")
    return delays


def replace_by_spare(installation: Installation, times: int) -> list[float]:
    """Kill an agent of two while a third waits, so often; return the milliseconds to the last line of the new round."""
    delays = []
    with NodeGroup(installation, "2") as group:
        nodes = [group.start_host(), group.start()]
        Watch(nodes, "up", group.nproc, from_start=True).wait()
        for _ in range(times):
            spare = group.start()
            group.wait_present(3)
            lost = nodes.pop()
            nodes.append(spare)
            up = Watch(nodes, "up", group.nproc)
            sent_at = lost.send(signal.SIGKILL)
            delays.append((up.wait_last() - sent_at) / 1e6)
            group.forget(lost)
    return delays
