"""What the rendezvous of several nodes tells the user."""

from __future__ import annotations

import os
import subprocess

import pytest

from elastic_run.core.job.node_config import JoinCommand
from elastic_run.rendezvous.join_command import describe_join_command
from elastic_run.report.waiting import describe_missing, describe_spare, describe_trouble, missing_texts, trouble_texts


def test_missing_nodes() -> None:
    """The line says how many of how many are there, which ones, and what the wait ends with."""
    assert describe_missing(["a", "b"], 2, 3, 590.2) == "waiting: 2/3 nodes (a, b), gives up in 9:50"
    assert describe_missing(["node[0-8]", "a"], 10, 16, None) == "waiting: 10/16 nodes (node[0-8], a)"
    assert describe_missing(["a"], 1, 2, 28.0, starts=True) == "waiting: 1/2 nodes (a), starts in 0:28"
    assert describe_missing([], 0, 2, -1.0) == "waiting: 0/2 nodes, gives up in 0:00"


def test_trouble_with_the_store() -> None:
    """The line says which store, for how long and why, and how long is left."""
    line = describe_trouble("a:29400", "nothing answers at 10.0.0.1:29400", 12.4, 61.0)
    assert line == (
        "waiting: the store at a:29400 has been out of reach for 12 s: nothing answers at 10.0.0.1:29400, "
        "gives up in 1:01"
    )


def test_shorter_forms() -> None:
    """Where there is little room hosts go first; how many nodes, what is wrong and how long is left stay."""
    assert missing_texts(["a", "b"], 2, 3, 61.0) == (
        "waiting: 2/3 nodes (a, b), gives up in 1:01",
        "waiting: 2/3 nodes, gives up in 1:01",
    )
    assert trouble_texts("a:29400", "nothing answers at 10.0.0.1:29400", 12.4, 61.0, reason="no answer")[1:] == (
        "waiting: store a:29400: no answer, gives up in 1:01",
        "waiting: store: no answer, gives up in 1:01",
    )


def test_a_spare() -> None:
    """A node that the job has no room for learns when its turn comes; another one, that it comes soon."""
    assert describe_spare(5, 4) == "waiting: as a spare, until one of the job's 4 nodes is lost"
    assert describe_spare(3, 4) == "waiting: the job runs, and adds this node soon"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "--rdzv-conf=last_call_timeout=0"),
        (["--rdzv-conf=join_timeout=9"], "--rdzv-conf=join_timeout=9,last_call_timeout=0"),
        (["--rdzv-conf=last_call_timeout=9"], "--rdzv-conf=last_call_timeout=9"),
        (["--rdzv-backend=static", "--rdzv-id=job"], "--rdzv-conf=last_call_timeout=0"),
        (["--local-addr=192.0.2.7", "--node-rank=0"], "--rdzv-conf=last_call_timeout=0"),
        (["--nproc-per-node=2", "--module"], "--rdzv-conf=last_call_timeout=0 --nproc-per-node=2 --module"),
        (["--log-dir=/a b"], "--rdzv-conf=last_call_timeout=0 '--log-dir=/a b'"),
        (["--rdzv-conf="], "--rdzv-conf=last_call_timeout=0"),
    ],
)
def test_the_join_command_is_the_whole_command(flags: list[str], expected: str) -> None:
    """The command for other nodes has the job's values but for this node's own, and all agree on the last call."""
    command = JoinCommand(("elastic-run",), tuple(flags), ("train", "--rdzv-id=7", "--node-rank", "9"))
    line = describe_join_command("h:1", "job", command)
    start = "elastic-run --rdzv-backend=c10d --rdzv-endpoint=h:1 --rdzv-id=job"
    assert line == f"{start} {expected} train --rdzv-id=7 --node-rank 9"


def test_the_join_command_is_quoted_for_a_shell() -> None:
    """Each word comes through a shell as it is; the token stands in front as a variable."""
    flags = ("--nnodes=1:2", "--log-dir=/a b", "--rdzv-id=x", "--rdzv-conf=join_timeout=9", "--role=", "--run-path")
    command = JoinCommand(("elastic-run",), flags, ("it's", "$HOME", "*"))
    line = describe_join_command("[fd00::1]:29400", "a b", command, token=b"0f")
    assert line == (
        "ELASTIC_RUN_RDZV_TOKEN=0f elastic-run --rdzv-backend=c10d '--rdzv-endpoint=[fd00::1]:29400' '--rdzv-id=a b' "
        "--rdzv-conf=join_timeout=9,last_call_timeout=0 --nnodes=1:2 '--log-dir=/a b' --role= --run-path "
        """'it'"'"'s' '$HOME' '*'"""
    )


def test_a_word_that_a_terminal_would_obey_is_one_line_and_comes_through_a_shell() -> None:
    """Line breaks, escape sequences, quotes and letters of any language are the same word on the next node."""
    words = ("it's\na \\b c~", "\x1b[31mred", "\tä\x7f", "\udcff")
    line = describe_join_command("h:1", "job", JoinCommand(("elastic-run",), (), words))
    assert line.isprintable()
    shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    assert shown.split(b"\0")[-5:-1] == [os.fsencode(word) for word in words]
