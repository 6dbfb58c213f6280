"""Reads a checkpoint of torch.distributed.checkpoint from the memory of the launchers, this node's and the others'.

    reader = MemoryReader()
    if reader.label:
        dcp.load(state, storage_reader=reader)

A generation is loaded only if all of its ranks have it; `elastic_run.worker.memory_writer` writes them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from elastic_run.core.kept_generations import newest
from elastic_run.records import dataclass
from elastic_run.worker.kept_memory import KeptStateError, open_memories, parse_index
from elastic_run.worker.kept_server import LOSSES, StateClient, StatePlace, describe_loss

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from torch.distributed.checkpoint.planner import LoadPlanner

    from elastic_run.core.kept_generations import Generation, Record
    from elastic_run.worker.kept_memory import Entry, NodeMemories

__all__ = ["MemoryReader", "copy_to", "find_next", "find_place", "list_parts", "make_metadata", "say"]

#: Threads of a worker that compare checksums: a few read as fast as the memory gives.
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """The state of one rank in one memory."""

    node: str  # The name of the node's memories
    memory: int
    record: Record  # In this memory


class MemoryReader(StorageReader):
    """Reads the newest generation that is whole: a StorageReader for `torch.distributed.checkpoint.load`.

    All workers of the job make one at the same time, since they agree on the generation then; so a process group has to
    be there before, if there are several workers.

    Attributes:
        problems: What is damaged or out of reach, in a sentence each.
        label: The id of the checkpoint that is read; None if there is none, as in the first round of a job.
        world_size: The number of ranks that wrote it, or 0.

    Raises:
        KeptStateError: There are several workers and no process group; or only some nodes have `--keep-state`; or the
            launcher's memory can't be opened.
    """

    def __init__(self) -> None:
        self._node = node = open_memories(os.environ)
        own = [] if node is None else list_parts(node)
        gathered = _gather((None if node is None else find_place(node), own), is_needed=node is not None)
        missing = [rank for rank, (place, _) in enumerate(gathered) if place is None]
        if 0 < len(missing) < len(gathered):
            message = f"the node of rank {missing[0]} was started without --keep-state: give it to all nodes"
            raise KeptStateError(message)
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
        if node is not None and node.has_copies and generation is not None:
            self._copy_alone(node, generation, [part for part in parts if part.record.generation == generation])
        self._clients: dict[str, StateClient] = {}

    def _copy_alone(self, node: NodeMemories, generation: Generation, parts: list[_Part]) -> None:
        """Begin to copy this worker's part of a generation if the restart came before its copy was complete.

        The next save waits for it: before the generation before, which has copies, is replaced.
        """
        record, to = node.memories[node.own].find(generation.key), find_next(self._nodes.values(), node.name)
        if record is not None and to is not None and [part.record.rank for part in parts].count(record.rank) == 1:
            node.memories[node.own].begin_copy(functools.partial(copy_to, to, node, ""), record)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: which checkpoint is read is decided before."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See `MemoryWriter.validate_checkpoint_id`."""
        del checkpoint_id
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds.

        Raises:
            KeptStateError: There is none, or later saves have replaced it.
        """
        del args, kwargs
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
        except LOSSES as error:
            where = f"the node at {place.address}"
            message = f"the state of rank {record.rank} can't be read from {where}: {describe_loss(error)}"
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
def find_place(node: NodeMemories) -> StatePlace:
    """Return where the state of this node is served."""
    address = _find_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) if node.port else ""
    return StatePlace(node.name, address, node.port, node.secret)


@functools.cache  # each save needs it, and a name server may be slow
def _find_address(host: str, port: int) -> str:
    """Return the address by which this node reaches the workers' store: others reach this node there."""
    place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(*place[:3]) as unused:
        unused.connect(place[4])  # sends nothing
        address = str(unused.getsockname()[0])
    # The store's own node: Debian gives a machine's name 127.0.1.1 in its own /etc/hosts, and only there.
    return host if address.startswith("127.") or address == "::1" else address


def find_next(places: Iterable[StatePlace], name: str) -> StatePlace | None:
    """Return the node that keeps the copies of a node's state, the next one by rank; None if there is one node."""
    nodes = {place.node: place for place in places}
    names = list(nodes)
    following = names[(names.index(name) + 1) % len(names)]
    return None if following == name else nodes[following]


def copy_to(place: StatePlace, node: NodeMemories, kept: str, record: Record) -> None:
    """Have another node copy a generation of this worker, and keep the one with a key; a line says so if it can't."""
    try:
        with contextlib.closing(StateClient(place)) as client:
            client.fetch(node.own, record, kept, find_place(node))
    except LOSSES as error:
        step = record.generation.label or record.generation.number
        what = f"rank {record.rank} has no copy of {step} on another node: the node at {place.address}"
        sys.stderr.write(f"elastic-run: kept state: {what}: {describe_loss(error)}\n")


def list_parts(node: NodeMemories) -> list[_Part]:
    """Return what this worker's memory holds, and the memory for copies that it speaks for."""
    return [
        _Part(node.name, number, record)
        for number, memory in enumerate(node.memories)
        if number % node.workers == node.own
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


def say(line: str) -> None:
    """Write a line for the user, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"elastic-run: {line}\n")
