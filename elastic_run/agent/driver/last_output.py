"""When a worker has last written, and what: as seen here, or as its log files tell."""

from __future__ import annotations

import os
import time

from elastic_run.multiprocessing.output.worker_output import last_line
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.agent.api import Worker
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.diagnosis.stacks import Dump

#: Bytes of a log file in which its last line is looked for.
_READ = 512


def add_silences(dumps: dict[int, Dump], current: Round, workers: Iterable[Worker], now: float) -> dict[int, Dump]:
    """Return the stacks of some workers by global rank with the seconds since the last output of each."""
    local_ranks = {worker.global_rank: worker.local_rank for worker in workers}
    return {
        rank: replace(dump, silence=find_output(current, local_ranks[rank], now)[0]) for rank, dump in dumps.items()
    }


def find_output(current: Round, local_rank: int, now: float) -> tuple[float | None, str]:
    """Return seconds since a worker's last output, None where not all of its output is seen here; and its last line."""
    activity = current.output.activities.get(local_rank)
    latest, line = (current.started, "") if activity is None else (activity.last, activity.last_line)
    files = current.output_files(local_rank)
    for path in files:
        try:
            status = os.stat(path)
            # Both of these clocks are this machine's own, and the difference is for display.
            written = now - (time.time() - status.st_mtime)
            if status.st_size and (written > latest or not line):
                latest, line = max(latest, written), last_line(_read_end(path, status.st_size))
        except OSError:
            continue  # removed by somebody
    return (max(0.0, now - latest) if current.sees_stdout(local_rank) else None), line


def _read_end(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(fd, _READ, max(0, size - _READ))
    finally:
        os.close(fd)
