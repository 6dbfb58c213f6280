"""Whether this worker was told that it will be stopped: by a signal, or by the time.

The launcher sends SIGTERM when the job or its node ends, and --scale-up-signal before workers start again with new
nodes; that one's name comes in ELASTIC_RUN_SCALE_UP_SIGNAL. Python runs the handler between two instructions, so a
worker inside a collective learns of it when that returns. A launcher in a Slurm job says in ELASTIC_RUN_STOP_TIME when
the workers have to begin to save, so that they are done before Slurm kills them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from elastic_run.contract import ENV_SCALE_UP_SIGNAL, ENV_STOP_TIME
from elastic_run.worker.place import WorkerError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["stop_requested"]


class _Watch:
    """What this process was told."""

    def __init__(self) -> None:
        self.pid = 0
        self.is_told = False
        self.is_agreed = False
        self.stop_time = 0.0

    @property
    def is_requested(self) -> bool:
        """Whether a signal has come, or the time."""
        return self.is_told or bool(self.stop_time and time.monotonic() >= self.stop_time)

    def set_up(self) -> None:
        """Catch the signals from now on; a handler that was there before still gets them.

        Raises:
            WorkerError: This is not the main thread, and Python allows handlers there only.
        """
        if threading.current_thread() is not threading.main_thread():
            message = "call stop_requested() once in the main thread before other threads ask: it sets signal handlers"
            raise WorkerError(message)
        name = os.environ.get(ENV_SCALE_UP_SIGNAL, "")
        for number in {signal.SIGTERM, signal.Signals.__members__.get(name, signal.SIGTERM)}:
            self._catch(number)
        text = os.environ.get(ENV_STOP_TIME, "")
        if text.isdecimal():
            # The wall clock is read once: a clock that is set later moves nothing.
            self.stop_time = time.monotonic() + int(text) - time.time()
        self.pid = os.getpid()

    def _catch(self, number: signal.Signals) -> None:
        earlier = signal.getsignal(number)

        def note(received: int, frame: FrameType | None) -> None:
            if self.pid != os.getpid():
                # A process that this one has forked and that doesn't ask: multiprocessing ends those by SIGTERM, and
                # would wait for ever.
                signal.signal(received, signal.SIG_DFL if earlier is None else earlier)
                signal.raise_signal(received)
                return
            self.is_told = True
            if callable(earlier):
                earlier(received, frame)

        signal.signal(number, note)


_watch = _Watch()


def stop_requested(*, everywhere: bool = False) -> bool:
    """Tell whether the workers will be stopped: time to save and to leave the training loop.

    The first call begins to watch; make it before the loop, in the main thread. From then on SIGTERM no longer ends
    the process: leave within the grace period, or be killed at its end.

    Args:
        everywhere: Ask all ranks by one all-reduce, and answer True on all as soon as one was told: so all leave at the
            same step. Then every rank has to ask, equally often.

    Returns:
        Whether this worker, or with `everywhere` any, was told. It stays True.

    Raises:
        WorkerError: The first call is not in the main thread; or there is no process group to ask.
    """
    if _watch.pid != os.getpid():
        _watch.set_up()
    if everywhere and not _watch.is_agreed:
        from elastic_run.worker.collectives import any_rank

        # Kept, so that all ranks ask for the last time at the same call.
        _watch.is_agreed = any_rank(_watch.is_requested)
    return _watch.is_agreed if everywhere else _watch.is_requested
