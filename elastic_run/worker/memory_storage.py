"""A storage of torch.distributed.checkpoint in the memory of the launchers, which outlives the workers.

A save is a copy into mapped memory. A generation is loaded only if all of its ranks have it, from this node's memory or
from another's. Sharding, DTensors and another number of ranks are the work of torch.distributed.checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from functools import cache, partial
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from elastic_run.core.kept_generations import Generation, newest
from elastic_run.records import dataclass
from elastic_run.worker.kept_memory import (
    Entry,
    KeptStateError,
    copy_tensors,
    find_position,
    open_memories,
    parse_index,
    view_tensor,
)
from elastic_run.worker.kept_server import LOSSES, StateClient, copy_to, describe_loss, find_next, find_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner, WriteItem

    from elastic_run.core.kept_generations import Record
    from elastic_run.worker.kept_memory import NodeMemories
    from elastic_run.worker.kept_server import StatePlace

__all__ = ["MemoryReader", "MemoryWriter", "list_parts", "make_metadata", "say"]


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a generation. A memory of a node holds it."""

    node: str
    memory: int
    record: Record


@dataclass(frozen=True, slots=True)
class _Saver:
    """What each rank tells the coordinator of a save."""

    place: StatePlace
    memory: int
    parts: list[_Part]


@dataclass(frozen=True, slots=True)
class _Share:
    """What the coordinator of a save gives to each rank."""

    rank: int
    generation: Generation
    kept: str  # The key of the generation that stays until this one is whole, or ""
    next_node: StatePlace | None  # Where a copy goes


class MemoryWriter(StorageWriter):
    """Writes a checkpoint into the launcher's memory: a StorageWriter for `torch.distributed.checkpoint.save`.

    The checkpoint's id is its label, such as the step. All workers of the job take part in a save. Without
    `--keep-state`, and under torchrun, nothing is kept: one line says so, and the script goes on. A save raises
    torch's CheckpointException around a KeptStateError if the state is larger than its memory, if some workers take no
    part, or if another save was made since this one began.
    """

    _label = ""

    def is_kept(self) -> bool:
        """Whether the launcher keeps what is written; if not, one line of the first rank says so, once."""
        if open_memories(os.environ):
            return True
        _say_once("no state is kept: the launcher was not started with --keep-state")
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the label of the next checkpoint."""
        self._label = "" if checkpoint_id is None else str(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any id is a label, but a writer of memory has to be given: it is chosen for no id."""
        del checkpoint_id
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Say so if nothing is kept."""
        del is_coordinator, args, kwargs
        self.is_kept()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator where this rank's memory is, and what it holds."""
        node = open_memories(os.environ)
        if node is None:
            return plan
        # The checksums' thread writes the record anew: not while other ranks clear the generation before. And a copy
        # has to be whole before the generation that it is of is replaced: a save waits for the copy of the one before.
        node.memories[node.own].wait_checked()
        return dataclasses.replace(plan, storage_data=_Saver(find_place(node), node.own, list_parts(node)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the new generation, and choose the generation that stays until the new one is whole."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        node = open_memories(os.environ)
        savers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Saver)]
        if not savers:
            return plans
        memories = {(saver.place.node, saver.memory) for saver in savers}
        if not len(memories) == len(savers) == world or node is None:  # processes that a worker starts share its memory
            message = f"{len(savers)} of {world} workers save their state; all have to, on nodes with --keep-state"
            raise KeptStateError(message)
        records = [part.record for saver in savers for part in saver.parts]
        number = 1 + max((record.generation.number for record in records), default=0)
        generation = Generation(number, secrets.token_hex(8), self._label, world)
        kept = "" if (whole := newest(records)) is None else whole.key
        places = [saver.place for saver in savers]
        nexts = [find_next(places, place.node) if node.has_copies else None for place in places]
        shares = [_Share(rank, generation, kept, each) for rank, each in enumerate(nexts)]
        return [dataclasses.replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's part into its memory."""
        node = open_memories(os.environ)
        if node is not None:
            with node.memories[node.own].is_writing:
                _copy_in(node, plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, 0, None) for item in plan.items])  # only `finish` would use them
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a generation is whole when each rank's record is written."""


def _copy_in(node: NodeMemories, plan: SavePlan, planner: SavePlanner) -> None:
    """Copy all items of a plan into a half of the memory, and make the record."""
    memory, share = node.memories[node.own], plan.storage_data
    if any(each.generation.number >= share.generation.number for each in filter(None, memory.read_records())):
        remedy = "a save (async_save) has to end before the next one begins, without enable_plan_caching"
        message = f"another save was made since this one began: {remedy}"
        raise KeptStateError(message)
    contents = [planner.resolve_data(item) for item in plan.items]
    entries: list[Entry] = []
    length = 0
    for item, content in zip(plan.items, contents, strict=True):
        entries.append(_make_entry(item, content, length))
        length = entries[-1].position + entries[-1].length
    memory.check_room(length)
    start = memory.begin(share.kept)
    if torch.cuda.is_initialized() and length:  # type: ignore[no-untyped-call] # torch's
        memory.pin(start, length)
    pairs = []
    for entry, content in zip(entries, contents, strict=True):
        target = memory.part(start + entry.position, entry.length)
        if isinstance(content, BytesIO):
            target[:] = content.getbuffer()
        else:
            pairs.append((view_tensor(target, entry.dtype, entry.sizes), content.detach()))
    copy_tensors(pairs)
    for device in {content.device for _, content in pairs if content.is_cuda}:
        torch.cuda.synchronize(device)
    copy = None if share.next_node is None else partial(copy_to, share.next_node, node, share.kept)
    memory.commit(start, share.generation, share.rank, entries, plan.planner_data, copy)


def _make_entry(item: WriteItem, content: torch.Tensor | BytesIO, end: int) -> Entry:
    name, tensor = item.index.fqn, item.tensor_data
    if isinstance(content, BytesIO):
        length = len(content.getbuffer())
        return Entry(name, None, (), (), "", find_position(end, length), length)
    dtype = str(content.dtype).removeprefix("torch.")
    offsets, whole = tuple(tensor.chunk.offsets), tuple(tensor.size)  # type: ignore[union-attr] # a tensor's item has it
    position = find_position(end, content.nbytes)
    return Entry(name, offsets, tuple(content.shape), whole, dtype, position, content.nbytes)


class MemoryReader(StorageReader):
    """Reads the newest generation that is whole: a StorageReader for `torch.distributed.checkpoint.load`.

    All workers of the job make one at the same time, in their process group, since they agree on the generation then.

    Attributes:
        problems: What is damaged or out of reach, in a sentence each.
        label: The id of the checkpoint that is read; None if there is none, as in the first round of a job.
        world_size: The number of ranks that wrote it, or 0.

    Raises:
        KeptStateError: Several workers have no process group, only some nodes `--keep-state`, or a worker no access.
    """

    def __init__(self) -> None:
        self.problems: tuple[str, ...] = ()
        self.label: str | None = None
        self.world_size = 0
        node = open_memories(os.environ)
        own = [] if node is None else list_parts(node)
        gathered = _gather((None if node is None else find_place(node), own), is_needed=node is not None)
        missing = [rank for rank, (place, _) in enumerate(gathered) if place is None]
        if len(missing) == len(gathered):
            return
        if missing or node is None:
            message = f"the node of rank {missing[0]} was started without --keep-state: give it to all nodes"
            raise KeptStateError(message)
        self._node = node
        self._places: dict[str, StatePlace] = {place.node: place for place, _ in gathered}
        parts: list[_Part] = [part for _, each in gathered for part in each]
        # The newest first, so that the others' bytes need not be read.
        while (generation := newest(part.record for part in parts)) is not None:
            held = [part for part in own if part in parts and part.record.generation == generation]
            found = _find_damage(node, held)
            damage = {part: problem for each in _gather(found, is_needed=True) for part, problem in each.items()}
            if not damage:
                break
            self.problems += tuple(sorted(damage.values()))
            parts = [part for part in parts if part not in damage]
        if generation is None:
            return
        self.label, self.world_size = generation.label, generation.world_size
        parts = [part for part in parts if part.record.generation == generation]
        # This node's own last: they are read without the network.
        parts.sort(key=lambda part: part.node == node.name)
        self._parts = {part.record.rank: part for part in parts}
        self._entries: dict[MetadataIndex, tuple[_Part, Entry]] = {}
        self._clients: dict[str, StateClient] = {}
        # A restart may have come before the copy of this worker's part was complete; the next save waits for it.
        memory, to = node.memories[node.own], find_next(self._places.values(), node.name)
        record = memory.find(generation.key)
        if node.has_copies and record and to and [part.record.rank for part in parts].count(record.rank) == 1:
            memory.begin_copy(partial(copy_to, to, node, ""), record)

    validate_checkpoint_id = MemoryWriter.validate_checkpoint_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: which checkpoint is read is decided before."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds; raise KeptStateError if there is none, or later saves have replaced it."""
        del args, kwargs
        if self.label is None:
            message = "no state is kept; MemoryReader.label tells whether there is one"
            raise KeptStateError(message)
        indexes = []
        for _, part in sorted(self._parts.items()):
            record, is_here = part.record, part.node == self._node.name
            if is_here and self._node.memories[part.memory].find(record.generation.key) is None:
                message = f"later saves have replaced the state {self.label}: make a new MemoryReader"
                raise KeptStateError(message)
            entries, planner_data = parse_index(record, self._read(part, record.index_start, record.index_length))
            self._entries.update({MetadataIndex(entry.name, entry.offsets): (part, entry) for entry in entries})
            indexes.append((entries, planner_data))
        return make_metadata(indexes)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs out of the memories of this node and of others, or raise KeptStateError."""
        targets = []

        def read() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for item in plan.items:
                part, entry = self._entries[item.storage_index]
                content = self._read(part, entry.position, entry.length)
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, BytesIO(content))
                    continue
                kept = view_tensor(content, entry.dtype, entry.sizes)
                for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    kept = kept.narrow(dimension, start, length)
                targets.append((item, planner.resolve_tensor(item).detach()))
                yield targets[-1][1], kept

        copy_tensors(read())
        for item, target in targets:
            planner.commit_tensor(item, target)
        while self._clients:
            self._clients.popitem()[1].close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, part: _Part, position: int, length: int) -> memoryview:
        """Return bytes of a part: this node's memory itself, or a copy of another's."""
        record = part.record
        if part.node == self._node.name:
            return self._node.memories[part.memory].part(record.start + position, length)
        content, place = memoryview(bytearray(length)), self._places[part.node]
        try:
            if part.node not in self._clients:
                self._clients[part.node] = StateClient(place)
            self._clients[part.node].read(part.memory, record, position, content)
        except LOSSES as error:
            where = f"the node at {place.address}"
            message = f"the state of rank {record.rank} can't be read from {where}: {describe_loss(error)}"
            raise KeptStateError(message) from error
        return content


def make_metadata(indexes: Iterable[tuple[list[Entry], Any]]) -> Metadata:
    """Return what a checkpoint holds, from the entries and planner's notes of all its ranks."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    mappings: dict[str, tuple[str | int, ...]] = {}
    for entries, planner_data in indexes:
        mappings.update({name: tuple(path) for name, path in (planner_data or {}).items()})
        for entry in entries:
            if entry.offsets is None:
                tensors[entry.name] = BytesStorageMetadata()
                continue
            if entry.name not in tensors:
                properties = TensorProperties(dtype=getattr(torch, entry.dtype))
                tensors[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.whole), [])
            chunk = ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes))
            tensors[entry.name].chunks.append(chunk)  # type: ignore[union-attr] # a name is a tensor's or an object's
    return Metadata(tensors, planner_data=mappings or None)


def list_parts(node: NodeMemories) -> list[_Part]:
    """Return what this worker's memory holds, and the memory for copies that it speaks for."""
    return [
        _Part(node.name, number, record)
        for number, memory in enumerate(node.memories)
        if number % node.workers == node.own
        for record in memory.read_records()
        if record is not None
    ]


def _find_damage(node: NodeMemories, parts: list[_Part]) -> dict[_Part, str]:
    """Forget damaged parts, which the next save would keep instead of sound ones; return them with a sentence each."""
    problems = {}
    for part in parts:
        try:
            node.memories[part.memory].verify(part.record)
        except KeptStateError as error:
            node.memories[part.memory].write_record(part.record.start, None)
            problems[part] = f"generation {part.record.generation.label or part.record.generation.number}: {error}"
    return problems


def _gather(own: Any, *, is_needed: bool) -> list[Any]:
    """Return what each rank has given; alone without a process group, unless the others' is needed."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if not (dist.is_available() and dist.is_initialized()):
        if world > 1 and is_needed:
            message = f"{world} workers have to agree on the state to load: make a process group before"
            raise KeptStateError(message)
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def say(line: str) -> None:
    """Write a line for the user, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"elastic-run: {line}\n")


_say_once = cache(say)
