"""A coordinator stands still while the others decide more than the log keeps: one decides all the same."""

from __future__ import annotations

import re
import signal
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd
from tests.support.hosts import virtual_hosts
from tests.support.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from tests.support.launch import Launched

    Start: TypeAlias = Callable[[int, tuple[str, ...]], Launched]

_RESTARTS = 90
#: A round's end and its successor take at least two slots of the log, which keeps 64.
_MISSED = 40
_CONF = "keep_alive_interval=0.2,keep_alive_max_attempt=3,last_call_timeout=0"


def _on_a_directory(tmp_path: Path) -> Iterator[Start]:
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path}/store", f"--rdzv-conf={_CONF},store_type=file")
    with ExitStack() as stack:
        yield lambda _, flags: stack.enter_context(launch(*where, *flags))


def _on_etcd(_: Path) -> Iterator[Start]:
    with Etcd() as etcd, ExitStack() as stack:
        where = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoints[0]}", f"--rdzv-conf={_CONF}")
        yield lambda _, flags: stack.enter_context(launch(*where, *flags))


@pytest.mark.parametrize("place", [_on_a_directory, _on_etcd])
def test_a_coordinator_that_stood_still_decides_nothing(
    place: Callable[[Path], Iterator[Start]], tmp_path: Path
) -> None:
    """Restarts are counted once each, up to their limit, and all agents end with the cause."""
    flags = (
        *("--nnodes=2:3", "--nproc-per-node=1", "--rdzv-id=j", f"--max-restarts={_RESTARTS}", "--max-backoff=0"),
        *("--no-python", "sh", "-c", "exit 3"),
    )
    with contextmanager(place)(tmp_path) as start:
        agents = [start(0, flags)]
        agents[0].wait_line("waiting")  # it is the coordinator
        agents += [start(number, flags) for number in (1, 2)]
        for agent in agents:
            agent.wait_line(_restart_line(5), deadline=60)
        agents[0].send(signal.SIGSTOP)
        for agent in agents[1:]:
            agent.wait_line(_restart_line(5 + _MISSED), deadline=90)
        agents[0].send(signal.SIGCONT)
        codes = [agent.wait_exit(deadline=60) for agent in agents]
    assert codes == [3, 3, 3]
    for agent in agents:
        counts = [int(count) for count in re.findall(rf"restart (\d+) of {_RESTARTS}", agent.stderr)]
        assert counts == sorted(counts)
    assert f"restart {_RESTARTS} of {_RESTARTS}" in agents[1].stderr + agents[2].stderr


def _restart_line(count: int) -> str:
    """Match the line of a restart with this number or a higher one: an agent may be told of two at once."""
    return rf"restart ({'|'.join(map(str, range(count, _RESTARTS + 1)))}) of {_RESTARTS}"


#: Fails until the others have decided more than the log keeps, and runs on then.
_UNTIL_THEN = f"[ $$TORCHELASTIC_RESTART_COUNT -ge {5 + _MISSED} ] || exit 3; exec sleep 1000"


def test_a_host_that_stood_still_joins_the_others_at_the_successor() -> None:
    """The node that serves the store and coordinates stands still; when it goes on it comes to the others' round."""
    with virtual_hosts(3) as hosts:
        endpoints = ",".join(f"{host.name}:29400" for host in hosts)
        command = (
            *(sys.executable, "-m", "elastic_run", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoints}"),
            *("--rdzv-id=j", f"--rdzv-conf={_CONF}", "--nnodes=2:3", "--nproc-per-node=1", "--scale-up-delay=0"),
            *(f"--max-restarts={_RESTARTS}", "--max-backoff=0", "--no-python", "sh", "-c", _UNTIL_THEN),
        )
        agents = [hosts[0].start(command)]
        agents[0].wait_line("waiting")
        agents += [host.start(command) for host in hosts[1:]]
        for agent in agents:
            agent.wait_line(_restart_line(5), deadline=60)
        agents[0].send(signal.SIGSTOP)
        for agent in agents[1:]:
            agent.wait_line(f"restart {5 + _MISSED} of {_RESTARTS}", deadline=90)
        agents[0].send(signal.SIGCONT)
        for agent in agents:
            agent.wait_line(f"3 nodes, 3 workers, restart {5 + _MISSED} of {_RESTARTS}", deadline=60)
        for agent in agents:
            agent.send(signal.SIGTERM)
        assert [agent.wait_exit(deadline=60) for agent in agents] == [143, 143, 143]
