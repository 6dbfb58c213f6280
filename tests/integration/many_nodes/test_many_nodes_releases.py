"""Agents of different releases in one job: those of one protocol work together, others are refused."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.coordination.link import PROTOCOL
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import stretched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: Seconds on a quiet machine.
_AT_ONCE = 1.0
#: Runs the launcher as another release would: another version, another protocol, a field more in each document.
RELEASE = """
import elastic_run
from elastic_run.core.protocol import codec
elastic_run.__version__ = {version!r}
to_json = codec.encode
codec.encode = lambda document: to_json({{**document, "new_field": 1}})
from elastic_run.rendezvous.coordination import link
link.PROTOCOL = {protocol}
link.PREAMBLE = link.NAME + b"{protocol}\\n"
from elastic_run import __main__
__main__.main()
"""


def release(protocol: int) -> tuple[str, ...]:
    """Return the command of a launcher that speaks a protocol."""
    return (sys.executable, "-c", RELEASE.format(version=f"9.{protocol}.0", protocol=protocol))


@pytest.mark.parametrize("comes_first", [True, False], ids=["first", "second"])
def test_releases_of_one_protocol_work_together(launch: Launch, worker: Worker, *, comes_first: bool) -> None:
    """A job whose nodes are being upgraded runs, restarts and ends as any other, whoever coordinates it."""
    path = worker("if attempt == 0:\n    sys.exit(5) if rank else signal.pause()\nsay('rank', rank)")
    port = free_port()
    programs = [{"program": release(PROTOCOL)}, {}]
    agents = []
    for options in programs if comes_first else programs[::-1]:
        agents.append(launch(*place(port), "--nnodes=2", "--max-restarts=1", path, **options))
        if len(agents) == 1:
            wait_coordinated(port)
    assert [agent.wait_exit() for agent in agents] == [0, 0], [agent.stderr for agent in agents]
    assert sorted("".join(agent.stdout for agent in agents).splitlines()) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("other", [PROTOCOL + 99, PROTOCOL - 1])
def test_others_are_refused(launch: Launch, worker: Worker, other: int) -> None:
    """A node of another protocol is told both, with 208; the job says so, waits for another node and goes on."""
    path = worker("say('rank', rank)")
    port = free_port()
    agents = [launch(*place(port), "--nnodes=2", "--max-restarts=1", path)]
    wait_coordinated(port)
    stranger = launch(*place(port), "--nnodes=2", "--max-restarts=1", path, program=release(other))
    assert stranger.wait_exit() == 208
    said = " ".join(stranger.stderr.split())
    assert time.monotonic() - stranger.started_at < stretched(_AT_ONCE)
    assert f"uses protocol {PROTOCOL}, this node {other}: install the same release of elastic-run" in said
    agents[0].wait_line(f"speaks protocol {other} of another release of elastic-run")
    agents.append(launch(*place(port), "--nnodes=2", "--max-restarts=1", path))
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert sorted("".join(agent.stdout for agent in agents).splitlines()) == ["rank 0", "rank 1"]
