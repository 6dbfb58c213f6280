"""The job store in a directory reads files that other processes change at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.store.jobstore import file
from elastic_run.store.jobstore.file import FileJobStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("trimmed_at", "first"), [(1, b"4"), (2, b"1")])
def test_entries_that_are_trimmed_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trimmed_at: int, first: bytes
) -> None:
    """If an entry is deleted while it is read, the reader returns the entries before it, or continues after it."""
    path = f"{tmp_path}/"
    reader, trimmer = FileJobStore(path, "j"), FileJobStore(path, "j")
    for number in range(1, 6):
        trimmer.append("facts", b"%d" % number)
    read, reads = file._read, []

    def read_late(name: str) -> bytes | None:
        """Let the first three entries be trimmed before one of them is read."""
        reads.append(name)
        if len(reads) == trimmed_at:
            trimmer.trim("facts", 3)
        return read(name)

    monkeypatch.setattr(file, "_read", read_late)
    entries, position = reader.read("facts", 0, 10.0)
    assert entries[0] == first
    while position < 5:
        more, position = reader.read("facts", position, 10.0)
        entries += more
    assert entries == ([b"1"] if trimmed_at > 1 else []) + [b"4", b"5"]


def test_a_writer_that_was_stopped_leaves_no_entry_where_the_stream_was_trimmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another node's entry has had the number meanwhile and is gone, the writer takes the next number."""
    path = f"{tmp_path}/"
    writer, other = FileJobStore(path, "j"), FileJobStore(path, "j")
    scan, scans = writer._scan, []

    def scan_late(stream: str) -> tuple[set[int], int]:
        """Let the number that was free be used and trimmed before the writer uses it."""
        scans.append(scan(stream))
        if len(scans) == 1:
            other.append(stream, b"1")
            other.trim(stream, 1)
        return scans[-1]

    monkeypatch.setattr(writer, "_scan", scan_late)
    writer.append("facts", b"2")
    assert other.read("facts", 1, 0.0) == ([b"2"], 2)


@pytest.mark.parametrize("trimmed", [1, 2, 3])
def test_a_reader_goes_on_behind_what_was_trimmed(tmp_path: Path, trimmed: int) -> None:
    """A reader that was slow has missed entries, and reads those that are left."""
    store = FileJobStore(f"{tmp_path}/", "j")
    for number in range(1, 5):
        store.append("facts", b"%d" % number)
    store.trim("facts", trimmed)
    assert store.read("facts", 0, 0.0) == ([b"%d" % number for number in range(trimmed + 1, 5)], 4)


def test_a_stream_that_is_trimmed_and_a_job_that_is_removed_leave_no_file(tmp_path: Path) -> None:
    """The log in a file is trimmed many times in a long job, and a new job may use the file of an earlier one."""
    store = FileJobStore(str(tmp_path / "store"), "j")
    for _ in range(3):
        store.append("facts", b"x")
    for position in (1, 2, 3):
        store.trim("facts", position)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    store.remove_job()
    assert list(tmp_path.iterdir()) == []
