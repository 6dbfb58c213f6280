"""Files and paths that the user names: pipes, devices, denied directories."""

from __future__ import annotations

import os
import pickle
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import files
from elastic_run.cli.request import read_token
from elastic_run.diagnosis.dumps import find_dumps
from elastic_run.files import explain_denial, read_user_file
from elastic_run.notices import UsageError
from elastic_run.report.failure_rules import read_rules
from elastic_run.report.job_history import read_logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a named pipe to which nobody writes, with a short wait for a writer."""
    monkeypatch.setattr(files, "_WRITER_WAIT", 0.05)
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


def test_a_pipe_without_a_writer_is_an_error(pipe: str) -> None:
    """Opened as a file, it would be a wait without an end and without a word."""
    with pytest.raises(OSError, match="nothing was written to this pipe"):
        read_user_file(pipe, 10)
    with pytest.raises(ValueError, match="can't be read: nothing was written to this pipe"):
        read_rules(pipe)
    with pytest.raises(UsageError, match=r"^--rdzv-token-file: .* can't be read: nothing was written to this pipe$"):
        read_token(pipe, {})
    with pytest.raises(OSError, match="nothing was written to this pipe"):
        read_logs(pipe)
    assert find_dumps([pipe]).problems == (f"{pipe!r}: left out: nothing was written to this pipe",)


def test_a_dump_and_an_event_log_may_come_through_a_pipe(pipe: str, tmp_path: Path) -> None:
    """As `elastic-run trace <(ssh node cat rank_2)`; no byte is lost where the pipe lies in an attempt's directory."""
    attempt = tmp_path / "attempt_0"
    attempt.mkdir()
    path = str(Path(pipe).rename(attempt / "rank_2"))
    with _filled(path, pickle.dumps({"entries": []})):
        assert [dump.rank for dump in find_dumps([path]).dumps] == [2]
    with _filled(path, b"no event\n"):
        assert read_logs(path).files == [path]


@contextmanager
def _filled(path: str, content: bytes) -> Iterator[None]:
    """Write bytes into a pipe and close its writing end; another reader keeps the bytes until then."""
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, content)
    os.close(writer)
    yield
    os.close(reader)


def test_a_writer_may_take_its_time(pipe: str) -> None:
    """A command of the shell's `<(…)` has the pipe open, and all that it writes is read."""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read_user_file(pipe, 10)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    for part in (b"nnodes", b" = 2", b"too long"):
        os.write(writer, part)
    thread.join()
    assert found == [b"nnodes = 2"]
    os.close(writer)
    os.close(reader)  # until now it keeps the writer from an error, whenever the thread opens the pipe


def test_a_pipe_whose_writer_ends_without_a_byte_is_an_error(pipe: str) -> None:
    """As `--config <(false)`: it would be a configuration without values."""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    thread = threading.Timer(0.01, os.close, [os.open(pipe, os.O_WRONLY)])
    thread.start()
    with pytest.raises(OSError, match="nothing was written to this pipe"):
        read_user_file(pipe, 10)
    thread.join()
    os.close(reader)


def test_a_device_without_an_end_is_no_token() -> None:
    """It is read up to the longest token."""
    with pytest.raises(UsageError, match=r"^--rdzv-token-file: '/dev/zero' is longer than 1024 KiB$"):
        read_token("/dev/zero", {})


def test_a_token_file_without_a_token_is_refused(tmp_path: Path) -> None:
    """An empty token would let everybody in."""
    path = tmp_path / "token"
    path.write_text(" \n")
    with pytest.raises(UsageError, match=r"^--rdzv-token-file: '.*/token' is empty$"):
        read_token(str(path), {})


# --- which part of a path denies access -------------------------------------------------------------------------------
@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory with data/private/model.pt in it."""
    (tmp_path / "data" / "private").mkdir(parents=True)
    (tmp_path / "data" / "private" / "model.pt").touch(0o600)
    (tmp_path / "data" / "private").chmod(0o700)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "denied", "expected"),
    [
        (
            "data/private/model.pt",
            {("data/private", os.X_OK)},
            r"a directory \(drwx------ \w+\) may not be entered: '{}/data/private'",
        ),
        (
            "data/private/model.pt",
            {("data", os.X_OK), ("data/private", os.X_OK)},
            r"a directory \(d\S+ \w+\) may not be entered: '{}/data'",
        ),
        (
            "data/private/model.pt",
            {("data/private/model.pt", os.W_OK)},
            r"the file \(-rw------- \w+\) may not be written: '{}/data/private/model.pt'",
        ),
        ("data/new.pt", {("data", os.W_OK)}, r"nothing may be created in a directory \(d\S+ \w+\): '{}/data'"),
        ("data/new.pt", set(), None),
        ("data/private/model.pt", set(), None),
        ("data/private/model.pt/x", set(), None),
        ("data/missing/model.pt", {("data", os.W_OK)}, None),
    ],
)
def test_the_part_that_denies_is_named(
    path: str, denied: set[tuple[str, int]], expected: str | None, tree: Path
) -> None:
    """The first directory on the way that may not be entered, else the file, else its directory."""

    def access(name: str, mode: int) -> bool:
        return (os.path.relpath(name, tree), mode) not in denied

    said = explain_denial(f"[Errno 13] Permission denied: '{tree / path}'", access)
    if expected is None:
        assert said == ""
    else:
        assert re.fullmatch(expected.replace("{}", re.escape(str(tree))), said)


@pytest.mark.parametrize("message", ["", "[Errno 13] Permission denied", "no path: 'x'"])
def test_a_message_without_a_path_names_nothing(message: str) -> None:
    """Nothing is guessed."""
    assert explain_denial(message) == ""
