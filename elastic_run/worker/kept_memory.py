"""The memories in which the workers of this node keep their state: mapped, written and checked.

The launcher owns them (`--keep-state`). They have no name in any file system: a worker opens them as files of the
launcher's process, whose paths are in ELASTIC_RUN_KEPT_STATE, and they are gone when the launcher and its workers are.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import json
import mmap
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import HALVES, RECORD, Record, choose_half, decode, encode, half_of
from elastic_run.records import replace
from elastic_run.worker.place import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    import torch

    from elastic_run.core.kept_generations import Generation

__all__ = [
    "DamagedStateError",
    "Entry",
    "KeptMemory",
    "KeptStateError",
    "NodeMemories",
    "StateTooLargeError",
    "open_memories",
    "parse_index",
]

#: Bytes to which the parts of a memory are aligned: more than any type of torch needs.
_ALIGNMENT = 64
#: Words of eight bytes that are added up to one; a checksum is the CRC-32 of these sums, at memory speed.
_BLOCK = 4096
_ADVICE = "--keep-state=SIZE is divided among this node's workers, and each keeps two generations"


class KeptStateError(WorkerError):
    """The kept state can't be written or loaded."""


class StateTooLargeError(KeptStateError):
    """A worker's state needs more memory than --keep-state gives it. The state that was kept before is untouched."""


class DamagedStateError(KeptStateError):
    """Bytes of a kept state are not those that were written."""


class Entry(NamedTuple):
    """Where a memory holds one tensor, or the bytes of one object."""

    name: str  # In the state dict, as torch.distributed.checkpoint flattens it
    offsets: Sequence[int] | None  # Where a tensor's part lies in the whole tensor; None for an object
    sizes: Sequence[int]  # The shape of the part
    whole: Sequence[int]  # The shape of the whole tensor
    dtype: str  # The name of its type, such as `float32`
    position: int  # The first byte, from the beginning of the half
    length: int  # Its bytes


class KeptMemory:
    """One memory, mapped: the file `path` of the launcher's process, to which it has given a name.

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
        self._copying: threading.Thread | None = None
        #: Bytes that are registered with CUDA, by their first one.
        self._pinned: dict[int, int] = {}
        #: Held while a half is written: torch.distributed.checkpoint.async_save lets saves overlap.
        self.is_writing = threading.Lock()

    # --- records and indexes -----------------------------------------------------------------------------------------
    def read_records(self) -> list[Record | None]:
        """Return the records of both halves."""
        return [decode(self._map[half * RECORD : (half + 1) * RECORD]) for half in range(HALVES)]

    def find(self, key: str) -> Record | None:
        """Return the record of the generation with a key, or None."""
        return next((one for one in self.read_records() if one is not None and one.generation.key == key), None)

    def read_index(self, record: Record) -> tuple[list[Entry], Any]:
        """Return the entries of a generation, and what the planner noted with them."""
        return parse_index(record, bytes(self.part(record.start + record.index_start, record.index_length)))

    # --- bytes -------------------------------------------------------------------------------------------------------
    def view(self, position: int, length: int) -> torch.Tensor:
        """Return bytes of the memory as a tensor of torch.uint8, without a copy."""
        if self._bytes is None:
            import torch

            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._bytes[position : position + length]

    def part(self, position: int, length: int) -> memoryview:
        """Return bytes of the memory, to read and to write, without a copy."""
        return memoryview(self._map)[position : position + length]

    def pin(self, position: int, length: int) -> None:
        """Register bytes with CUDA, so that a GPU writes to them directly; a copy to other memory is far slower.

        Only what is used: registered pages are taken from the machine at once. A driver that refuses changes nothing
        but the time of a save.
        """
        if self._pinned.get(position, 0) >= length:
            return
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
        address = self.view(position, length).data_ptr()
        if self._pinned.pop(position, 0):
            runtime.cudaHostUnregister(address)
        if int(runtime.cudaHostRegister(address, length, 0)) == 0:
            self._pinned[position] = length
        else:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # gets the error, which else the script's next kernel would get

    # --- writing -----------------------------------------------------------------------------------------------------
    def begin(self, whole: Generation | None) -> tuple[int, int]:
        """Clear a half for a new generation, never that of the whole one; return its number and its first byte."""
        self.wait_checked()
        half = choose_half(self.read_records(), whole)
        self.clear(half)
        return half, half_of(self.size, half)[0]

    def commit(
        self,
        half: int,
        generation: Generation,
        rank: int,
        entries: list[Entry],
        planner_data: object,
        copy: Callable[[Record], object] | None = None,
    ) -> None:
        """Write the index and the record of a generation whose tensors are written, and begin to compute checksums.

        `copy` is called with the record, in a thread of its own, when the checksums are written.
        """
        start, _ = half_of(self.size, half)
        index_start = max((align(one.position + one.length) for one in entries), default=0)
        index = json.dumps([entries, planner_data]).encode()
        self.check_room(index_start + len(index))
        self.part(start + index_start, len(index))[:] = index
        record = Record(generation, rank, start, index_start, len(index), zlib.crc32(index), saved_at=time.monotonic())
        self.write_record(half, record)
        self._checking = threading.Thread(target=self._write_checks, args=(half, record, entries, copy))
        self._checking.start()

    def check_room(self, length: int) -> None:
        """Raise StateTooLargeError for what does not fit into a half."""
        if length > self.room:
            what = f"the state has {length / 1e6:,.1f} MB, and --keep-state leaves {self.room / 1e6:,.1f} MB to it"
            message = f"rank {os.environ.get('RANK', '0')}: {what}; {_ADVICE}"
            raise StateTooLargeError(message)

    def clear(self, half: int) -> None:
        """Clear the record of a half: what is in it counts no more."""
        self._map[half * RECORD : (half + 1) * RECORD] = bytes(RECORD)

    def forget(self, generation: Generation) -> None:
        """Clear the record of a generation."""
        for half, record in enumerate(self.read_records()):
            if record is not None and record.generation == generation:
                self.clear(half)

    def write_record(self, half: int, record: Record) -> None:
        """Write the record of a half whose bytes are written."""
        self._map[half * RECORD : (half + 1) * RECORD] = encode(record)

    # --- checksums ---------------------------------------------------------------------------------------------------
    def _write_checks(
        self, half: int, record: Record, entries: list[Entry], copy: Callable[[Record], object] | None
    ) -> None:
        checks = [self.compute_check(record.start + one.position, one.length) for one in entries]
        text = json.dumps(checks).encode()
        if record.length + len(text) <= self.room:
            self.part(record.start + record.length, len(text))[:] = text
            record = replace(record, checks_length=len(text), checks_check=zlib.crc32(text))
            self.write_record(half, record)
        if copy is not None:
            self.begin_copy(copy, record)

    def begin_copy(self, copy: Callable[[Record], object], record: Record) -> None:
        """Copy a generation in a daemon thread, so that a worker's end does not wait for the other node."""
        self._copying = threading.Thread(target=copy, args=(record,), daemon=True)
        self._copying.start()

    def wait_checked(self) -> None:
        """Wait until the checksums of the last generation are written, and its copy is made or has failed."""
        if self._checking is not None:
            self._checking.join()
        if self._copying is not None:
            self._copying.join()

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
        """Raise DamagedStateError if bytes are not those of their checksums.

        There are none if the worker died before they were computed; then only the index is checked. torch's own threads
        are one in a worker, so several of ours compute.
        """
        entries, _ = self.read_index(record)
        if not record.checks_length:
            return
        text = self.part(record.start + record.index_start + record.index_length, record.checks_length)
        if zlib.crc32(text) != record.checks_check:
            message = f"the checksums of rank {record.rank}'s state are damaged"
            raise DamagedStateError(message)
        with ThreadPoolExecutor(threads) as pool:
            found = list(
                pool.map(lambda entry: self.compute_check(record.start + entry.position, entry.length), entries)
            )
        for entry, check, now in zip(entries, json.loads(bytes(text)), found, strict=True):
            if now != check:
                message = f"{entry.name} of rank {record.rank}'s state is damaged"
                raise DamagedStateError(message)


def parse_index(record: Record, text: bytes) -> tuple[list[Entry], Any]:
    """Return the entries of an index and what the planner noted; raise DamagedStateError if it is damaged."""
    if zlib.crc32(text) != record.index_check:
        message = f"the index of rank {record.rank}'s state is damaged"
        raise DamagedStateError(message)
    entries, planner_data = json.loads(text)
    return [Entry(*values) for values in entries], planner_data


def align(position: int) -> int:
    """Return the next position at which a part may begin."""
    return -(-position // _ALIGNMENT) * _ALIGNMENT


class NodeMemories:
    """The memories of this worker's node: those of its workers, then those for the copies of another node's.

    The variable in which the launcher describes them is `text`: JSON.

    Raises:
        OSError: One can't be opened.
    """

    def __init__(self, text: str) -> None:
        found = json.loads(text)
        self.own: int = found["number"]  # Of this worker's memory. Not LOCAL_RANK, which --virtual-local-rank makes 0
        self.name: str = found["name"]  # Random, for this node in this job
        self.port: int = found["port"]  # Of the server of the node's state; 0 with one node
        self.rate: int = found["rate"]  # Bytes a second at which one copy is fetched at most, or 0
        self.secret = bytes.fromhex(found["secret"])  # What a client of the server has to know
        self.workers: int = found["workers"]
        self.memories = [KeptMemory(path, f"{self.name}-{number}") for number, path in enumerate(found["paths"])]

    @property
    def has_copies(self) -> bool:
        """Whether another node's state is copied to this node, and this one's to another."""
        return len(self.memories) > self.workers


#: Held while a process maps its memories: `functools.cache` may call the function in two threads at once, and each
#: would have its own lock for the halves.
_mapping = threading.Lock()


@functools.cache
def _map(text: str, pid: int) -> NodeMemories:
    del pid  # a fork maps them anew: a thread may hold the parent's
    return NodeMemories(text)


def open_memories(environment: Mapping[str, str]) -> NodeMemories | None:
    """Return the memories of this worker's node, which a process maps once; None where nothing is kept.

    Raises:
        KeptStateError: The launcher has them, and they can't be opened from here.
    """
    text = environment.get(ENV_KEPT_STATE, "")
    if not text:
        return None
    try:
        with _mapping:
            return _map(text, os.getpid())
    except OSError as error:
        message = f"the launcher's memory {error.filename} can't be opened from here: {error.strerror}"
        raise KeptStateError(message) from error
