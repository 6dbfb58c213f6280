"""A coordinator stands still while the others restart again and again, and goes on: one decides all the same.

    python -m tests.chaos.paused_coordinator --store file --times 30
    python -m tests.chaos.paused_coordinator --store successors --times 30    needs root (virtual hosts)

The last line says in how many runs two coordinators decided, or something else was wrong.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.etcd import Etcd
from tests.support.hosts import virtual_hosts
from tests.support.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from tests.support.launch import Launched

    #: Starts an agent on the host with a number, with more flags and the command.
    Start: TypeAlias = Callable[[int, Sequence[str]], Launched]

RESTARTS = 30
#: Restarts of which the coordinator hears nothing.
MISSED = 12
#: Restarts before the coordinator stands still.
_BEFORE = 5
_CONF = "keep_alive_interval=0.2,keep_alive_max_attempt=3,last_call_timeout=0"
_SIZE = ("--nnodes=2:3", "--nproc-per-node=1", "--rdzv-id=j", f"--max-restarts={RESTARTS}", "--max-backoff=0")
#: Fails until the coordinator has missed that, and runs on then.
_UNTIL_THEN = f"[ $$TORCHELASTIC_RESTART_COUNT -ge {_BEFORE + MISSED} ] || exit 3; exec sleep 1000"


@contextmanager
def _on_directory(directory: Path) -> Iterator[Start]:
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint={directory}/store", f"--rdzv-conf={_CONF},store_type=file")
    with ExitStack() as stack:
        yield lambda _, flags: stack.enter_context(launch(*where, *flags))


@contextmanager
def _on_etcd(_: Path) -> Iterator[Start]:
    with Etcd() as etcd, ExitStack() as stack:
        where = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoints[0]}", f"--rdzv-conf={_CONF}")
        yield lambda _, flags: stack.enter_context(launch(*where, *flags))


@contextmanager
def _on_hosts(_: Path) -> Iterator[Start]:
    with virtual_hosts(3) as hosts:
        where = (
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={','.join(f'{host.name}:29400' for host in hosts)}"),
            *(f"--rdzv-conf={_CONF}", "--scale-up-delay=0"),
        )
        command = (sys.executable, "-m", "elastic_run", *where)
        yield lambda number, flags: hosts[number].start((*command, *flags))


#: Where the agents meet: in a directory, in an etcd, at the endpoints of the nodes.
STORES = {"file": _on_directory, "etcd-v3": _on_etcd, "successors": _on_hosts}


def reproduce(store: str, directory: Path) -> None:
    """Let the coordinator stand still once."""
    with STORES[store](directory) as start:
        (_stand_still_where_the_store_moves if store == "successors" else _stand_still)(start)


def _stand_still(start: Start) -> None:
    agents = _start_and_stop(start, (*_SIZE, "--no-python", "sh", "-c", "exit 3"), _restart_line(_BEFORE + MISSED))
    codes = [agent.wait_exit(deadline=60) for agent in agents]
    assert codes == [3, 3, 3], codes
    _assert_counted_once(agents)
    assert f"restart {RESTARTS} of {RESTARTS}" in agents[1].stderr + agents[2].stderr


def _stand_still_where_the_store_moves(start: Start) -> None:
    """When the node that coordinated goes on it comes to the others' round."""
    last = f"restart {_BEFORE + MISSED} of {RESTARTS}"
    agents = _start_and_stop(start, (*_SIZE, "--no-python", "sh", "-c", _UNTIL_THEN), last)
    for agent in agents:
        agent.wait_line(f"3 nodes, 3 workers, {last}", deadline=60)
    for agent in agents:
        agent.send(signal.SIGTERM)
    codes = [agent.wait_exit(deadline=60) for agent in agents]
    assert codes == [143, 143, 143], codes
    _assert_counted_once(agents)


def _start_and_stop(start: Start, flags: Sequence[str], last: str) -> list[Launched]:
    """Start three agents; stop the coordinator until the others have come to a line."""
    agents = [start(0, flags)]
    agents[0].wait_line("waiting")  # it is the coordinator
    agents += [start(number, flags) for number in (1, 2)]
    for agent in agents:
        agent.wait_line(_restart_line(_BEFORE), deadline=60)
    agents[0].send(signal.SIGSTOP)
    for agent in agents[1:]:
        agent.wait_line(last, deadline=90)
    agents[0].send(signal.SIGCONT)
    return agents


def _assert_counted_once(agents: Sequence[Launched]) -> None:
    for agent in agents:
        counts = [int(count) for count in re.findall(rf"restart (\d+) of {RESTARTS}", agent.stderr)]
        assert counts == sorted(counts), f"restarts go back: {counts}"


def _restart_line(count: int) -> str:
    """Match the line of a restart with this number or a higher one: an agent may be told of two at once."""
    return rf"restart ({'|'.join(map(str, range(count, RESTARTS + 1)))}) of {RESTARTS}"


def main() -> int:
    """Reproduce it as often as the command line says, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.paused_coordinator")
    parser.add_argument("--store", choices=STORES, default="file")
    parser.add_argument("--times", type=int, default=30)
    arguments = parser.parse_args()
    failed = 0
    for number in range(1, arguments.times + 1):
        with tempfile.TemporaryDirectory(prefix="paused-") as directory:
            try:
                reproduce(arguments.store, Path(directory))
            except AssertionError as error:
                failed += 1
                print(f"run {number}: {error}", flush=True)  # noqa: T201 - a command prints
    print(f"{arguments.store}: {failed} of {arguments.times} runs failed", flush=True)  # noqa: T201 - ditto
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
