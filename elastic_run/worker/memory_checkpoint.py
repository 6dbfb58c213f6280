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
import functools
import math
import os
import secrets
import socket
import sys
from io import BytesIO
from multiprocessing import AuthenticationError
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
from elastic_run.worker.kept_memory import Entry, KeptStateError, StateTooLargeError, align, open_memories, parse_index
from elastic_run.worker.kept_server import StateClient, StatePlace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner, WriteItem

    from elastic_run.core.kept_generations import Record
    from elastic_run.worker.kept_memory import NodeMemories

__all__ = ["MemoryReader", "MemoryWriter", "say"]

#: Threads of a worker that compare checksums: a few read as fast as the memory gives.
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """The state of one rank in one memory.

    Args:
        node: The name of the node's memories.
        memory: The number of the memory.
        record: Its record there.
    """

    node: str
    memory: int
    record: Record


@dataclass(frozen=True, slots=True)
class _Share:
    """What the coordinator of a save gives to each rank.

    Args:
        rank: Of the rank.
        generation: The one that is written.
        whole: The one that stays until this one is whole, or None.
        next_node: Where a copy goes, or None.
    """

    rank: int
    generation: Generation
    whole: Generation | None
    next_node: StatePlace | None


@dataclass(frozen=True, slots=True)
class _Saver:
    """What each rank tells the coordinator of a save: its node, its memory, and what the node's memories hold."""

    place: StatePlace
    memory: int
    records: tuple[Record, ...]


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
        node = open_memories(os.environ)
        if node is None:
            return plan
        # The checksums' thread writes the record anew: not while other ranks clear the generation before. And a copy
        # has to be whole before the generation that it is of is replaced: a save waits for the copy of the one before.
        node.memories[node.own].wait_checked()
        records = tuple(part.record for part in _list_parts(node))
        return _with_storage(plan, _Saver(_place(node), node.own, records))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the generation, and name the one that stays until this one is whole.

        Raises:
            KeptStateError: Not all workers of the job take part, or several have the same memory.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        node = open_memories(os.environ)
        if node is None:
            return plans
        if len(plans) != world:
            message = f"{len(plans)} of {world} workers save their state; all have to"
            raise KeptStateError(message)
        savers: list[_Saver] = [plan.storage_data for plan in plans]
        if len({(saver.place.node, saver.memory) for saver in savers}) != len(plans):
            message = "several workers have the same memory: --keep-state is not for those that a worker has started"
            raise KeptStateError(message)
        records = [record for saver in savers for record in saver.records]
        number = 1 + max((record.generation.number for record in records), default=0)
        generation = Generation(number, secrets.token_hex(8), self._label, len(plans))
        places = list({saver.place.node: saver.place for saver in savers}.values())
        following = dict(zip((place.node for place in places), (*places[1:], places[0]), strict=True))
        is_copied = node.has_copies and len(places) > 1
        whole = newest(records)
        return [
            _with_storage(plan, _Share(rank, generation, whole, following[saver.place.node] if is_copied else None))
            for rank, (plan, saver) in enumerate(zip(plans, savers, strict=True))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's part into its memory.

        Raises:
            KeptStateError: The state is larger than its memory, another save was made since this one began, or the
                planner reuses the plan of another save.
        """
        future: Future[list[WriteResult]] = Future()
        node = open_memories(os.environ)
        if node is None:
            future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
            return future
        share: _Share = plan.storage_data
        memory = node.memories[node.own]
        with memory.is_writing:
            if any(each.generation.number >= share.generation.number for each in filter(None, memory.read_records())):
                message = (
                    "another save was made since this one began: a save (async_save) has to end before the next one "
                    "begins, and the planner must not reuse plans (enable_plan_caching)"
                )
                raise KeptStateError(message)
            try:
                entries = _copy_in(node, share, plan, planner)
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
        problems: What is damaged or out of reach, in a sentence each.
        label: The id of the checkpoint that is read; None if there is none, as in the first round of a job.
        world_size: The number of ranks that wrote it, or 0.

    Raises:
        KeptStateError: There are several workers and no process group; or the launcher's memory can't be opened.
    """

    def __init__(self) -> None:
        self._node = node = open_memories(os.environ)
        own = [] if node is None else _list_parts(node)
        gathered = _gather((None if node is None else _place(node), own), is_needed=node is not None)
        self._nodes: dict[str, StatePlace] = {place.node: place for place, _ in gathered if place is not None}
        parts: list[_Part] = [part for _, each in gathered for part in each]
        problems: dict[_Part, str] = {}
        # The newest first, so that the others' bytes need not be read.
        while (generation := newest(part.record for part in parts)) is not None:
            found = {} if node is None else _find_damage(node, own, generation)
            damage = {part: problem for each in _gather(found, is_needed=True) for part, problem in each.items()}
            if not damage:
                break
            problems.update(damage)
            parts = [part for part in parts if part not in damage]
            own = [part for part in own if part not in damage]
            for part in found:  # else the next save would keep it instead of a sound one
                node.memories[part.memory].forget(generation)  # type: ignore[union-attr] # found in it
        self.problems = tuple(sorted(problems.values()))
        self.label = None if generation is None else generation.label
        self.world_size = 0 if generation is None else generation.world_size
        # This node's own last: they are read without the network.
        parts.sort(key=lambda part: node is not None and part.node == node.name)
        self._parts = {part.record.rank: part for part in parts if part.record.generation == generation}
        self._places: dict[MetadataIndex, tuple[_Part, Entry]] = {}
        self._clients: dict[str, StateClient] = {}

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
        indexes = [(part, *self._read_index(part)) for _, part in sorted(self._parts.items())]
        self._places = {
            MetadataIndex(entry.name, entry.offsets): (part, entry) for part, entries, _ in indexes for entry in entries
        }
        metadata = make_metadata((entries, planner_data) for _, entries, planner_data in indexes)
        metadata.storage_data = self._places
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what this rank needs out of the memories of this node and of others.

        Raises:
            KeptStateError: Another node can't be reached, or its state was replaced.
        """
        for item in plan.items:
            part, entry = self._places[item.storage_index]
            raw = self._read(part, entry.position, entry.length)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, BytesIO(raw.numpy().tobytes()))
                continue
            kept = raw.view(getattr(torch, entry.dtype)).view(entry.sizes)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                kept = kept.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(kept)
            planner.commit_tensor(item, target)
        while self._clients:
            self._clients.popitem()[1].close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_index(self, part: _Part) -> tuple[list[Entry], Any]:
        raw = self._read(part, part.record.index_start, part.record.index_length)
        return parse_index(part.record, raw.numpy().tobytes())

    def _read(self, part: _Part, position: int, length: int) -> torch.Tensor:
        """Return bytes of a part as a tensor of torch.uint8: a view of this node's memory, or a copy of another's."""
        node, record = self._node, part.record
        if node is not None and part.node == node.name:
            memory = node.memories[part.memory]
            if memory.find(record.generation.key) is None:
                message = f"later saves have replaced the state {self.label}: make a new MemoryReader"
                raise KeptStateError(message)
            return memory.view(record.start + position, length)
        content = bytearray(length)
        place = self._nodes[part.node]
        try:
            if part.node not in self._clients:
                self._clients[part.node] = StateClient(place)
            self._clients[part.node].read(part.memory, record, position, memoryview(content))
        except (OSError, EOFError, AuthenticationError, KeptStateError) as error:
            reason = str(error) or "the connection ended"
            message = f"the state of rank {record.rank} can't be read from the node at {place.address}: {reason}"
            raise KeptStateError(message) from error
        return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


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
            chunk = ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes))
            known = tensors.get(entry.name)
            if isinstance(known, TensorStorageMetadata):
                known.chunks.append(chunk)
            else:
                properties = TensorProperties(dtype=getattr(torch, entry.dtype))
                tensors[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.whole), [chunk])
    return Metadata(tensors, planner_data=mappings or None)


# --- this node's memories --------------------------------------------------------------------------------------------
def _place(node: NodeMemories) -> StatePlace:
    """Return where the state of this node is served."""
    return StatePlace(node.name, _find_address() if node.port else "", node.port, node.secret)


def _find_address() -> str:
    """Return the address by which this node reaches the workers' store: others reach this node there."""
    place = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(*place[:3]) as unused:
        unused.connect(place[4])  # sends nothing
        return str(unused.getsockname()[0])


def _list_parts(node: NodeMemories) -> list[_Part]:
    """Return what this worker's memory holds; the first worker of a node speaks for memories without a worker too."""
    workers = _local_world_size()
    return [
        _Part(node.name, number, record)
        for number, memory in enumerate(node.memories)
        if number == node.own or (node.own == 0 and number >= workers)
        for record in memory.read_records()
        if record is not None
    ]


def _find_damage(node: NodeMemories, parts: list[_Part], generation: Generation) -> dict[_Part, str]:
    """Return the damaged parts of a generation, with a sentence each."""
    problems = {}
    threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // _local_world_size()))
    for part in parts:
        if part.record.generation == generation:
            try:
                node.memories[part.memory].verify(part.record, threads)
            except KeptStateError as error:
                problems[part] = f"generation {generation.label or generation.number}: {error}"
    return problems


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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


# --- copies ----------------------------------------------------------------------------------------------------------
def _copy_in(node: NodeMemories, share: _Share, plan: SavePlan, planner: SavePlanner) -> list[Entry]:
    """Copy all items of a plan into a half of the memory, and make the record."""
    memory = node.memories[node.own]
    half, start = memory.begin(share.whole)
    length_of_tensors = sum(align(_count_bytes(item)) for item in plan.items)
    memory.check_room(length_of_tensors)
    if torch.cuda.is_initialized() and length_of_tensors:  # type: ignore[no-untyped-call] # torch's
        memory.pin(start, length_of_tensors)
    entries: list[Entry] = []
    position, devices = 0, set()
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            tensor = data.detach()
            length = tensor.numel() * tensor.element_size()
            if length:
                if tensor.is_cuda:
                    devices.add(tensor.device)
                target = memory.view(start + position, length).view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor, non_blocking=tensor.is_cuda)
        else:
            content = data.getbuffer()
            length = len(content)
            memory.check_room(position + length)
            memory.write(start + position, content)
        entries.append(_make_entry(item, data, position, length))
        position += align(length)
    for device in devices:
        torch.cuda.synchronize(device)
    copy = None if share.next_node is None else functools.partial(_copy_to, node, share.next_node, share)
    memory.commit(half, share.generation, share.rank, entries, plan.planner_data, copy)
    return entries


def _copy_to(node: NodeMemories, next_node: StatePlace, share: _Share, record: Record) -> None:
    """Have a generation copied to the next node; a line says so if it can't be."""
    kept = "" if share.whole is None else share.whole.key
    try:
        client = StateClient(dataclasses.replace(_place(node), address="localhost"), is_patient=True)
        try:
            client.copy(node.own, record, kept, next_node)
        finally:
            client.close()
    except (OSError, EOFError, AuthenticationError, KeptStateError) as error:
        reason = str(error) or "the server of this node's state has ended"
        label = share.generation.label or share.generation.number
        line = f"elastic-run: kept state: rank {share.rank} has no copy of {label} on another node: {reason}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - it is for the console


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
