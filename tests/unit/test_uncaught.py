"""Exceptions that end a worker: what it tells, whose code raised them, and why a program could not be started."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import notices
from elastic_run.agent.context import Senders
from elastic_run.agent.worker_launch import explain_failed_start
from elastic_run.core.failure.hang import (
    Uncaught,
    confirm,
    describe_survival,
    place_failed,
    place_last_words,
    read_uncaught,
)
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.core.failure.stacks import Dump, Place
from elastic_run.signals import SIGINT, SIGTERM, SignalInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --- what a worker tells of the exception that has ended its main thread ----------------------------------------------
_ERROR = ExceptionText("ValueError", "shard 7", ("ValueError: shard 7",))
_TOLD = Uncaught(3.5, _ERROR, (("ab", "loader"), ("cd", "sender")))
_SHUTDOWN = '  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown\n'


def text(main: str, *others: str) -> str:
    """Return a text of faulthandler's; other threads are given by their numbers."""
    threads = [f'Thread 0x{other:0>16} (most recent call first):\n  File "x.py", line 1 in run\n' for other in others]
    return "".join((*threads, f"Thread 0x{'1':0>16} (most recent call first):\n{main}"))


def frame(file: str, function: str) -> str:
    """Return a line of a stack."""
    return f'  File "{file}", line 12 in {function}\n'


def test_a_worker_tells_moment_class_message_and_threads() -> None:
    """What is garbage is none."""
    assert read_uncaught("3.5\x1fValueError\x1fshard 7\x1fab loader\x1fcd sender") == _TOLD
    for garbage in ("", "soon\x1fValueError\x1fx", "3.5\x1fValueError"):
        assert read_uncaught(garbage) is None


def test_the_traceback_on_stderr_tells_more_if_it_is_of_that_exception() -> None:
    """It is certain then; of another exception it tells nothing."""
    written = ExceptionText("data.ValueError", "shard 7 of 9", ("x", "y"), is_certain=False)
    assert confirm(written, _TOLD) is written
    assert written.is_certain
    assert confirm(ExceptionText("KeyError", "3"), _TOLD) is confirm(None, _TOLD) is _ERROR


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (None, "threads loader, sender still run"),
        (Dump(text(_SHUTDOWN, "ab", "cd")), "threads loader, sender still run"),
        (Dump(text(_SHUTDOWN, "cd")), "thread sender still runs"),
        (Dump(text(_SHUTDOWN, "ef")), "another thread still runs"),
        (Dump(text(frame("/code/train.py", "save"))), "it is in save (train.py:12)"),
        (
            Dump(text(frame("/x/lib/python3.11/multiprocessing/util.py", "_exit_function"))),
            "a child process still runs",
        ),
        (Dump(problem="has closed its descriptor"), "threads loader, sender still run"),
    ],
)
def test_what_keeps_a_process_alive(dump: Dump | None, expected: str) -> None:
    """The threads that still live, a child process, or the place of an exit function."""
    assert describe_survival(_TOLD, dump) == expected


def test_what_keeps_a_process_without_threads_alive() -> None:
    """The kernel's word, or what is left; of many threads some are named."""
    alone = Uncaught(0.0, _ERROR)
    assert describe_survival(alone, Dump(problem="ignores signal 60")) == "it ignores signal 60"
    assert describe_survival(alone) == "an exit function, a destructor or native code still runs"
    many = Uncaught(0.0, _ERROR, tuple((f"a{number}", f"t{number}") for number in range(5)))
    assert describe_survival(many) == "threads t0, t1, t2 and 2 more still run"


def test_the_places_of_such_ranks() -> None:
    """The report on a hang names the exception, and what the rank does."""
    assert place_failed(_TOLD, Dump()).problem == (
        "has raised ValueError: shard 7, and has not ended: threads loader, sender still run"
    )
    said = "has written ValueError: shard 7 and nothing after it, and "
    assert place_last_words(Place("wait", "/code/train.py", 9), _ERROR).problem == f"{said}is in wait (train.py:9)"
    assert place_last_words(Place(problem="is stopped"), _ERROR).problem == f"{said}is stopped"


# --- whose code has raised an exception -------------------------------------------------------------------------------
_PLUGIN = "/venv/lib/python3.11/site-packages/our_plugin/handlers.py"
_OURS = f"{notices._ROOT}run.py"
_JSON = f"{notices._STANDARD_LIBRARY}json/decoder.py"
_URLLIB3 = "/venv/lib/python3.11/site-packages/urllib3/connection.py"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([_OURS], ""),
        ([_OURS, _PLUGIN], f"{_PLUGIN}:1"),
        ([_OURS, _PLUGIN, _JSON], f"{_PLUGIN}:1"),
        ([_OURS, _PLUGIN, _URLLIB3], f"{_PLUGIN}:1"),
        ([_OURS, _JSON], ""),
        ([_OURS, _URLLIB3], ""),
        ([_OURS, "<string>"], ""),
        ([_PLUGIN, _OURS], ""),
    ],
)
def test_the_standard_library_and_our_dependencies_count_to_their_caller(paths: list[str], expected: str) -> None:
    """A defect of ours that shows in urllib3 is still to be reported to us."""
    calls: list[Callable[..., object]] = []
    for path in paths:
        names: dict[str, Any] = {}
        exec(compile("def call(rest): rest[0](rest[1:]) if rest else 1 / 0", path, "exec"), names)  # noqa: S102 - our own text
        calls.append(names["call"])
    with pytest.raises(ZeroDivisionError) as caught:
        calls[0](calls[1:])
    assert notices.find_foreign_place(caught.value) == expected


# --- why a program could not be started -------------------------------------------------------------------------------
def missing(program: str) -> str:
    """Return what is said of a program for which the system says that there is no such file."""
    failed = explain_failed_start(1, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program), program)
    assert failed.verdict == "not_found"
    return failed.detail


@pytest.mark.parametrize(
    ("content", "interpreter"),
    [
        (b"#!/nope/x\n", "/nope/x"),
        (b"#! \t/nope/x -u \n", "/nope/x"),
        (b"#!/nope/x", "/nope/x"),
        (b"#!/bin/sh\r\necho\r\n", "/bin/sh\r"),
        (b"#!/nope/" + b"x" * 999, "/nope/" + "x" * 248),
    ],
)
def test_the_interpreter_that_a_script_lacks_is_named(content: bytes, interpreter: str, tmp_path: Path) -> None:
    """A script that is there is not called missing: its first line names an interpreter which is."""
    program = tmp_path / "tool"
    program.write_bytes(content)
    program.chmod(0o755)
    said = f"{program}: its first line names the interpreter {interpreter!r}, which does not exist"
    assert missing(str(program)) == said


@pytest.mark.parametrize("content", [b"\x7fELF", b"#!\n", b"#!/bin/sh\n"])
def test_a_program_without_its_loader_is_not_called_missing(content: bytes, tmp_path: Path) -> None:
    """A program that is there, of another kind, lacks something that it needs to run."""
    program = tmp_path / "tool"
    program.write_bytes(content)
    program.chmod(0o755)
    assert missing(str(program)) == f"{program}: its interpreter or loader does not exist here"


def test_a_program_that_is_not_there_is_called_missing(tmp_path: Path) -> None:
    """No file, no program."""
    assert missing(str(tmp_path / "tool")) == f"{tmp_path / 'tool'}: no such program"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (FileNotFoundError(errno.ENOENT, "no such file", "tool"), "not_found"),
        (FileNotFoundError(errno.ENOENT, "no such file"), "not_found"),
        (FileNotFoundError(errno.ENOENT, "no such file", "/logs/0/stderr.log"), "cannot_start"),
        (PermissionError(errno.EACCES, "denied", "tool"), "not_executable"),
        (PermissionError(errno.EACCES, "denied", "/logs/0/stderr.log"), "cannot_start"),
        (OSError(errno.ENOEXEC, "exec format error", "tool"), "not_executable"),
        (OSError(errno.ENOMEM, "no memory"), "cannot_start"),
        (ValueError("embedded null byte"), "cannot_start"),
    ],
)
def test_an_error_about_another_file_is_not_the_programs(error: Exception, verdict: str) -> None:
    """The verdict, and with it the exit code, follows from the error and from the file that it names."""
    assert explain_failed_start(1, error, "tool").verdict == verdict


# --- which process sent a signal --------------------------------------------------------------------------------------
_BY_KILL, _BY_KERNEL, _BY_TIMER = 0, 0x80, -2


@pytest.mark.parametrize(
    ("number", "code", "pid", "words"),
    [
        (SIGINT, _BY_KERNEL, 0, "the terminal"),
        (SIGTERM, _BY_KERNEL, 0, "the kernel"),
        (SIGTERM, _BY_TIMER, 0, "a timer"),
        (SIGTERM, _BY_KILL, 0, "a process outside of this container (uid 7)"),
        (SIGTERM, _BY_KILL, 2**22 + 1, f"pid {2**22 + 1}"),
    ],
)
def test_a_sender_is_described(number: int, code: int, pid: int, words: str) -> None:
    """The kernel's own signals, a timer, a process that can't be seen, and one that is gone are told apart."""
    senders = Senders()
    senders.add(number, SignalInfo(number=number, code=code, pid=pid, uid=7))
    assert senders.find(number) == words


def test_a_process_has_its_name() -> None:
    """A process that lives is named; the last sender of a number counts, and an unknown one takes its place."""
    senders = Senders()
    senders.add(SIGTERM, SignalInfo(number=SIGTERM, code=_BY_KILL, pid=os.getpid(), uid=0))
    assert senders.find(SIGTERM).startswith(f"pid {os.getpid()} (")
    senders.add(SIGTERM, None)
    assert senders.find(SIGTERM) == senders.find(SIGINT) == ""
