"""What tests of countdown timers begin with."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def no_timer_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without a client, whatever a test before it has configured."""
    monkeypatch.setattr("torch.distributed.elastic.timer.api._timer_client", None)
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that does nothing."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def write_line(path: str, line: bytes) -> None:
    """Write into a named pipe that a server reads, as a client does."""
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, line)
    os.close(fd)
