"""Two launchers that disagree: within seconds a line on each side says in what, with both values."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from elastic_run.rendezvous.coordination.places import Place
from tests.support.programs import TELLS_SOON, shortened
from tests.support.sessions import free_port
from tests.support.wait import stretched

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Worker


REFUSED = 208
#: Seconds: a node looks after 2 s and then every 4 s who else is there; those of users look every 10 s.
_SOON = 25
#: Seconds in which a launcher ends that contradicts the job to which it came.
_AT_ONCE = 1.0
_C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-id=a"
_STATIC = "--nnodes=2 --master-addr=localhost --master-port={port}"


class Pair(NamedTuple):
    """Two launchers of one job, as its user believes.

    Attributes:
        name: For the test's failure.
        first: Flags of the launcher that is started first.
        second: Flags of the other one.
        first_line: What the first one says, a pattern.
        second_line: What the second one says; at its end where it is refused.
        is_refused: Whether the second one ends, with 208.
    """

    name: str
    first: str
    second: str
    first_line: str
    second_line: str
    is_refused: bool = False


PAIRS = [
    Pair(
        "other-ids",
        _C10D,
        _C10D.replace("id=a", "id=b"),
        "came with --rdzv-id=b, and this job has a",
        "the job here has --rdzv-id=a, and this node came with --rdzv-id=b",
        is_refused=True,
    ),
    Pair(
        "other-ids-static",
        f"{_STATIC} --node-rank=0 --rdzv-id=a",
        f"{_STATIC} --node-rank=1 --rdzv-id=b",
        "came with --rdzv-id=b, and this job has a",
        "the job here has --rdzv-id=a, and this node came with --rdzv-id=b",
        is_refused=True,
    ),
    Pair(
        "other-backends",
        _C10D,
        f"{_STATIC} --node-rank=1",
        "came with --rdzv-id=none, and this job has a",
        "the job here has --rdzv-id=a, and this node came with --rdzv-id=none",
        is_refused=True,
    ),
    Pair(
        "other-ports",
        _C10D,
        _C10D.replace("{port}", "{other}"),
        "other nodes need --rdzv-endpoint=localhost:{port} --rdzv-id=a",
        "other nodes need --rdzv-endpoint=localhost:{other} --rdzv-id=a",
    ),
    Pair(
        "other-ports-static",
        f"{_STATIC} --node-rank=0",
        f"{_STATIC} --node-rank=1".replace("{port}", "{other}"),
        "other nodes need --master-addr=localhost --master-port={port} --rdzv-id=none",
        "the store at localhost:{other} has been out of reach for .*: nobody listens",
    ),
    Pair(
        "rank-0-missing",
        f"{_STATIC} --node-rank=1",
        f"{_STATIC} --node-rank=1",
        "the store at localhost:{port} has been out of reach for .*: nobody listens",
        "the store at localhost:{port} has been out of reach for .*: nobody listens",
    ),
    Pair(
        "other-numbers-of-nodes",
        _C10D,
        _C10D.replace("nnodes=2", "nnodes=3"),
        "other nodes need --rdzv-endpoint",
        "--nnodes is 3:3 here and 2:2 in the job",
        is_refused=True,
    ),
    Pair(
        "other-restarts",
        _C10D,
        f"{_C10D} --max-restarts=3",
        "other nodes need --rdzv-endpoint",
        "--max-restarts is 3 here and 0 in the job",
        is_refused=True,
    ),
    Pair(
        "token-on-one-side",
        _C10D,
        f"{_C10D} --rdzv-token-file={{token}}",
        "other nodes need --rdzv-endpoint",
        "has no token, and this node was given one",
        is_refused=True,
    ),
]


@pytest.mark.long
def test_launchers_that_disagree_say_in_what(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Each side has a line with its own value, and with the other's where that can be known.

    All pairs run at the same time: each of them waits many seconds for the other side to look.
    """
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef", encoding="ascii")
    path, often = worker("say('started')"), shortened({"elastic_run.report.waiting.INTERVAL": 4.0})
    names = [{"port": free_port(), "other": free_port(), "token": token} for _ in PAIRS]
    firsts = [
        launch(*pair.first.format(**values).split(), path, program=often)
        for pair, values in zip(PAIRS, names, strict=True)
    ]
    for first in firsts:
        first.wait_line("waiting: ")
    seconds = [
        launch(*pair.second.format(**values).split(), path, program=often)
        for pair, values in zip(PAIRS, names, strict=True)
    ]
    for pair, values, first, second in zip(PAIRS, names, firsts, seconds, strict=True):
        if pair.is_refused:
            assert second.wait_exit() == REFUSED, pair.name
            assert pair.second_line in " ".join(second.stderr.split()), pair.name
        else:
            second.wait_line(pair.second_line.format(**values), deadline=_SOON)
        first.wait_line(pair.first_line.format(**values), deadline=_SOON)
        assert first.stdout == second.stdout == "", pair.name


def test_the_place_is_written_as_other_nodes_have_to_give_it() -> None:
    """All endpoints belong to it, and IPv6 addresses have brackets."""

    def describe(kind: str, *endpoints: tuple[str, int]) -> str:
        place = Place(kind, "a", endpoints, is_host=None)
        place.own = place.names[0]
        return place.describe_need()

    assert describe("c10d", ("h0", 1), ("::1", 2)) == "other nodes need --rdzv-endpoint=h0:1,[::1]:2 --rdzv-id=a"
    assert describe("static", ("h0", 1)) == "other nodes need --master-addr=h0 --master-port=1 --rdzv-id=a"
    assert describe("c10d", ("localhost", 1)).endswith("no other machine reaches localhost here)")


def test_a_node_that_has_printed_the_command_for_others_does_not_repeat_it(launch: Launch, worker: Worker) -> None:
    """Without an endpoint the first line has the address for other nodes, and the waiting line has none."""
    job = launch("--nnodes=2", worker("pass"), program=TELLS_SOON)
    line = job.wait_line("waiting: 1/2 nodes").string
    assert "other nodes join with" in job.stderr
    assert "other nodes need" not in line
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143


def test_a_launcher_with_other_settings_is_refused_at_once(launch: Launch, worker: Worker) -> None:
    """The jobs have begun to wait, and know within a second that the settings differ."""
    path = worker("say('started')")
    others = ("--max-restarts=3", "--nnodes=3", "--exclude-after=2/1h", "--rdzv-conf=keep_alive_interval=9")
    places = [_C10D.format(port=free_port()).split() for _ in others]
    for first in [launch(*place, path, program=TELLS_SOON) for place in places]:
        first.wait_line("waiting: ")
    for place, flags in zip(places, others, strict=True):
        second = launch(*place, flags, path)
        assert second.wait_exit() == REFUSED, flags
        assert time.monotonic() - second.started_at < stretched(_AT_ONCE), flags
        assert "in the job" in " ".join(second.stderr.split()), flags
