"""Writes a checkpoint of torch.distributed.checkpoint into the launcher's memory, which outlives the workers.

    dcp.save(state, checkpoint_id=step, storage_writer=MemoryWriter())

A save is a copy into memory that is mapped, so that it takes as long as a copy does. Sharding, DTensors and another
number of ranks are the work of torch.distributed.checkpoint. With copies, each node's state also goes to the next node.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import secrets
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from elastic_run.core.kept_generations import Generation, newest
from elastic_run.records import dataclass
from elastic_run.worker.kept_memory import Entry, KeptStateError, align, open_memories
from elastic_run.worker.memory_reader import copy_to, find_next, find_place, list_parts, say

if TYPE_CHECKING:
    from io import BytesIO
    from typing import Any

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from elastic_run.core.kept_generations import Record
    from elastic_run.worker.kept_memory import NodeMemories
    from elastic_run.worker.kept_server import StatePlace

__all__ = ["MemoryWriter"]


@dataclass(frozen=True, slots=True)
class _Share:
    """What the coordinator of a save gives to each rank."""

    rank: int
    generation: Generation
    whole: Generation | None  # The generation that stays until this one is whole
    next_node: StatePlace | None  # Where a copy goes


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
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any id is a label, but a writer of memory has to be given: it is chosen for no id."""
        del checkpoint_id
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Say so if nothing is kept."""
        del is_coordinator, args, kwargs
        self.is_kept()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator which memory is this rank's, and which generations this node's memories hold."""
        node = open_memories(os.environ)
        if node is None:
            return plan
        # The checksums' thread writes the record anew: not while other ranks clear the generation before. And a copy
        # has to be whole before the generation that it is of is replaced: a save waits for the copy of the one before.
        node.memories[node.own].wait_checked()
        records = tuple(part.record for part in list_parts(node))
        return dataclasses.replace(plan, storage_data=_Saver(find_place(node), node.own, records))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the new generation, and choose the generation that stays until the new one is whole.

        Raises:
            KeptStateError: Some workers of the job take no part in the save, or two workers have the same memory.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        node = open_memories(os.environ)
        savers = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Saver)]
        if not savers:
            return plans
        if len(savers) != world or node is None:
            message = f"{len(savers)} of {world} workers save their state; all have to, on nodes with --keep-state"
            raise KeptStateError(message)
        if len({(saver.place.node, saver.memory) for saver in savers}) != len(plans):
            message = "several workers have the same memory: --keep-state is not for those that a worker has started"
            raise KeptStateError(message)
        records = [record for saver in savers for record in saver.records]
        number = 1 + max((record.generation.number for record in records), default=0)
        generation = Generation(number, secrets.token_hex(8), self._label, len(plans))
        places = [saver.place for saver in savers]
        nexts = [find_next(places, place.node) if node.has_copies else None for place in places]
        whole = newest(records)
        shares = [_Share(rank, generation, whole, each) for rank, each in enumerate(nexts)]
        return [dataclasses.replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

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
            entries = _copy_in(node, share, plan, planner)
        results = zip(plan.items, entries, strict=True)
        future.set_result([WriteResult(item.index, entry.length, share.rank) for item, entry in results])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: a generation is whole when each rank's record is written."""


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
            memory.part(start + position, length)[:] = content
        entries.append(_make_entry(item, data, position, length))
        position += align(length)
    for device in devices:
        torch.cuda.synchronize(device)
    kept = "" if share.whole is None else share.whole.key
    copy = None if share.next_node is None else functools.partial(copy_to, share.next_node, node, kept)
    memory.commit(half, share.generation, share.rank, entries, plan.planner_data, copy)
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
