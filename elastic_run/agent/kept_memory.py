"""The memory in which this node's workers keep their state (--keep-state): made by the agent, used by the workers.

A memfd for each worker, and with --keep-state-copies=1 one more for the copy of another node's worker. It lives as long
as the agent or a process that has mapped it. Workers open it as `/proc/PID/fd/N` of the agent, as the same user: no
descriptor has to come to them through all the ways to start a worker. The kernel refuses to let it grow.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sys
import time

from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import HALVES, HEADER, RECORD, decode, newest, read_size
from elastic_run.utils import listen_everywhere

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Least bytes of one worker's memory.
_LEAST = 1 << 20


class KeptMemories:
    """The memories of this node's workers, and those for `copies` (0 or 1): `size` bytes of all together."""

    def __init__(
        self, size: int, workers: int, copies: int = 0, *, bandwidth: int = 0, is_served: bool = False
    ) -> None:
        self.size = size
        self._workers = workers
        self._listening = listen_everywhere(0) if is_served else None
        self._descriptors: list[int] = []
        # A worker opens a memory through its launcher's pid. If another job has got this pid, the random name differs.
        name = f"elastic-run-state-{secrets.token_hex(8)}"
        #: What the workers and the helpers are told, but for the number of a worker's memory.
        self._description: dict[str, object] = {
            "workers": workers,
            "name": name,
            "port": 0 if self._listening is None else self._listening.getsockname()[1],
            "secret": secrets.token_hex(32),
            "rate": -(-bandwidth // workers),
        }
        for number in range(workers * (1 + copies)):
            descriptor = os.memfd_create(f"{name}-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, size // (workers * (1 + copies)))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)

    def describe(self, number: int) -> dict[str, str]:
        """Return the variable with which a worker finds its memory, the others' and the server."""
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]
        return {ENV_KEPT_STATE: json.dumps({**self._description, "number": number, "paths": paths})}

    def read_status(self) -> dict[str, Any]:
        """Return the label and the age of the newest state that this node's ranks have, and the bytes in use."""
        own = self._descriptors[: self._workers]
        places = [os.pread(descriptor, RECORD, half * RECORD) for descriptor in own for half in range(HALVES)]
        records = [record for place in places if (record := decode(place)) is not None]
        generation = newest(records, self._workers)
        saved = max((record.saved_at for record in records if record.generation == generation), default=0.0)
        return {
            "size": self.size,
            "used": sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._descriptors),
            "label": None if generation is None else generation.label,
            "age": None if generation is None else round(time.monotonic() - saved, 1),
        }

    def write_command(self, directory: str) -> tuple[list[str], dict[str, str]]:
        """Return the command that writes the newest state to a directory, and its variables."""
        return [sys.executable, "-m", "elastic_run.worker.kept_checkpoint", directory], self.describe(0)

    def serve_command(self) -> tuple[list[str], dict[str, str], int] | None:
        """Return the command that serves this node's state to other nodes, its variables, and its socket."""
        if self._listening is None:
            return None
        number = self._listening.fileno()
        return [sys.executable, "-m", "elastic_run.worker.kept_server", f"{number}"], self.describe(0), number

    def close(self) -> None:
        """Give the memory back."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._listening is not None:
            self._listening.close()


def choose_size(wanted: str, memories: int) -> int:
    """Return the bytes of all memories, half of what is left for `auto`; raise ValueError if they can't be had."""
    from elastic_run.cluster.limits import available_memory

    left = available_memory()
    size = (read_size(wanted) or left // 2) // memories // HEADER * HEADER * memories
    if size > left:
        message = f"keep state needs {size / 1e9:.1f} GB of memory, and this node has {left / 1e9:.1f} GB left"
        raise ValueError(message)
    if size < memories * _LEAST:
        least = f"keep state needs {memories * _LEAST / 1e6:.0f} MB for {memories} workers"
        message = f"{least}, and gets {size / 1e6:.1f} MB"
        raise ValueError(message)
    return size
