"""The command with which other nodes join a job."""

from __future__ import annotations

import os
import subprocess

import pytest

from elastic_run.core.job.config import JoinCommand
from elastic_run.rendezvous.handler import describe_join_command


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
