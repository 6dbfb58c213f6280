"""A coordinator stands still while the others decide more than the log keeps: one decides all the same."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd
from tests.support.hosts import virtual_hosts
from tests.support.launch import launch
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    from tests.support.launch import Launched

    Start: TypeAlias = Callable[[int, tuple[str, ...]], Launched]

_RESTARTS = 90
#: A round's end and its successor take at least two slots of the log, which keeps 64.
_MISSED = 40
_WORKER = '[ "$$RANK" != 0 ] || echo $$TORCHELASTIC_RESTART_COUNT >>"$$0"; exit 3'
_CONF = "keep_alive_interval=0.2,keep_alive_max_attempt=3,last_call_timeout=0"


def _on_a_directory(tmp_path: Path) -> Iterator[Start]:
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path}/store", f"--rdzv-conf={_CONF},store_type=file")
    with ExitStack() as stack:
        yield lambda _, flags: stack.enter_context(launch(*where, *flags))


def _on_etcd(_: Path) -> Iterator[Start]:
    with Etcd() as etcd, ExitStack() as stack:
        where = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoints[0]}", f"--rdzv-conf={_CONF}")
        yield lambda _, flags: stack.enter_context(launch(*where, *flags))


def _on_successors(_: Path) -> Iterator[Start]:
    with virtual_hosts(3) as hosts:
        endpoints = ",".join(f"{host.name}:29400" for host in hosts)
        where = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoints}", f"--rdzv-conf={_CONF}")
        command = (sys.executable, "-m", "elastic_run", *where)
        yield lambda number, flags: hosts[number].start((*command, *flags))


@pytest.mark.parametrize("place", [_on_a_directory, _on_etcd, _on_successors])
def test_a_coordinator_that_stood_still_decides_nothing(
    place: Callable[[Path], Iterator[Start]], tmp_path: Path
) -> None:
    """Restarts are counted once each, up to their limit, and all agents end with the cause."""
    lives = tmp_path / "lives"
    lives.touch()
    flags = (
        *("--nnodes=2:3", "--nproc-per-node=1", "--rdzv-id=j", f"--max-restarts={_RESTARTS}", "--max-backoff=0"),
        *("--no-python", "sh", "-c", _WORKER, str(lives)),
    )

    def counts() -> list[int]:
        return [int(line) for line in lives.read_text().splitlines()]

    with contextmanager(place)(tmp_path) as start:
        agents = [start(0, flags)]
        agents[0].wait_line("1/2|waiting")
        agents += [start(number, flags) for number in (1, 2)]
        wait_until(lambda: len(counts()) >= 5, deadline=60)
        agents[0].send(signal.SIGSTOP)
        known = max(counts())
        wait_until(lambda: max(counts()) >= known + _MISSED, deadline=60)
        agents[0].send(signal.SIGCONT)
        codes = [agent.wait_exit(deadline=60) for agent in agents]
    assert counts() == sorted(counts())
    assert max(counts()) == _RESTARTS
    assert codes == [3, 3, 3]
