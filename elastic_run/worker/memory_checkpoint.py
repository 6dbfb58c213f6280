"""Checkpoints of torch.distributed.checkpoint in the launcher's memory, which outlives the workers.

    dcp.save(state, checkpoint_id=step, storage_writer=MemoryWriter())
    reader = MemoryReader()
    if reader.label:
        dcp.load(state, storage_reader=reader)

A save is a copy into memory that is mapped, so that it takes as long as a copy does. Sharding, DTensors and another
number of ranks are the work of torch.distributed.checkpoint. A generation is loaded only if all of its ranks have it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import sys
from io import BytesIO
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from elastic_run.core.kept_generations import Generation, newest
from elastic_run.records import dataclass
from elastic_run.worker.kept_memory import Entry, KeptStateError, StateTooLargeError, align, open_memories, own_number

if TYPE_CHECKING:
    from typing import Any

    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner, WriteItem

    from elastic_run.core.kept_generations import Record
    from elastic_run.worker.kept_memory import KeptMemory

__all__ = ["MemoryReader", "MemoryWriter", "say"]

#: Threads of a worker that compare checksums: a few read as fast as the memory gives.
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """The state of one rank in one of this node's memories.

    Args:
        memory: The number of the memory.
        record: Its record there.
    """

    memory: int
    record: Record


@dataclass(frozen=True, slots=True)
class _Share:
    """What the coordinator of a save gives to each rank: the generation that is written, and the one that stays."""

    rank: int
    generation: Generation
    whole: Generation | None


class MemoryWriter(StorageWriter):
    """Writes a checkpoint into the launcher's memory: a StorageWriter for `torch.distributed.checkpoint.save`.

    The checkpoint's id is its label, such as the step. All workers of the job take part in a save. Without
    `--keep-state`, and under torchrun, nothing is kept: one line says so, and the script goes on.
    """

    def __init__(self) -> None:
        self._label = ""
        self._is_told = False

    def is_kept(self) -> bool:
        """Whether the launcher keeps what is written; if not, one line of the first rank says so, once."""
        if open_memories(os.environ):
            return True
        if not self._is_told:
            say("no state is kept: the launcher was not started with --keep-state")
            self._is_told = True
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the label of the next checkpoint."""
        self._label = "" if checkpoint_id is None else str(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's interface
        """Any id is a label, but a writer of memory has to be given: it is chosen for no id."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - torch's interface
        """Say so if nothing is kept."""
        self.is_kept()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator which memory is this rank's, and which generations this node's memories hold."""
        if memory := _own_memory():
            # The checksums' thread writes the record anew: not while other ranks clear the generation before.
            memory.wait_checked()
        return _with_storage(plan, (own_number(os.environ), [part.record for part in _list_parts()]))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the generation, and name the one that stays until this one is whole.

        Raises:
            KeptStateError: Not all workers of the job take part, or several have the same memory.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if len(plans) != world and open_memories(os.environ):
            message = f"{len(plans)} of {world} workers save their state; all have to"
            raise KeptStateError(message)
        if len({plan.storage_data[0] for plan in plans}) != len(plans) and open_memories(os.environ):
            message = "several workers have the same memory: --keep-state is not for those that a worker has started"
            raise KeptStateError(message)
        records = [record for plan in plans for record in plan.storage_data[1]]
        number = 1 + max((record.generation.number for record in records), default=0)
        generation = Generation(number, secrets.token_hex(8), self._label, len(plans))
        whole = newest(records)
        return [_with_storage(plan, _Share(rank, generation, whole)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's part into its memory.

        Raises:
            KeptStateError: The state is larger than its memory, another save was made since this one began, or the
                planner reuses the plan of another save.
        """
        future: Future[list[WriteResult]] = Future()
        memory = _own_memory()
        if memory is None:
            future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
            return future
        share: _Share = plan.storage_data
        with memory.is_writing:
            if any(each.generation.number >= share.generation.number for each in filter(None, memory.read_records())):
                message = (
                    "another save was made since this one began: a save (async_save) has to end before the next one "
                    "begins, and the planner must not reuse plans (enable_plan_caching)"
                )
                raise KeptStateError(message)
            try:
                entries = _copy_in(memory, share, plan, planner)
            except StateTooLargeError as error:
                message = f"rank {share.rank}: {error}; {_ADVICE}"
                raise StateTooLargeError(message) from error
        results = zip(plan.items, entries, strict=True)
        future.set_result([WriteResult(item.index, entry.length, share.rank) for item, entry in results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a generation is whole when each rank's record is written."""


def say(line: str) -> None:
    """Write a line for the user, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"elastic-run: {line}", file=sys.stderr, flush=True)  # noqa: T201 - it is for the console


_ADVICE = "--keep-state=SIZE is divided among this node's workers, and each keeps two generations"


class MemoryReader(StorageReader):
    """Reads the newest generation that is whole: a StorageReader for `torch.distributed.checkpoint.load`.

    All workers of the job make one at the same time, since they agree on the generation then; so a process group has to
    be there before, if there are several workers.

    Attributes:
        label: The id of the checkpoint that is read; None if there is none, as in the first round of a job.
        world_size: The number of ranks that wrote it, or 0.

    Raises:
        KeptStateError: There are several workers and no process group; or the launcher's memory can't be opened.
    """

    def __init__(self) -> None:
        own = _list_parts()
        parts = [part for each in _gather(own) for part in each]
        problems: set[str] = set()
        # The newest first, so that the others' bytes need not be read.
        while (generation := newest(part.record for part in parts)) is not None:
            damage = {problem for each in _gather(_find_damage(own, generation)) for problem in each}
            if not damage:
                break
            problems |= damage
            parts = [part for part in parts if part.record.generation != generation]
            for part in own:
                _memories()[part.memory].forget(generation)  # else the next save would keep it instead of a sound one
        self.problems = tuple(sorted(problems))
        self.label = None if generation is None else generation.label
        self.world_size = 0 if generation is None else generation.world_size
        self._parts = {part.record.rank: part for part in parts if part.record.generation == generation}
        self._places: dict[MetadataIndex, tuple[_Part, Entry]] = {}

    @property
    def ranks(self) -> list[int]:
        """The ranks that wrote the checkpoint."""
        return sorted(self._parts)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: which checkpoint is read is decided before."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's interface
        """See `MemoryWriter.validate_checkpoint_id`."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch's interface
        """Return what the checkpoint holds.

        Raises:
            KeptStateError: There is none, or later saves have replaced it.
        """
        if self.label is None:
            message = "no state is kept; MemoryReader.label tells whether there is one"
            raise KeptStateError(message)
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        mappings: dict[str, tuple[str | int, ...]] = {}
        for _, part in sorted(self._parts.items()):
            memory = _memories()[part.memory]
            if memory.find(part.record.generation) is None:
                message = f"later saves have replaced the state {self.label}: make a new MemoryReader"
                raise KeptStateError(message)
            entries, planner_data = memory.read_index(part.record)
            mappings.update({name: tuple(path) for name, path in (planner_data or {}).items()})
            for entry in entries:
                self._places[MetadataIndex(entry.name, entry.offsets)] = (part, entry)
                if entry.offsets is None:
                    tensors[entry.name] = BytesStorageMetadata()
                    continue
                chunk = ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes))
                known = tensors.get(entry.name)
                if isinstance(known, TensorStorageMetadata):
                    known.chunks.append(chunk)
                else:
                    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
                    tensors[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.whole), [chunk])
        return Metadata(tensors, planner_data=mappings or None, storage_data=self._places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs out of the memories."""
        for item in plan.items:
            part, entry = self._places[item.storage_index]
            memory = _memories()[part.memory]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, BytesIO(memory.read(entry.position, entry.length)))
                continue
            raw = memory.view(entry.position, entry.length)
            kept = raw.view(getattr(torch, entry.dtype)).view(entry.sizes)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                kept = kept.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(kept)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


# --- this node's memories --------------------------------------------------------------------------------------------
def _memories() -> list[KeptMemory]:
    return open_memories(os.environ)


def _own_memory() -> KeptMemory | None:
    memories = _memories()
    return memories[own_number(os.environ)] if memories else None


def _list_parts() -> list[_Part]:
    """Return what this worker's memory holds; the first worker of a node speaks for memories without a worker too."""
    memories, own, workers = _memories(), own_number(os.environ), _local_world_size()
    return [
        _Part(number, record)
        for number, memory in enumerate(memories)
        if number == own or (own == 0 and number >= workers)
        for record in memory.read_records()
        if record is not None
    ]


def _find_damage(parts: list[_Part], generation: Generation) -> list[str]:
    """Return what is damaged of a generation."""
    problems = []
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // _local_world_size()))
    for part in parts:
        if part.record.generation == generation:
            try:
                _memories()[part.memory].verify(part.record, threads)
            except KeptStateError as error:
                problems.append(f"generation {generation.label or generation.number}: {error}")
    return problems


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _gather(own: Any) -> list[Any]:
    """Return what each rank has given."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not (dist.is_available() and dist.is_initialized()):
        if world > 1 and _memories():
            message = f"{world} workers have to agree on the state to load: make a process group before"
            raise KeptStateError(message)
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


# --- copies ----------------------------------------------------------------------------------------------------------
def _copy_in(memory: KeptMemory, share: _Share, plan: SavePlan, planner: SavePlanner) -> list[Entry]:
    """Copy all items of a plan into a half of the memory, and make the record."""
    half, start = memory.begin(share.whole)
    memory.check_room(half, sum(align(_count_bytes(item)) for item in plan.items))
    entries: list[Entry] = []
    position, devices = start, set()
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            tensor = data.detach()
            length = tensor.numel() * tensor.element_size()
            if length:
                if tensor.is_cuda:
                    devices.add(tensor.device)
                target = memory.view(position, length).view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor, non_blocking=tensor.is_cuda)
        else:
            content = data.getbuffer()
            length = len(content)
            memory.check_room(half, position - start + length)
            memory.write(position, content)
        entries.append(_make_entry(item, data, position, length))
        position += align(length)
    for device in devices:
        torch.cuda.synchronize(device)
    memory.commit(half, share.generation, share.rank, entries, plan.planner_data)
    return entries


def _count_bytes(item: WriteItem) -> int:
    """Return the bytes of an item's tensor; objects have theirs when they are resolved."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _make_entry(item: WriteItem, data: torch.Tensor | BytesIO, position: int, length: int) -> Entry:
    if item.tensor_data is None or not isinstance(data, torch.Tensor):
        return Entry(item.index.fqn, None, (), (), "", position, length)
    dtype = str(data.dtype).removeprefix("torch.")
    whole = tuple(item.tensor_data.size)
    return Entry(
        item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(data.shape), whole, dtype, position, length
    )


def _with_storage(plan: SavePlan, storage_data: object) -> SavePlan:
    return dataclasses.replace(plan, storage_data=storage_data)
