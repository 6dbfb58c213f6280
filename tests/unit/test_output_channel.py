"""Reading a worker's pipe to its end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from elastic_run.loop import Loop
from elastic_run.multiprocessing.output import channel
from elastic_run.multiprocessing.output.descriptors import open_log, open_pipe
from elastic_run.multiprocessing.output.logfile import LogFile

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_pipe_that_holds_more_than_ours_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that an ended worker has left in its pipe is kept, also where the worker has enlarged the pipe."""
    monkeypatch.setattr(channel, "CAPACITY", 1000)
    monkeypatch.setattr(channel, "READ_SIZE", 1000)
    reading, writing = open_pipe(is_large=False)
    data = b"x" * 5500
    os.write(writing, data)
    file = LogFile(open_log(str(tmp_path / "log")), lambda _: None)
    with Loop() as loop:
        channel.Channel(loop, reading, file=file).finish()
    os.close(writing)
    assert (tmp_path / "log").read_bytes() == data
