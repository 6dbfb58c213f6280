"""A sign of life to a program that watches the workers.

A launcher that wants to know names a file of this worker's own in ELASTIC_RUN_HEARTBEAT_FILE. A heartbeat replaces its
content by one short line, the count of heartbeats and the step, in one write: ``17 step=300``. The watcher looks
whether it changes, by its own clock. Not a pipe: a full one would block the training, and children would hold it open.
"""

from __future__ import annotations

import os
import time

from elastic_run.contract import ENV_HEARTBEAT_FILE

__all__ = ["heartbeat"]

#: Seconds between two writes; heartbeats in between only count.
_INTERVAL = 0.2
#: A line is filled up to this, so that a shorter one leaves nothing of a longer one.
_WIDTH = 64


class _Pulse:
    """This process's heartbeats."""

    def __init__(self) -> None:
        self.count = 0
        self.next_write = 0.0
        self.pid = 0
        self.path = ""
        self.descriptor = -1

    def open(self) -> None:
        """Look once in each process whether a file is named. A fork writes nothing for its parent."""
        path = os.environ.get(ENV_HEARTBEAT_FILE, "")
        is_fork = path == self.path
        self.count, self.next_write, self.pid, self.path = 0, 0.0, os.getpid(), path
        self.descriptor = -1
        if path and not is_fork:
            try:
                self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError:
                pass  # the watcher is gone, or its disk: no reason to stop a training


_pulse = _Pulse()


def heartbeat(step: int | None = None) -> None:
    """Tell the launcher that this worker is alive: call it in every step.

    It costs next to nothing without such a file, and at most five short writes a second with one. It
    never fails.

    Args:
        step: How far the training is, if it has a number for that.
    """
    if _pulse.pid == 0 or (_pulse.descriptor >= 0 and _pulse.pid != os.getpid()):
        _pulse.open()
    if _pulse.descriptor < 0:
        return
    _pulse.count += 1
    now = time.monotonic()
    if now < _pulse.next_write:
        return
    _pulse.next_write = now + _INTERVAL
    line = f"{_pulse.count}" if step is None else f"{_pulse.count} step={step}"
    try:
        os.pwrite(_pulse.descriptor, f"{line[: _WIDTH - 1]:<{_WIDTH - 1}}\n".encode(), 0)
    except OSError:
        pass  # as above
