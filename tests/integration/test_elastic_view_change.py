"""Several endpoints: any node may die, also the one that serves the store, and the job forms again with a majority."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.sessions import NodeProcess, free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Job:
    """Nodes in processes of their own, with three endpoints on this machine.

    Args:
        stack: Ends them.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._ports = tuple(free_port() for _ in range(3))
        self.nodes: list[NodeProcess] = []

    def start(self, most: int) -> NodeProcess:
        """Start a node of a job of at most so many."""
        node = NodeProcess(self._ports[0], (1, most), successors=self._ports[1:])
        self.nodes.append(self._stack.enter_context(node))
        return node

    def wait_round(self, size: int) -> None:
        """Wait until all nodes were told a round of so many."""
        for node in self.nodes:
            while f"group_world_size={size}," not in node.wait_line("Formed"):
                pass

    def find_host(self) -> NodeProcess:
        """Return a node that serves a store of the job."""
        return wait_until(lambda: [one for one in self.nodes if _listens(one.process.pid, self._ports)])[0]

    def kill(self, node: NodeProcess) -> None:
        """Kill a node."""
        self.nodes.remove(node)
        node.process.kill()
        node.process.wait()

    def end(self) -> None:
        """Let all workers end, and wait for the verdict."""
        for node in self.nodes:
            node.say("done")
        for node in self.nodes:
            assert "success" in node.wait_line("Ended")


def _listens(pid: int, ports: tuple[int, ...]) -> bool:
    """Whether a process listens at one of some ports of this machine."""
    sockets = set()
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) in ports:
            sockets.add(f"socket:[{words[9]}]")
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if str(fd.readlink()) in sockets:
                return True
    return False


@pytest.fixture
def job() -> Iterator[Job]:
    """A job with three endpoints, of which no node runs yet."""
    with ExitStack() as stack:
        yield Job(stack)


def test_two_hosts_die_one_after_the_other(job: Job) -> None:
    """Nobody comes in their place, and each time the nodes that are left are the next round."""
    for _ in range(5):
        job.start(5)
    job.wait_round(5)
    job.kill(job.find_host())
    job.wait_round(4)
    job.kill(job.find_host())
    job.wait_round(3)
    job.end()


def test_two_hosts_die_and_are_started_again(job: Job) -> None:
    """A node that is started at once in place of a host is in the next round, though its store knew nothing."""
    for _ in range(3):
        job.start(3)
    job.wait_round(3)
    for _ in range(2):
        job.kill(job.find_host())
        job.start(3)
        job.wait_round(3)
    job.end()


def test_two_of_three_die_at_once_and_are_started_again(job: Job) -> None:
    """One of three seats is no majority; the agents that come on their machine prove the two deaths."""
    for _ in range(3):
        job.start(3)
    job.wait_round(3)
    job.kill(job.find_host())
    job.kill(job.nodes[0])
    for _ in range(2):
        job.start(3)
    job.wait_round(3)
    job.end()
