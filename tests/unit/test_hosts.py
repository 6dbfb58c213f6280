"""--hosts: the list, the command lines of the hosts, their messages among other output, and the exit code of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.flags import FLAGS
from elastic_run.cli.hosts import plan_job
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.cli.values import host_list
from elastic_run.hosts.connections import choose_exit_code
from elastic_run.hosts.protocol import Host, HostsJob, MarkedMessages, write_marked
from elastic_run.notices import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (Host("a", "a"),)),
        ("a,b:2, c", (Host("a", "a"), Host("b", "b", 2), Host("c", "c"))),
        ("me@a:8,[fd00::1]:2", (Host("me@a", "a", 8), Host("fd00::1", "fd00::1", 2))),
    ],
)
def test_lists_of_hosts(text: str, hosts: tuple[Host, ...]) -> None:
    """A host may have a user, a number of workers, and an IPv6 address in brackets."""
    assert host_list(text) == hosts


def test_a_file_of_hosts(tmp_path: Path) -> None:
    """Each line has a host; the number of workers stands behind a colon or `slots=`."""
    file = tmp_path / "hosts"
    file.write_text("# all\n\na\nb:2  # two\n  u@c   slots=3\n", encoding="ascii")
    assert host_list(str(file)) == (Host("a", "a"), Host("b", "b", 2), Host("u@c", "c", 3))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,,b", "has '', which"),
        ("a:0", "has 'a:0', which is not [USER@]HOST[:SLOTS] with 1 to 65536 workers; an IPv6"),
        ("fd00::1", "has 'fd00::1', which"),
        ("-oProxyCommand=x", "has '-oProxyCommand=x', which"),
        ("@a", "has '@a', which"),
        ("a,me@a", "names a twice"),
        ("./missing", "can't be read: no such file or directory"),
        ("{0}/empty", "names no host"),
        ("{0}/bad", "has 'a b c', which"),
    ],
)
def test_wrong_lists(text: str, reason: str, tmp_path: Path) -> None:
    """The line names the entry, and in a file its line."""
    (tmp_path / "empty").write_text("# nobody\n", encoding="ascii")
    (tmp_path / "bad").write_text("x\na b c\n", encoding="ascii")
    with pytest.raises(ValueError, match=r"names|has|read") as raised:
        host_list(text.format(tmp_path))
    assert reason in str(raised.value)


def plan(*words: str, **environ: str) -> HostsJob:
    """Return what the hosts of a command line are to do."""
    parser = LauncherArgumentParser(FLAGS, raises_values=True)
    return plan_job(parser.parse_args([*words, "--", "s", "--", "x y"]), parser.origins, FLAGS, environ)


def test_the_command_lines_of_hosts() -> None:
    """Given flags come first, then those of each host; the token and the variables that go along are in the order."""
    job = plan("--hosts=u@a:2,b", "--tee=3", "--rdzv-id=j", NCCL_X="1", CUDA_VISIBLE_DEVICES="0", HOME="/h", RANK="1")
    common = ("--rdzv-id=j", "--tee=3", "--nnodes=2:2", "--rdzv-backend=c10d", "--rdzv-endpoint=a,b")
    program = ("--", "s", "--", "x y")
    assert job.words[0] == (*common, "--nproc-per-node=2", "--node-rank=0", *program)
    assert job.words[1] == (*common, "--node-rank=1", *program)
    assert job.commands[0][-2] == "u@a"
    assert job.order["environment"] == {"NCCL_X": "1"}
    assert len(job.order["token"]) == 32


@pytest.mark.parametrize("flag", ["--standalone", "--node-rank=0", "--local-addr=a", "--nnodes=2:3"])
def test_flags_that_contradict(flag: str) -> None:
    """A flag that can't hold for all hosts is refused."""
    with pytest.raises(UsageError, match=f"^{flag.partition('=')[0]}: .*--hosts"):
        plan("--hosts=a,b", flag)


def test_messages_among_other_output() -> None:
    """Messages are found in whatever pieces they come, and no other byte is lost, also those that look like one."""
    data = b"noise\x1e" + write_marked("abc", ready="a") + b"\x1eab" + write_marked("abc", exit=3) + b"end"
    for size in range(1, len(data)):
        messages = MarkedMessages("abc")
        parts = [messages.cut(data[start : start + size]) for start in range(0, len(data), size)]
        assert [one for _, found in parts for one in found] == [{"ready": "a"}, {"exit": 3}]
        assert b"".join(shown for shown, _ in parts) == b"noise\x1e\x1eabend"


@pytest.mark.parametrize(
    ("codes", "has_too_few", "code"),
    [
        ([1, 1, 1], False, 1),
        ([211, 0, 0], False, 0),
        ([None, 0], False, 0),
        ([3, 207], False, 3),
        ([None, 143], True, 206),
        ([None], False, 206),
    ],
)
def test_the_exit_code_of_all(codes: list[int | None], code: int, *, has_too_few: bool) -> None:
    """It is that of the job, also if one host was lost, was excluded, or did not learn the result."""
    assert choose_exit_code(codes, has_too_few=has_too_few) == code
