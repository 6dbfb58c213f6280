"""The memory in which this node's workers keep their state (--keep-state): made by the agent, used by the workers.

A memfd for each worker. It has no name, so that nothing of it can be left over; it lives as long as the agent or a
process that has mapped it. Workers open it as `/proc/PID/fd/N` of the agent, as the same user: no descriptor has to
come to them through all the ways to start a worker. The kernel refuses to let it grow. `elastic_run.worker.kept_memory`
writes and reads it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import time

from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import HALVES, HEADER, RECORD, decode, newest, read_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.kept_generations import Record

__all__ = ["KeptMemories", "choose_size"]

#: Least bytes of one worker's memory.
_LEAST = 1 << 20


class KeptMemories:
    """The memories of this node's workers.

    Args:
        size: Bytes of all together.
        workers: Their number.

    Raises:
        OSError: The system gives none.
    """

    def __init__(self, size: int, workers: int) -> None:
        self.size = size
        # Random: a worker in another pid namespace, or with variables of a launcher that is gone, must not take the
        # memory of another job for its own.
        self._name = f"elastic-run-state-{secrets.token_hex(8)}"
        self._descriptors: list[int] = []
        try:
            for number in range(workers):
                descriptor = os.memfd_create(f"{self._name}-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                self._descriptors.append(descriptor)
                os.ftruncate(descriptor, size // workers)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        except OSError:
            self.close()
            raise

    def describe(self, number: int) -> dict[str, str]:
        """Return the variables with which a worker finds its memory and the others'."""
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]
        return {ENV_KEPT_STATE: ":".join([f"{number}", self._name, *paths])}

    def read_status(self) -> dict[str, Any]:
        """Return the label and the age of the newest state that all ranks have, and the bytes that are in use."""
        records = [record for descriptor in self._descriptors for record in _read_records(descriptor)]
        generation = newest(records)
        saved = max((record.saved_at for record in records if record.generation == generation), default=0.0)
        return {
            "size": self.size,
            "used": sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._descriptors),
            "label": None if generation is None else generation.label,
            "age": None if generation is None else round(time.monotonic() - saved, 1),
        }

    def write_command(self, directory: str) -> tuple[list[str], dict[str, str]]:
        """Return the command that writes the newest state to a directory, and its variables."""
        command = [sys.executable, "-m", "elastic_run.worker.kept_checkpoint", directory]
        return command, {**self.describe(0), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}

    def close(self) -> None:
        """Give the memory back."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _read_records(descriptor: int) -> list[Record]:
    places = (os.pread(descriptor, RECORD, half * RECORD) for half in range(HALVES))
    return [record for place in places if (record := decode(place)) is not None]


def choose_size(wanted: str, workers: int) -> int:
    """Return the bytes to make, for --keep-state: what the user wants, or half of what is left for `auto`.

    Raises:
        ValueError: So much is not left, or it is too little for the workers.
    """
    from elastic_run.cluster.limits import available_memory

    left = available_memory()
    size = (read_size(wanted) or left // 2) // workers // HEADER * HEADER * workers
    if size > left:
        message = f"keep state needs {size / 1e9:.1f} GB of memory, and this node has {left / 1e9:.1f} GB left"
        raise ValueError(message)
    if size < workers * _LEAST:
        message = (
            f"keep state needs {workers * _LEAST / 1e6:.0f} MB for {workers} workers, and gets {size / 1e6:.1f} MB"
        )
        raise ValueError(message)
    return size
