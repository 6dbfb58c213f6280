"""Several nodes on this machine: where they meet, how they join, and a job whose agents a test starts and kills."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_run.core.job.coordinator_search import COORDINATES
from elastic_run.rendezvous.coordination.opening import Credentials, Hello, ask
from elastic_run.store.errors import StoreConnectionError
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Launched

#: A last call that no test waits for, and heartbeats that show a loss soon.
CONF = "last_call_timeout=3,keep_alive_interval=0.5"
RUN_ID = "j"


def place(port: int, conf: str = CONF) -> tuple[str, ...]:
    """Return the flags of nodes whose store is at a port of this machine."""
    endpoint = f"--rdzv-endpoint=localhost:{port}"
    return ("--rdzv-backend=c10d", endpoint, f"--rdzv-id={RUN_ID}", f"--rdzv-conf={conf}")


def wait_coordinated(port: int, token: bytes | None = None, run_id: str = RUN_ID) -> None:
    """Wait until the first node of a job has made itself its coordinator."""
    credentials = None if token is None else Credentials(token)

    def is_coordinated() -> bool:
        with contextlib.suppress(StoreConnectionError):
            answer, _, _ = ask(("localhost", port), Hello(run_id, "", ""), DEADLINE, credentials, dark_after=DEADLINE)
            return answer.role == COORDINATES
        return False

    wait_until(is_coordinated, what=f"a coordinator at port {port}")


# --- the line by which others join -----------------------------------------------------------------------------------
_ASSIGNMENT = re.compile(r"(?:^| )ELASTIC_RUN_RDZV_TOKEN=(\S*) ")
#: The environment in which a copied command finds the launcher under test.
COPIED = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}


def wait_join_line(agent: Launched) -> str:
    """Wait for the line that tells others how to join; return the command in it."""
    return str(agent.wait_line(r"join with: (.*)$")[1])


def copied(agent: Launched) -> list[str]:
    """Return the command by which a shell runs what an agent has printed for other nodes; `COPIED` goes with it."""
    return ["bash", "-c", wait_join_line(agent)]


def token_of(line: str) -> str | None:
    """Return the token that a join line shows, or None."""
    found = _ASSIGNMENT.search(line)
    return None if found is None else found[1]


# --- a job -----------------------------------------------------------------------------------------------------------
#: Says its round, and runs until there is the file `gate`; it fails with 5 when there is a file `fail-RESTART-RANK`.
RUNS = """
import time
directory = os.path.dirname(sys.argv[1])
say('round of', os.environ['WORLD_SIZE'], 'restart', attempt, 'rank', rank)
while not os.path.exists(sys.argv[1]):
    if os.path.exists(f'{directory}/fail-{attempt}-{rank}'):
        sys.exit(5)
    time.sleep(0.01)
"""


class LocalJob:
    """A job whose nodes meet at one place.

    Args:
        launch: The fixture.
        script: The workers' script; `RUNS`, or one that takes the path of `gate` as well.
        flags: Of all nodes.
        endpoints: How many endpoints of c10d there are.
        conf: Settings of the rendezvous.
        place: A backend and its endpoint, in place of c10d.
    """

    def __init__(
        self,
        launch: Launch,
        script: Path,
        *flags: str,
        endpoints: int = 3,
        conf: str = "last_call_timeout=30",
        place: tuple[str, str] | None = None,
    ) -> None:
        self._launch = launch
        self._script = script
        self.gate = script.with_name("gate")
        self._ports = [free_port() for _ in range(endpoints)]
        self.port = self._ports[0]
        self._is_c10d = place is None
        backend, endpoint = place or ("c10d", ",".join(f"localhost:{port}" for port in self._ports))
        place_flags = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=j")
        self._flags = (*place_flags, f"--rdzv-conf={conf}", *flags)
        self.nodes: list[Launched] = []

    def start(self, *flags: str) -> Launched:
        """Start a node; the first one coordinates."""
        node = self._launch(*self._flags, *flags, self._script, str(self.gate))
        if not self.nodes and self._is_c10d:
            wait_coordinated(self._ports[0])
        self.nodes.append(node)
        return node

    def wait_round(self, size: int, *, restart: int = 0, count: int = 1) -> None:
        """Wait until all nodes run a round of so many workers, for the time of that number."""
        for node in self.nodes:
            node.wait_lines(f"round of {size} restart {restart} ", count=count)

    def start_all(self, size: int) -> None:
        """Start so many nodes, and wait until their workers run."""
        for _ in range(size):
            self.start()
        self.wait_round(size)

    def fail(self, restart: int, rank: int) -> None:
        """Let a worker fail."""
        self.gate.with_name(f"fail-{restart}-{rank}").touch()

    def kill(self, node: Launched) -> None:
        """Kill a node's agent."""
        self.nodes.remove(node)
        node.send(signal.SIGKILL)

    def finish(self) -> None:
        """Let all workers end, and see the job succeed."""
        self.gate.touch()
        assert [node.wait_exit() for node in self.nodes] == [0] * len(self.nodes), [one.stderr for one in self.nodes]
