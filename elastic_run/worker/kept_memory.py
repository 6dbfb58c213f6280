"""The memories in which the workers of this node keep their state: mapped, written and checked.

The launcher owns them (`--keep-state`). They have no name in any file system: a worker opens them as files of the
launcher's process, whose paths are in ELASTIC_RUN_KEPT_STATE, and they are gone when the launcher and its workers are.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import functools
import io
import itertools
import json
import mmap
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from elastic_run.contract import ENV_KEPT_STATE
from elastic_run.core.kept_generations import HALVES, HEADER, RECORD, Record, choose_half, decode, encode, half_of
from elastic_run.records import replace
from elastic_run.worker.place import WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    import torch

    from elastic_run.core.kept_generations import Generation

    Copy = Callable[[Record], object] | None

#: A checksum is computed at memory speed. The bytes are cut into blocks of this many words, and the eight-byte words of
#: each block are added up. The checksum is the CRC-32 of these sums and of the bytes that do not fill a block.
_BLOCK = 1 << 14
#: Bytes of a tensor from which on it is worth a thread to copy it.
_LARGE = 1 << 20
#: A large tensor begins in the middle of a page. In torch's memory it begins near a page's first byte, and where source
#: and target begin at almost the same byte of a page, the C library takes three times as long from 200 MB on.
_PAGE = 4096


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
    """One memory, mapped: the file `path` of the launcher's process, to which it has given a name."""

    def __init__(self, path: str, name: str) -> None:
        # Before it is opened: in another pid namespace, the path may be that of any file of a stranger.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            raise OSError(errno.ESTALE, "it is another file there", path)
        with io.FileIO(path, "r+") as file:
            self.size = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), self.size)
        self.room = half_of(self.size, 1)[0] - half_of(self.size, 0)[0]
        self._checking: threading.Thread | None = None
        self._copying: threading.Thread | None = None
        #: Bytes that are registered with CUDA, by their first one.
        self._pinned: dict[int, int] = {}
        #: Held while a half is written: torch.distributed.checkpoint.async_save lets saves overlap.
        self.is_writing = threading.Lock()

    def read_records(self) -> list[Record | None]:
        """Return the records of both halves, None where there is none or a damaged one."""
        return [decode(self._map[half * RECORD : (half + 1) * RECORD]) for half in range(HALVES)]

    def find(self, key: str) -> Record | None:
        """Return the record of the generation with a key, or None."""
        return next((one for one in self.read_records() if one is not None and one.generation.key == key), None)

    def part(self, position: int, length: int) -> memoryview:
        """Return bytes of the memory, to read and to write, without a copy."""
        return memoryview(self._map)[position : position + length]

    def pin(self, position: int, length: int) -> None:
        """Register bytes with CUDA, so that a GPU writes to them directly; a copy to other memory is far slower."""
        # Only what is used: registered pages are taken from the machine at once.
        if self._pinned.get(position, 0) >= length:
            return
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
        address = view_tensor(self.part(position, length), "uint8", (length,)).data_ptr()
        if self._pinned.pop(position, 0):
            runtime.cudaHostUnregister(address)
        if int(runtime.cudaHostRegister(address, length, 0)) == 0:
            self._pinned[position] = length
        else:  # which changes nothing but the time of a save
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # gets the error, which else the script's next kernel would get

    def begin(self, kept: str) -> int:
        """Clear a half for a new generation, never that of the one with the key `kept`; return its first byte."""
        self.wait_checked()
        start, _ = half_of(self.size, choose_half(self.read_records(), kept))
        self.write_record(start, None)
        return start

    def commit(
        self, start: int, generation: Generation, rank: int, entries: list[Entry], notes: object, copy: Copy = None
    ) -> None:
        """Write index and record of a generation whose tensors are written; its checksum and copy follow in threads."""
        index_start = align(max((one.position + one.length for one in entries), default=0), 64)
        index = json.dumps([entries, notes]).encode()
        self.check_room(index_start + len(index))
        self.part(start + index_start, len(index))[:] = index
        record = Record(generation, rank, start, index_start, len(index), zlib.crc32(index), saved_at=time.monotonic())
        self.write_record(start, record)
        self._checking = threading.Thread(target=self._write_check, args=(record, copy))
        self._checking.start()

    def check_room(self, length: int) -> None:
        """Raise StateTooLargeError for what does not fit into a half."""
        if length > self.room:
            what = f"the state has {length / 1e6:,.1f} MB, and --keep-state leaves {self.room / 1e6:,.1f} MB to it"
            why = "its SIZE is divided among this node's workers, and each keeps two generations"
            message = f"rank {os.environ.get('RANK', '0')}: {what}; {why}"
            raise StateTooLargeError(message)

    def write_record(self, start: int, record: Record | None) -> None:
        """Write the record of a half whose bytes are written, or clear it."""
        place = (start - HEADER) // self.room * RECORD
        self._map[place : place + RECORD] = bytes(RECORD) if record is None else encode(record)

    def _write_check(self, record: Record, copy: Copy) -> None:
        record = replace(record, check=self._compute_check(record))
        self.write_record(record.start, record)
        self.begin_copy(copy, record)

    def begin_copy(self, copy: Copy, record: Record) -> None:
        """Copy a generation in a daemon thread, so that a worker's end does not wait for the other node."""
        if copy is not None:
            self._copying = threading.Thread(target=copy, args=(record,), daemon=True)
            self._copying.start()

    def wait_checked(self) -> None:
        """Wait until the checksum of the last generation is written, and its copy is made or has failed."""
        if self._checking is not None:
            self._checking.join()
        if self._copying is not None:
            self._copying.join()

    def verify(self, record: Record) -> None:
        """Raise DamagedStateError if bytes are not those that were written."""
        import torch

        parse_index(record, self.part(record.start + record.index_start, record.index_length))
        if record.check is None:  # the worker died before it was computed
            return
        # Threads of ours beside several of torch's take 1.6 times as long.
        if self._compute_check(record, 1 if torch.get_num_threads() > 1 else _count_threads()) != record.check:
            message = f"the state of rank {record.rank} is damaged"
            raise DamagedStateError(message)

    def _compute_check(self, record: Record, threads: int = 1) -> int:
        content = self.part(record.start, record.index_start)
        count = len(content) // (8 * _BLOCK)
        rest = content[8 * _BLOCK * count :]
        blocks = view_tensor(content[: len(content) - len(rest)], "int64", (count, _BLOCK))
        first, *others = blocks.chunk(threads)
        with ThreadPoolExecutor(threads) as pool:
            later = pool.map(_add_up, others)
            sums = [*_add_up(first), *itertools.chain.from_iterable(later)]
        return zlib.crc32(rest, zlib.crc32(array.array("q", sums)))


def _add_up(blocks: torch.Tensor) -> list[int]:
    return blocks.sum(1).tolist()


def find_position(position: int, length: int) -> int:
    """Return the next position at which a part of this length may begin: 64 is more than any type of torch needs."""
    return align(position, 64) if length < _LARGE else align(position - _PAGE // 2, _PAGE) + _PAGE // 2


def align(position: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-position // unit) * unit


def view_tensor(content: memoryview, dtype: str, sizes: Sequence[int]) -> torch.Tensor:
    """Return bytes as a tensor, without a copy."""
    import torch

    kind, shape = getattr(torch, dtype), torch.Size(sizes)
    return torch.frombuffer(content, dtype=kind).view(shape) if content else torch.empty(shape, dtype=kind)


def copy_tensors(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first one; from a GPU, the copies may end later."""
    with ThreadPoolExecutor(_count_threads()) as pool:
        for target, source in pairs:
            are_alike = target.dtype == source.dtype and target.shape == source.shape
            if not (are_alike and _is_plain(target) and _is_plain(source)):
                target.copy_(source, non_blocking=source.is_cuda)
            elif source.nbytes < _LARGE:
                _move(target, source)
            else:
                pool.submit(_move, target, source)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be copied as bytes: contiguous, in the host's memory, and no conjugate view."""
    import torch

    is_own = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous()
    return is_own and not (tensor.is_conj() or tensor.is_neg())


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    # This is faster than Tensor.copy_: it takes 0.9 of the time, and half of it from 100 MB on, where the C library
    # writes without reading the target.
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _count_threads() -> int:
    """Return this worker's share of the processors; four threads read as fast as the memory gives."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def parse_index(record: Record, text: memoryview) -> tuple[list[Entry], Any]:
    """Return the entries of an index and what the planner noted; raise DamagedStateError if it is damaged."""
    if zlib.crc32(text) != record.index_check:
        message = f"the index of rank {record.rank}'s state is damaged"
        raise DamagedStateError(message)
    entries, planner_data = json.loads(bytes(text))
    return [Entry(*values) for values in entries], planner_data


class NodeMemories:
    """The memories of this worker's node: those of its workers, then those for the copies of another node's."""

    def __init__(self, text: str) -> None:
        found = json.loads(text)
        self.own: int = found["number"]  # Of this worker's memory. Not LOCAL_RANK, which --virtual-local-rank makes 0
        self.name: str = found["name"]  # Random, for this node in this job
        self.port: int = found["port"]  # Of the server of the node's state; 0 with one node
        self.rate: int = found["rate"]  # Bytes a second at which one copy is fetched at most, or 0
        self.secret: str = found["secret"]  # What a client of the server has to know
        self.workers: int = found["workers"]
        self.memories = [KeptMemory(path, f"{self.name}-{number}") for number, path in enumerate(found["paths"])]
        # Whether another node's state is copied to this node, and this one's to another.
        self.has_copies = len(self.memories) > self.workers


#: Held while a process maps its memories, since `functools.cache` may call a function in two threads at once.
_mapping = threading.Lock()


@functools.cache
def _map(text: str, pid: int) -> NodeMemories:
    del pid  # a fork maps them anew: a thread may hold the parent's
    return NodeMemories(text)


def open_memories(environment: Mapping[str, str]) -> NodeMemories | None:
    """Return the memories of this worker's node, which a process maps once; None where nothing is kept."""
    text = environment.get(ENV_KEPT_STATE, "")
    if not text:
        return None
    try:
        with _mapping:
            return _map(text, os.getpid())
    except OSError as error:
        message = f"the launcher's memory {error.filename} can't be opened from here: {error.strerror}"
        raise KeptStateError(message) from error
