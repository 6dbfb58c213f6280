"""Writes the newest kept state as an ordinary checkpoint of torch.distributed.checkpoint; the launcher runs it.

The nodes share a directory for each generation. Each node writes the parts that it holds there, and the node that finds
all parts makes them a checkpoint. A node does not know whether the others have its newest generation, so it
writes the one before as well, unless the newest is complete. `DIRECTORY/latest` is a symbolic link to the checkpoint,
and changes when the new one is whole. After that, all others with names of ours are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from elastic_run.worker.kept_memory import Entry, KeptStateError, open_memories, parse_index, view_tensor
from elastic_run.worker.memory_storage import make_metadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

    from elastic_run.core.kept_generations import Generation, Record
    from elastic_run.worker.kept_memory import KeptMemory

    Parts = dict[int, tuple[KeptMemory, Record]]

LATEST = "latest"
_OURS = re.compile(r"step-[\w.-]*-[0-9a-f]{16}")


def write_checkpoint(directory: Path) -> Path | None:
    """Write what this node holds of the newest state; return the checkpoint, or None if no state is kept."""
    node = open_memories(os.environ)
    generations: dict[Generation, Parts] = {}
    for memory in [] if node is None else node.memories:
        for record in filter(None, memory.read_records()):
            generations.setdefault(record.generation, {}).setdefault(record.rank, (memory, record))
    checkpoints: list[Path] = []
    problem: KeptStateError | FileNotFoundError | None = None
    for generation, parts in sorted(generations.items(), key=lambda each: -each[0].number):
        label = re.sub(r"[^\w.-]", "-", generation.label)[:100]  # of a MemoryWriter, it may be any text
        checkpoints.append(directory / f"step-{label}-{generation.key}")
        # Another node may make a checkpoint meanwhile, and removes then what is not needed any more.
        if not any(each.exists() for each in checkpoints):
            try:
                _write_generation(checkpoints[-1], generation, parts)
            except (KeptStateError, FileNotFoundError) as error:
                problem = problem or error
    finished = next((each for each in checkpoints if each.exists()), None)
    if finished is not None:
        _publish(finished)
    elif problem:
        raise problem
    return finished


def _write_generation(checkpoint: Path, generation: Generation, parts: Parts) -> None:
    """Write this node's parts, and make a checkpoint of them and of those that other nodes have written."""
    unfinished = checkpoint.with_name(f".{checkpoint.name}")
    unfinished.mkdir(parents=True, exist_ok=True)
    for rank, (memory, record) in parts.items():
        memory.verify(record)
        _write_part(memory, record, rank, unfinished)
    indexes = [path for rank in range(generation.world_size) if (path := unfinished / f"{rank}.index").exists()]
    if len(indexes) < generation.world_size:
        there = f"{len(indexes)} of {generation.world_size} parts of {generation.label} are in {unfinished}"
        message = f"{there}, which all nodes have to share"
        raise KeptStateError(message)
    _finish(unfinished, checkpoint, indexes)


def _write_part(memory: KeptMemory, record: Record, rank: int, directory: Path) -> None:
    """Write the file of one rank, as torch's FileSystemWriter does, and an index of it; the index counts."""
    if (directory / f"{rank}.index").exists():
        return  # the node that has a copy was faster
    entries, planner_data = parse_index(record, memory.part(record.start + record.index_start, record.index_length))
    index = []

    def write(file: IO[bytes]) -> None:
        for entry in entries:
            start = file.tell()
            content = memory.part(record.start + entry.position, entry.length)
            if entry.offsets is None:
                file.write(content)
            else:
                torch.save(view_tensor(content, entry.dtype, entry.sizes), file)
            index.append((entry, start, file.tell() - start))

    _write_file(directory / f"__{rank}_0.distcp", write)
    _write_file(directory / f"{rank}.index", lambda file: file.write(json.dumps([index, planner_data]).encode()))


def _finish(unfinished: Path, checkpoint: Path, paths: list[Path]) -> None:
    """Make a checkpoint of all ranks' parts."""
    indexes, places = [], {}
    for rank, path in enumerate(paths):
        index, planner_data = json.loads(path.read_bytes())
        entries = [Entry(*values) for values, _, _ in index]
        indexes.append((entries, planner_data))
        for entry, (_, start, length) in zip(entries, index, strict=True):
            places[MetadataIndex(entry.name, entry.offsets)] = _StorageInfo(f"__{rank}_0.distcp", start, length)
    metadata = make_metadata(indexes)
    metadata.storage_data = places
    _write_file(unfinished / ".metadata", lambda file: pickle.dump(metadata, file))
    unfinished.rename(checkpoint)


def _publish(checkpoint: Path) -> None:
    """Let the link lead to a checkpoint, and remove the others: also if a process was killed between the two, or here.

    Several nodes may do so at the same time.
    """
    new = checkpoint.with_name(f".{LATEST}.{secrets.token_hex(4)}")
    new.symlink_to(checkpoint.name)
    with contextlib.suppress(FileNotFoundError):  # another node has removed it, and has set the link
        new.replace(checkpoint.with_name(LATEST))
    for each in checkpoint.parent.iterdir():
        if each.name.startswith(f".{LATEST}."):
            each.unlink(missing_ok=True)
        elif each != checkpoint and _OURS.fullmatch(each.name.removeprefix(".")):
            shutil.rmtree(each, ignore_errors=True)


def _write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that is whole when it has its name."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def main() -> None:
    """Write the checkpoint, and say where it is in one line, which the launcher reads."""
    try:
        checkpoint = write_checkpoint(Path(sys.argv[1]))
        line = f"the kept state is in {checkpoint}" if checkpoint else ""
    except (KeptStateError, OSError) as error:
        line = f"the kept state was not written to {sys.argv[1]}: {error}"
    sys.stdout.write(line)


if __name__ == "__main__":
    main()
