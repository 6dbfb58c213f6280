"""Where a value comes from is recorded beside the plain values, and the command for other nodes is made of it."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.cli.request import (
    DERIVED,
    FILE,
    FLAG,
    KUBERNETES,
    RANDOM,
    SLURM,
    VARIABLE,
    Origin,
    choose_rendezvous,
    name_source,
    read_request,
)
from elastic_run.core.config import JoinCommand, Window
from elastic_run.rendezvous.handler import describe_join_command
from elastic_run.run import _make_join_command

if TYPE_CHECKING:
    from argparse import Namespace


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No PET_* variable is set."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def parse(words: str) -> tuple[Namespace, dict[str, Origin]]:
    """Return the values and their origins."""
    parser = LauncherArgumentParser(FLAGS)
    return parser.parse_args(shlex.split(words)), parser.origins


def test_flags_and_variables_are_origins_and_defaults_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each given value has its origin with the text as it was written, also where the value is the default."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "1")
    monkeypatch.setenv("PET_STANDALONE", "0")
    args, origins = parse("--nnodes 1:1 --restart-window=5/1h -m s --nnodes=9")
    assert origins == {
        "nproc_per_node": Origin(VARIABLE, "PET_NPROC_PER_NODE", "1"),
        "standalone": Origin(VARIABLE, "PET_STANDALONE", "0"),
        "nnodes": Origin(FLAG, "--nnodes", "1:1"),
        "restart_window": Origin(FLAG, "--restart-window", "5/1h"),
        "module": Origin(FLAG, "--module"),
    }
    assert (args.restart_window, args.nproc_per_node, args.standalone) == (Window(5, 3600.0), "1", False)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--nproc-per-node=1", "1"),
        ("--nproc-per-node 1", "1"),
        ("--nproc-per-node=2 --nproc-per-node=1", "1"),
        ("--tee=0", "0"),
        ("-r 0", "0"),
    ],
)
def test_a_flag_with_its_default_value_is_written_for_other_nodes(words: str, text: str) -> None:
    """The command for other nodes has the text of the flag, also where Python has one object for text and default."""
    args, origins = parse(f"--nnodes=2 {words} train.py")
    flags = _make_join_command(args, FLAGS, ["elastic-run"], origins).flags
    assert len(flags) == 2
    assert flags[1].partition("=")[2] == text


def test_a_flag_names_the_variable_that_it_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values for one flag are what a user looks for at night: the origin has both."""
    monkeypatch.setenv("PET_NNODES", "4")
    variable = Origin(VARIABLE, "PET_NNODES", "4")
    assert parse("--nnodes=2 s")[1]["nnodes"] == Origin(FLAG, "--nnodes", "2", variable)
    assert parse("--nnodes=2 --nnodes=3 s")[1]["nnodes"] == Origin(FLAG, "--nnodes", "3", variable)


def test_origins_are_those_of_the_last_command_line() -> None:
    """A parser that reads a second command line forgets the first one."""
    parser = LauncherArgumentParser(FLAGS)
    parser.parse_args(["--nnodes=2", "s"])
    parser.parse_args(["s"])
    assert parser.origins == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "s",
            {
                "rdzv_backend": Origin(DERIVED, "a job of one node"),
                "rdzv_id": Origin(DERIVED, "a job of one node", RANDOM),
            },
        ),
        (
            "--nnodes=2 s",
            {
                "nnodes": Origin(FLAG, "--nnodes", "2"),
                "rdzv_backend": Origin(DERIVED, "this node serves the store"),
                "rdzv_id": Origin(DERIVED, "this node serves the store", RANDOM),
            },
        ),
        (
            "--nnodes=1:4 --standalone --rdzv-id=x s",
            {
                "standalone": Origin(FLAG, "--standalone"),
                "nnodes": Origin(DERIVED, "--standalone", "", Origin(FLAG, "--nnodes", "1:4")),
                "rdzv_backend": Origin(DERIVED, "--standalone"),
                "rdzv_id": Origin(FLAG, "--rdzv-id", "x"),
            },
        ),
        ("--nnodes=1 --master-port=5 s", None),
    ],
)
def test_what_follows_from_other_values_says_from_which(words: str, expected: dict[str, Origin] | None) -> None:
    """A derived value has the reason, and the given value that it replaces; a given value stays the user's."""
    args, origins = parse(words)
    given = dict(origins)
    choose_rendezvous(read_request(args, 1, {}, origins=origins))
    assert origins == (given if expected is None else expected)


def test_a_message_begins_with_the_origin_of_the_value() -> None:
    """The variable or the file is named where the value comes from there, the flag otherwise."""
    origins = {
        "tee": Origin(VARIABLE, "PET_TEE", "3"),
        "log_dir": Origin(FILE, "job.toml", "x"),
        "role": Origin(FLAG, "--role", "r"),
    }
    assert name_source("--tee: no", origins, {}) == "PET_TEE: no"
    assert name_source("--log-dir: no", origins, {}) == "job.toml: log-dir: no"
    assert name_source("--role: no", origins, {}) == "--role: no"
    assert name_source("--nnodes: no", origins, {}) == "--nnodes: no"
    assert name_source("script 'x': no", origins, {}) == "script 'x': no"


def test_a_message_about_a_derived_value_begins_with_the_variables_of_the_scheduler() -> None:
    """The user never gave the flag; the value of each variable that is set is shown."""
    origins = {
        "rdzv_endpoint": Origin(SLURM, "SLURM_STEP_NODELIST, SLURM_NODEID"),
        "rdzv_id": Origin(KUBERNETES, ""),
        "nnodes": Origin(DERIVED, "--standalone"),
    }
    environ = {"SLURM_STEP_NODELIST": "a:1,b"}
    expected = "SLURM_STEP_NODELIST=a:1,b: --rdzv-endpoint: 'a:1:7' is no endpoint"
    assert name_source("--rdzv-endpoint: 'a:1:7' is no endpoint", origins, environ) == expected
    assert name_source(expected, origins, environ) == expected
    assert name_source("--rdzv-id: no", origins, {}) == "Kubernetes: --rdzv-id: no"
    assert name_source("--nnodes: no", origins, {}) == "--nnodes: no"


@pytest.mark.parametrize(
    ("words", "flags", "program"),
    [
        ("--nproc 2 -r3 -m s a", ("--nproc-per-node=2", "--module", "--redirects=3"), ("s", "a")),
        ("--nnodes 2 --nnodes=3 s", ("--nnodes=3",), ("s",)),
        ("s -- a", (), ("s", "a")),
        ("-- s -- a", (), ("--", "s", "--", "a")),
        ("-- -s", (), ("--", "-s")),
    ],
)
def test_the_join_command_has_the_values_that_took_effect(
    words: str, flags: tuple[str, ...], program: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes get each value once and in full, whatever way it came, and read the program as this node did."""
    monkeypatch.setenv("PET_NNODES", "5")
    monkeypatch.setenv("PET_STANDALONE", "0")
    args, origins = parse(words)
    command = _make_join_command(args, FLAGS, ("elastic-run",), origins)
    flags = flags if "--nnodes=3" in flags else ("--nnodes=5", *flags)
    assert (command.flags, command.program) == (flags, program)
    again, _ = parse(shlex.join([*command.flags, *command.program]))
    assert again == args


# --- the command with which other nodes join --------------------------------------------------------------------------
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
