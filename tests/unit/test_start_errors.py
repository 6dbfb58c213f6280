"""Why a program could not be started, in words."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.agent.driver.round_driver import explain_failed_start

if TYPE_CHECKING:
    from pathlib import Path


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
