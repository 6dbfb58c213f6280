"""The process that passes on what background processes write."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from elastic_run.multiprocessing.output import remainder
from elastic_run.multiprocessing.output.remainder import Source, leave
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

#: Leaves the first descriptor beyond the standard ones, which is close-on-exec.
_LEAVES = """
import os
from elastic_run.multiprocessing.output import remainder
from elastic_run.multiprocessing.output.remainder import Source, leave
from tests.support.wait import DEADLINE
reading, writing = os.pipe()
leave([Source(reading, [1])], is_exec=True)
print(reading, flush=True)
os.write(writing, b"late\\n")
"""


def test_a_program_that_is_no_interpreter_is_not_begun_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a program that embeds Python `sys.executable` is that program, and is not executed for this."""
    program = tmp_path / "application"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    reading, writing = os.pipe()
    out, target = os.pipe()
    leave([Source(reading, [target])], is_exec=True)
    for descriptor in (reading, target):
        os.close(descriptor)
    os.write(writing, b"late\n")
    os.close(writing)
    with os.fdopen(out, "rb") as file:
        assert file.read() == b"late\n"
    assert not (tmp_path / "begun").exists()


def test_it_reads_from_a_descriptor_of_any_number() -> None:
    """The lowest number that a program can have for a pipe is passed on like any other."""
    program = subprocess.run([sys.executable, "-c", _LEAVES], stdout=subprocess.PIPE, timeout=60, check=True)
    assert program.stdout == b"3\nlate\n"


def test_a_reader_that_is_slow_gets_all() -> None:
    """Also through a pipe that does not block: another process of the same terminal may have made it so."""
    reading, target = os.pipe()
    os.set_blocking(target, False)
    data = bytes(range(256)) * 1024
    source = Source(-1, [target])
    writer = threading.Thread(target=remainder._write, args=(source, data), daemon=True)
    writer.start()
    with os.fdopen(reading, "rb") as file:
        assert file.read(len(data)) == data
    writer.join(DEADLINE)
    assert not writer.is_alive()
    assert source.targets == [target]
    os.close(target)
