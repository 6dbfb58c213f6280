"""The memory in which this node's workers keep their state (--keep-state): made by the agent, used by the workers.

A memfd for each worker, and with --keep-state-copies=1 one more for the copy of another node's worker. It has no name,
so that nothing of it can be left over; it lives as long as the agent or a process that has mapped it. Workers open it
as `/proc/PID/fd/N` of the agent, as the same user: no descriptor has to come to them through all the ways to start a
worker. The kernel refuses to let it grow. `elastic_run.worker.kept_memory` writes and reads it. With several nodes a
process serves it to the others, `elastic_run.worker.kept_server`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections import Counter

from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import HALVES, HEADER, RECORD, decode, read_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.kept_generations import Record

__all__ = ["KeptMemories", "choose_size"]

#: Least bytes of one worker's memory.
_LEAST = 1 << 20


class KeptMemories:
    """The memories of this node's workers, and those for copies: `size` bytes of all together.

    There are `copies` (0 or 1) of each worker of another node, which come at `bandwidth` bytes a second at most, unless
    that is 0. With `is_served` other nodes may ask for this node's state.
    """

    def __init__(
        self, size: int, workers: int, copies: int = 0, *, bandwidth: int = 0, is_served: bool = False
    ) -> None:
        self.size = size
        self._workers = workers
        self._rate = -(-bandwidth // workers)
        self._secret = secrets.token_hex(32)
        self._listening = open_at_any_port() if is_served else None
        # Random: a worker in another pid namespace, or with variables of a launcher that is gone, must not take the
        # memory of another job for its own.
        self._name = f"elastic-run-state-{secrets.token_hex(8)}"
        self._descriptors: list[int] = []
        try:
            for number in range(workers * (1 + copies)):
                descriptor = os.memfd_create(f"{self._name}-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                self._descriptors.append(descriptor)
                os.ftruncate(descriptor, size // (workers * (1 + copies)))
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        except OSError:
            self.close()
            raise

    def describe(self, number: int) -> dict[str, str]:
        """Return the variable with which a worker finds its memory, the others' and the server."""
        found = {
            "number": number,
            "workers": self._workers,
            "name": self._name,
            "paths": [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors],
            "port": 0 if self._listening is None else self._listening.getsockname()[1],
            "secret": self._secret,
            "rate": self._rate,
        }
        return {ENV_KEPT_STATE: json.dumps(found)}

    def read_status(self) -> dict[str, Any]:
        """Return the label and the age of the newest state that this node's ranks have, and the bytes in use."""
        records = [record for own in self._descriptors[: self._workers] for record in _read_records(own)]
        counts = Counter(record.generation for record in records)
        whole = (one for one, count in counts.items() if count == min(self._workers, one.world_size))
        generation = max(whole, key=lambda one: one.number, default=None)
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


def open_at_any_port() -> socket.socket:
    """Return a socket that listens at all addresses of this machine."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:  # a machine without IPv6
        return socket.create_server(("", 0))


def _read_records(descriptor: int) -> list[Record]:
    places = (os.pread(descriptor, RECORD, half * RECORD) for half in range(HALVES))
    return [record for place in places if (record := decode(place)) is not None]


def choose_size(wanted: str, memories: int) -> int:
    """Return the bytes of all memories, for a --keep-state: with `auto`, half of what is left.

    Raises:
        ValueError: So much is not left, or it is too little for the workers.
    """
    from elastic_run.cluster.limits import available_memory

    left = available_memory()
    size = (read_size(wanted) or left // 2) // memories // HEADER * HEADER * memories
    if size > left:
        message = f"keep state needs {size / 1e9:.1f} GB of memory, and this node has {left / 1e9:.1f} GB left"
        raise ValueError(message)
    if size < memories * _LEAST:
        message = (
            f"keep state needs {memories * _LEAST / 1e6:.0f} MB for {memories} workers, and gets {size / 1e6:.1f} MB"
        )
        raise ValueError(message)
    return size
