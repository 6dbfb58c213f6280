"""Dumps of torch's flight recorder are found and read from anywhere, and nothing in them is run."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from elastic_run.cli.commands import trace
from elastic_run.diagnosis.dumps import (
    COMPLETED,
    OPEN,
    RETIRED,
    DumpError,
    ForeignFileError,
    find_dumps,
    parse_dump,
    rank_in_name,
)
from elastic_run.notices import UsageError

DATA = Path(__file__).parents[1] / "data" / "flight_recorder"


#: A list in lists, deeper than Python follows one, as the ranks of a group.
_NESTED = (
    b"\x80\x02}(X\x07\x00\x00\x00entries]X\x09\x00\x00\x00pg_config}X\x01\x00\x00\x000}X\x05\x00\x00\x00ranks"
    + b"(" * 100_000
    + b"]"
    + b"l" * 100_000
    + b"ssu."
)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch /tmp/it-was-run",))


def test_a_pickle_of_torch_is_read() -> None:
    """A dump of torch 2.13 gives each collective with its number, state, sizes and place."""
    content = parse_dump((DATA / "missing_rank" / "rank_0").read_bytes())
    last = content.collectives[-1]
    assert [call.sequence for call in content.collectives] == [1, 2, 3, 4]
    assert (last.operation, last.group, last.description, last.state) == ("all_reduce", "0", "default_pg", OPEN)
    assert (last.input_sizes, last.input_types) == (((4,),), ("Float",))
    assert last.where == "make.py:77 in _missing_rank"
    assert content.collectives[0].state == RETIRED


def test_a_collective_that_nccl_has_aborted_has_not_completed() -> None:
    """NCCL writes that it has; it is not retired, and its end came later than its timeout."""
    content = parse_dump((DATA / "nccl_timeout" / "rank_0").read_bytes())
    assert [call.state for call in content.collectives] == [COMPLETED, RETIRED]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_with_a_global_is_refused(protocol: int) -> None:
    """A pickle that names a function is refused before it runs, and the message names the function."""
    data = pickle.dumps({"entries": [_Evil()]}, protocol=protocol)
    with pytest.raises(DumpError, match=r"posix\.system"):
        parse_dump(data)
    assert not Path("/tmp/it-was-run").exists()


def test_a_pickle_that_refers_to_outside_is_refused() -> None:
    """A persistent id, which only the program that wrote it could look up, is refused."""
    with pytest.raises(DumpError, match="outside"):
        parse_dump(b"\x80\x02U\x05helloQ.")


def test_damage_is_one_clause() -> None:
    """A dump that is cut anywhere or has a wrong byte anywhere is read or refused, with no other exception."""
    whole = (DATA / "missing_rank" / "rank_0").read_bytes()
    for length in range(0, len(whole) - 1, 7):
        with pytest.raises(DumpError):
            parse_dump(whole[:length])
    for index in range(2, len(whole), 11):
        try:
            parse_dump(whole[:index] + bytes([whole[index] ^ 0x15]) + whole[index + 1 :])
        except DumpError as error:
            assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"", DumpError, "empty"),
        (b"hello\n", ForeignFileError, "no pickle"),
        (pickle.dumps({"message": 1}), ForeignFileError, "no list of entries"),
        (pickle.dumps({"entries": [{}]}), DumpError, "an entry can't be read"),
        (pickle.dumps({"entries": [], "pg_config": 5}), DumpError, "an entry can't be read"),
        (pickle.dumps({"entries": [], "rank": float("inf")}), DumpError, "an entry can't be read"),
        (_NESTED, DumpError, "an entry can't be read"),
        (pickle.dumps([1, 2]), ForeignFileError, "no list of entries"),
    ],
)
def test_what_is_no_dump_is_told_from_a_damaged_one(data: bytes, error: type[DumpError], text: str) -> None:
    """A file that should be a dump is named with the reason; a file of something else is only counted."""
    with pytest.raises(DumpError, match=text) as caught:
        parse_dump(data)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank_3", 3),
        ("nccl_trace_rank_12", 12),
        ("comm_lib_trace_rank_0", 0),
        ("dump.7", 7),
        ("host4_rank-5.pickle", 5),
        ("trace_2.json", 2),
        ("rank7_20261123", 7),
        ("stderr.log", None),
    ],
)
def test_the_rank_stands_in_the_name(name: str, rank: int | None) -> None:
    """Names of torch, of elastic-run and of people end in the rank, or have it behind the word."""
    assert rank_in_name(f"/tmp/job_1/{name}") == rank


def test_a_partial_set_among_logs_is_read(tmp_path: Path) -> None:
    """Dumps of some ranks, under other names and beside logs, are read; a damaged one is named."""
    whole = (DATA / "missing_rank" / "rank_0").read_bytes()
    (tmp_path / "copy_of_rank_2.bin").write_bytes(whole)
    (tmp_path / "x" / "0").mkdir(parents=True)
    (tmp_path / "x" / "0" / "stderr.log").write_text("hello")
    (tmp_path / "x" / "0" / "stdout.log").write_text("")
    (tmp_path / "rank_5").write_bytes(whole[:100])
    (tmp_path / "rank_6").write_bytes(b"")
    os.mkfifo(tmp_path / "rank_7")
    found = find_dumps([str(tmp_path)])
    assert [dump.rank for dump in found.dumps] == [2]
    assert found.foreign == 2
    assert [problem.rpartition("/")[2] for problem in sorted(found.problems)] == [
        "rank_5': left out: it is cut short or damaged (UnpicklingError)",
        "rank_6': left out: it is empty",
    ]


def test_the_rank_in_the_dump_is_stronger_than_the_name(tmp_path: Path) -> None:
    """A dump that elastic-run has asked for names its rank."""
    (tmp_path / "trace_1").write_bytes(pickle.dumps({"rank": 9, "entries": []}))
    assert [dump.rank for dump in find_dumps([str(tmp_path)]).dumps] == [9]


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    """A rank that has no dump in the last attempt is not taken from an earlier one."""
    whole = (DATA / "missing_rank" / "rank_0").read_bytes()
    for attempt, ranks in ((0, (0, 1, 2)), (1, (0, 1))):
        (tmp_path / f"attempt_{attempt}").mkdir()
        for rank in ranks:
            (tmp_path / f"attempt_{attempt}" / f"rank_{rank}").write_bytes(whole)
    found = find_dumps([str(tmp_path)])
    assert [dump.rank for dump in found.dumps] == [0, 1]
    assert all("attempt_1" in dump.source for dump in found.dumps)
    assert found.problems == (f"'{tmp_path}': dumps of attempts 0, 1: only the last, 1, is read",)


def _write_dumps(directory: Path, *ranks: int) -> None:
    directory.mkdir(parents=True)
    for rank in ranks:
        (directory / f"rank_{rank}").write_bytes((DATA / "missing_rank" / "rank_0").read_bytes())


def test_a_round_after_a_change_of_nodes_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    """The attempt is the same, for no restart was used."""
    _write_dumps(tmp_path / "attempt_0", 0, 1, 2)
    _write_dumps(tmp_path / "attempt_0.1", 0, 1)
    found = find_dumps([str(tmp_path)])
    assert {Path(dump.source).parent.name for dump in found.dumps} == {"attempt_0.1"}
    assert [dump.rank for dump in found.dumps] == [0, 1]
    assert found.problems == (f"'{tmp_path}': dumps of attempts 0, 0.1: only the last, 0.1, is read",)


def test_dumps_of_several_jobs_are_refused(tmp_path: Path) -> None:
    """One line names two dumps of one rank; in the log directory of each job alone all is read."""
    _write_dumps(tmp_path / "0917_train_4f2a" / "attempt_1", 0, 1)
    _write_dumps(tmp_path / "0958_train_0b3c" / "attempt_0", 1, 2)
    (tmp_path / "latest").symlink_to("0958_train_0b3c")
    with pytest.raises(DumpError, match=r"of several jobs: .*0917.*rank_1' and '.*0958.*rank_1' are .*; name the dir"):
        find_dumps([str(tmp_path)])
    assert [dump.rank for dump in find_dumps([str(tmp_path / "latest")]).dumps] == [1, 2]
    _write_dumps(tmp_path / "copied" / "a", 0)
    _write_dumps(tmp_path / "copied" / "b", 0)
    with pytest.raises(DumpError, match="dumps of several jobs"):
        find_dumps([str(tmp_path / "copied")])


def test_the_nodes_of_one_job_are_read_together(tmp_path: Path) -> None:
    """Each node has log directories of its own; a node that was lost before the last attempt is left out."""
    _write_dumps(tmp_path / "a" / "attempt_1", 0)
    _write_dumps(tmp_path / "b" / "attempt_1", 1)
    _write_dumps(tmp_path / "c" / "attempt_0", 2)
    found = find_dumps([str(tmp_path)])
    assert [dump.rank for dump in found.dumps] == [0, 1]
    (problem,) = found.problems
    assert problem.endswith("rank_2': left out: it is of attempt 0, others are of 1")


def test_a_file_that_cannot_be_read_is_told_with_the_reason() -> None:
    """The file system's error stands behind its name."""
    found = find_dumps(["/proc/self/mem"])
    assert found.problems == (f"'/proc/self/mem': left out: {os.strerror(errno.EIO)}",)


#: A name that tears a line and changes the colours of a terminal where it is printed as it is.
_TEARS = "a b\n\x1b[31mc"


def test_names_of_files_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with spaces, line ends or control characters is clear, and stays in its line."""
    monkeypatch.chdir(tmp_path)
    _write_dumps(tmp_path / _TEARS / "attempt_0", 0)
    _write_dumps(tmp_path / _TEARS / "attempt_1", 0)
    (tmp_path / f"{_TEARS}other").write_text("other")
    (tmp_path / _TEARS / "rank_7").write_bytes(b"\x80damaged")
    name = r"'a b\n\x1b[31mc"
    found = find_dumps([_TEARS, f"{_TEARS}other"])
    assert [problem.partition(": ")[0] for problem in found.problems] == [
        f"{name}'",
        f"{name}/rank_7'",
        f"{name}other'",
    ]
    with pytest.raises(DumpError) as raised:
        find_dumps([f"{_TEARS}/nothing"])
    assert str(raised.value) == f"{name}/nothing': No such file or directory"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"^no dump of a flight recorder in 'empty', 'empty' \(0 other files\)$"):
        trace.run_trace(["empty", "empty"])
