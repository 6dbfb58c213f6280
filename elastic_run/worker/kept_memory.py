"""The memories in which the workers of this node keep their state: mapped, written and checked.

The launcher owns them (`--keep-state`). They have no name in any file system: a worker opens them as files of the
launcher's process, whose paths are in ELASTIC_RUN_KEPT_STATE, and they are gone when the launcher and its workers are.
"""

from __future__ import annotations

import array
import errno
import functools
import json
import mmap
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import HALVES, RECORD, Record, choose_half, decode, encode, half_of
from elastic_run.records import replace
from elastic_run.worker.place import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    import torch

    from elastic_run.core.kept_generations import Generation

__all__ = [
    "DamagedStateError",
    "Entry",
    "KeptMemory",
    "KeptStateError",
    "StateTooLargeError",
    "open_memories",
    "own_number",
]

#: Bytes to which the parts of a memory are aligned: more than any type of torch needs.
_ALIGNMENT = 64
#: Words of eight bytes that are added up to one; a checksum is the CRC-32 of these sums, at memory speed.
_BLOCK = 4096


class KeptStateError(WorkerError):
    """The kept state can't be written or loaded."""


class StateTooLargeError(KeptStateError):
    """A worker's state needs more memory than --keep-state gives it. The state that was kept before is untouched."""


class DamagedStateError(KeptStateError):
    """Bytes of a kept state are not those that were written."""


class Entry:
    """Where a memory holds one tensor, or the bytes of one object.

    Args:
        name: The name in the state dict, as torch.distributed.checkpoint flattens it.
        offsets: Where a tensor's part lies in the whole tensor; None for an object.
        sizes: The shape of the part.
        whole: The shape of the whole tensor.
        dtype: The name of its type, such as `float32`.
        position: The first byte, from the beginning of the memory.
        length: Its bytes.
    """

    def __init__(
        self,
        name: str,
        offsets: tuple[int, ...] | None,
        sizes: tuple[int, ...],
        whole: tuple[int, ...],
        dtype: str,
        position: int,
        length: int,
    ) -> None:
        self.name = name
        self.offsets = None if offsets is None else tuple(offsets)
        self.sizes = tuple(sizes)
        self.whole = tuple(whole)
        self.dtype = dtype
        self.position = position
        self.length = length

    def as_list(self) -> list[Any]:
        """Return the arguments."""
        return [self.name, self.offsets, self.sizes, self.whole, self.dtype, self.position, self.length]


class KeptMemory:
    """One memory, mapped.

    Args:
        path: The file of the launcher's process.
        name: The name that the launcher has given to it.

    Raises:
        OSError: It can't be opened, or is another file.
    """

    def __init__(self, path: str, name: str) -> None:
        # Before it is opened: in another pid namespace, the path may be that of any file of a stranger.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            raise OSError(errno.ESTALE, "it is another file there", path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.size = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        self.room = half_of(self.size, 0)[1] - half_of(self.size, 0)[0]
        self._bytes: torch.Tensor | None = None
        self._checking: threading.Thread | None = None
        #: Held while a half is written: torch.distributed.checkpoint.async_save lets saves overlap.
        self.is_writing = threading.Lock()

    # --- records and indexes -----------------------------------------------------------------------------------------
    def read_records(self) -> list[Record | None]:
        """Return the records of both halves."""
        return [decode(self._map[half * RECORD : (half + 1) * RECORD]) for half in range(HALVES)]

    def find(self, generation: Generation) -> Record | None:
        """Return the record of a generation, or None."""
        return next((one for one in self.read_records() if one is not None and one.generation == generation), None)

    def read_index(self, record: Record) -> tuple[list[Entry], Any]:
        """Return the entries of a generation, and what the planner noted with them.

        Raises:
            DamagedStateError: The index is not what was written.
        """
        text = self._map[record.index_start : record.index_start + record.index_length]
        if zlib.crc32(text) != record.index_check:
            message = f"the index of rank {record.rank}'s state is damaged"
            raise DamagedStateError(message)
        entries, planner_data = json.loads(text)
        return [Entry(*values) for values in entries], planner_data

    # --- bytes -------------------------------------------------------------------------------------------------------
    def view(self, position: int, length: int) -> torch.Tensor:
        """Return bytes of the memory as a tensor of torch.uint8, without a copy."""
        if self._bytes is None:
            import torch

            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes[position : position + length]

    def read(self, position: int, length: int) -> bytes:
        """Return a copy of bytes of the memory."""
        return self._map[position : position + length]

    def write(self, position: int, content: bytes | memoryview) -> None:
        """Write bytes into the memory."""
        self._map[position : position + len(content)] = content

    # --- writing -----------------------------------------------------------------------------------------------------
    def begin(self, whole: Generation | None) -> tuple[int, int]:
        """Clear a half for a new generation; return its number and its first byte.

        Args:
            whole: The newest generation that all ranks have: it stays.
        """
        self.wait_checked()
        half = choose_half(self.read_records(), whole)
        self._map[half * RECORD : (half + 1) * RECORD] = bytes(RECORD)
        return half, half_of(self.size, half)[0]

    def commit(
        self, half: int, generation: Generation, rank: int, entries: Iterable[Entry], planner_data: object
    ) -> None:
        """Write the index and the record of a generation whose tensors are written, and begin to compute checksums.

        Raises:
            StateTooLargeError: The index has no room.
        """
        entries = list(entries)
        start, end = half_of(self.size, half)
        index_start = max((align(one.position + one.length) for one in entries), default=start)
        index = json.dumps([[one.as_list() for one in entries], planner_data]).encode()
        self.check_room(half, index_start - start + len(index))
        self._map[index_start : index_start + len(index)] = index
        record = Record(generation, rank, start, index_start, len(index), zlib.crc32(index), saved_at=time.monotonic())
        self._write_record(half, record)
        checking = threading.Thread(target=self._write_checks, args=(half, record, entries, end))
        checking.start()
        self._checking = checking

    def check_room(self, half: int, length: int) -> None:
        """Refuse what does not fit.

        Raises:
            StateTooLargeError: It doesn't.
        """
        start, end = half_of(self.size, half)
        if length > end - start:
            message = (
                f"the state has {length / 1e6:,.1f} MB, and --keep-state leaves {(end - start) / 1e6:,.1f} MB to it"
            )
            raise StateTooLargeError(message)

    def forget(self, generation: Generation) -> None:
        """Clear the record of a generation."""
        for half, record in enumerate(self.read_records()):
            if record is not None and record.generation == generation:
                self._map[half * RECORD : (half + 1) * RECORD] = bytes(RECORD)

    def _write_record(self, half: int, record: Record) -> None:
        self._map[half * RECORD : (half + 1) * RECORD] = encode(record)

    # --- checksums ---------------------------------------------------------------------------------------------------
    def _write_checks(self, half: int, record: Record, entries: list[Entry], end: int) -> None:
        checks = json.dumps([self.compute_check(one.position, one.length) for one in entries]).encode()
        position = record.index_start + record.index_length
        if position + len(checks) <= end:
            self._map[position : position + len(checks)] = checks
            self._write_record(half, replace(record, checks_length=len(checks), checks_check=zlib.crc32(checks)))

    def wait_checked(self) -> None:
        """Wait until the checksums of the last generation are written."""
        if self._checking is not None:
            self._checking.join()

    def compute_check(self, position: int, length: int) -> int:
        """Return the checksum of bytes: the CRC-32 of the sums of their words, block by block, and of the rest."""
        import torch

        words = length // 8
        blocks = words // _BLOCK
        check = 0
        if words:
            numbers = self.view(position, words * 8).view(torch.int64)
            sums = numbers[: blocks * _BLOCK].view(-1, _BLOCK).sum(1).tolist()
            sums.append(int(numbers[blocks * _BLOCK :].sum()))
            check = zlib.crc32(array.array("q", sums))
        return zlib.crc32(self._map[position + words * 8 : position + length], check)

    def verify(self, record: Record, threads: int) -> None:
        """Compare all bytes of a generation with their checksums, if these were computed before the worker died.

        Args:
            record: Its record.
            threads: Threads that compute; torch's own are one in a worker, unless OMP_NUM_THREADS says more.

        Raises:
            DamagedStateError: They differ.
        """
        entries, _ = self.read_index(record)
        if not record.checks_length:
            return
        position = record.index_start + record.index_length
        text = self._map[position : position + record.checks_length]
        if zlib.crc32(text) != record.checks_check:
            message = f"the checksums of rank {record.rank}'s state are damaged"
            raise DamagedStateError(message)
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda entry: self.compute_check(entry.position, entry.length), entries))
        for entry, check, now in zip(entries, json.loads(text), found, strict=True):
            if now != check:
                message = f"{entry.name} of rank {record.rank}'s state is damaged"
                raise DamagedStateError(message)


def align(position: int) -> int:
    """Return the next position at which a part may begin."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT


@functools.cache
def _map(pid: int, paths: str) -> list[KeptMemory]:  # noqa: ARG001 - a fork maps them anew: a thread may hold the parent's
    if not paths:
        return []
    _, name, *places = paths.split(":")
    return [KeptMemory(path, f"{name}-{number}") for number, path in enumerate(places)]


def own_number(environment: Mapping[str, str]) -> int:
    """Return the number of this worker's own memory. It is not LOCAL_RANK, which --virtual-local-rank makes 0."""
    return int(environment.get(ENV_KEPT_STATE, "").partition(":")[0] or 0)


def open_memories(environment: Mapping[str, str]) -> list[KeptMemory]:
    """Return the memories of this node's workers, by number; none where nothing is kept.

    A process maps them once.

    Raises:
        KeptStateError: The launcher has them, and they can't be opened from here.
    """
    try:
        return _map(os.getpid(), environment.get(ENV_KEPT_STATE, ""))
    except OSError as error:
        message = f"the launcher's memory {error.filename} can't be opened from here: {error.strerror}"
        raise KeptStateError(message) from error
