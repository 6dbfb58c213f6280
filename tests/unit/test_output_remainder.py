"""The process that passes on what background processes write."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from elastic_run.multiprocessing.output.remainder import OpenStream, leave

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_program_that_is_no_interpreter_is_not_begun_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a program that embeds Python `sys.executable` is that program, and is not executed for this."""
    program = tmp_path / "application"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    reading, writing = os.pipe()
    out, target = os.pipe()
    leave([OpenStream(reading, [target])], is_exec=True)
    for descriptor in (reading, target):
        os.close(descriptor)
    os.write(writing, b"late\n")
    os.close(writing)
    with os.fdopen(out, "rb") as file:
        assert file.read() == b"late\n"
    assert not (tmp_path / "begun").exists()
