"""The counters of a process that the hang detection reads at each tick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_run.agent.driver.process_counters import ProcessCounters
from tests.support.wait import wait_until

if TYPE_CHECKING:
    import pytest

#: Writes a line for each one that it reads, under a name with all that a name can have.
_ECHO = """
import sys
open("/proc/self/comm", "w").write(") R 1 (2")
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def _count_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_bytes_and_processor_time_grow_with_what_the_process_does() -> None:
    """Each reading is of now, through files that stay open."""
    counters = ProcessCounters(os.getpid())
    before = counters.read()
    assert before is not None
    with Path(os.devnull).open("wb") as sink:
        sink.write(bytes(100_000))
    sum(number * number for number in range(3_000_000))
    after = counters.read()
    counters.close()
    assert after is not None
    assert (after[0] or 0) - (before[0] or 0) >= 100_000
    assert after[1] > before[1]


def test_a_process_that_is_gone_has_no_counters() -> None:
    """Neither one that ends while its files are open, nor one that was gone before; its name does not matter."""
    with subprocess.Popen(
        [sys.executable, "-c", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        counters, late = ProcessCounters(process.pid), ProcessCounters(process.pid)
        process.stdin.write("word\n")
        process.stdin.flush()
        process.stdout.readline()
        found = counters.read()
        assert found is not None
        assert found[0] is not None
        assert found[0] >= len("word\n")
        process.stdin.close()
        process.wait()
        wait_until(lambda: counters.read() is None)
        assert late.read() is None
    counters.close()
    late.close()


def test_a_kernel_that_does_not_tell_bytes_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may read /proc/PID/io of some processes."""
    real = os.pread
    io = Path(f"/proc/{os.getpid()}/io")

    def read(fd: int, size: int, offset: int) -> bytes:
        if Path(f"/proc/self/fd/{fd}").readlink() == io:
            raise PermissionError
        return real(fd, size, offset)

    counters = ProcessCounters(os.getpid())
    monkeypatch.setattr(os, "pread", read)
    found = counters.read()
    counters.close()
    assert found is not None
    assert found[0] is None
    assert found[1] > 0


def test_no_descriptor_stays_open() -> None:
    """One closes what it has opened, and may be closed twice."""
    before = _count_descriptors()
    counters = ProcessCounters(os.getpid())
    counters.read()
    counters.read()
    assert _count_descriptors() == before + 2
    counters.close()
    counters.close()
    assert _count_descriptors() == before
