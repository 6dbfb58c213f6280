"""Writes the newest kept state as an ordinary checkpoint of torch.distributed.checkpoint; the launcher runs it.

    python -m elastic_run.worker.kept_checkpoint DIRECTORY

`DIRECTORY/latest` is a symbolic link to the checkpoint, and changes when the new one is whole: a full disk, or the end
of the time that the process had, leaves the one before, which is removed only after that. A checkpoint of another
name is not ours, and stays.
"""

from __future__ import annotations

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

from elastic_run.worker.kept_memory import KeptStateError, open_memories
from elastic_run.worker.memory_checkpoint import MemoryReader

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

__all__ = ["write_checkpoint"]

LATEST = "latest"
_OURS = re.compile(r"step-[\w.-]*-[0-9a-f]{8}")


def write_checkpoint(directory: Path) -> Path | None:
    """Write the newest state that all ranks have.

    Args:
        directory: Where the checkpoints are; it is made.

    Returns:
        The checkpoint, or None if no state is kept.

    Raises:
        OSError: The disk is full, or the directory can't be written to. The checkpoint before is as it was.
    """
    reader = MemoryReader()
    if reader.label is None:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    label = re.sub(r"[^\w.-]", "-", reader.label)[:100]  # of a MemoryWriter, it may be any text
    name = f"step-{label}-{secrets.token_hex(4)}"
    unfinished = directory / f".{name}"
    unfinished.mkdir()
    try:
        _write_files(reader, unfinished)
        checkpoint = directory / name
        before = os.readlink(directory / LATEST) if (directory / LATEST).is_symlink() else ""
        unfinished.rename(checkpoint)
        link = directory / f".{name}.{LATEST}"
        link.symlink_to(name)
        link.replace(directory / LATEST)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if _OURS.fullmatch(before):
        shutil.rmtree(directory / before, ignore_errors=True)
    return checkpoint


def _write_files(reader: MemoryReader, directory: Path) -> None:
    """Write one file for each rank, and the metadata that torch.distributed.checkpoint reads."""
    metadata = reader.read_metadata()
    places: dict[MetadataIndex, _StorageInfo] = {}
    memories = open_memories(os.environ)
    files = {rank: (directory / f"__{rank}_0.distcp").open("wb") for rank in reader.ranks}
    try:
        for index, (part, entry) in metadata.storage_data.items():
            memory, file = memories[part.memory], files[part.record.rank]
            start = file.tell()
            if entry.offsets is None:
                file.write(memory.read(entry.position, entry.length))
            else:
                raw = memory.view(entry.position, entry.length)
                # A copy: torch writes the whole memory that a tensor is a view of.
                torch.save(raw.view(getattr(torch, entry.dtype)).view(entry.sizes).clone(), file)
            places[index] = _StorageInfo(file.name.rpartition("/")[2], start, file.tell() - start)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    metadata.storage_data = places
    with (directory / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())


def main() -> int:
    """Write the checkpoint, and say where it is in one line."""
    try:
        checkpoint = write_checkpoint(Path(sys.argv[1]))
    except (KeptStateError, OSError) as error:
        print(f"the kept state was not written to {sys.argv[1]}: {error}")  # noqa: T201 - the launcher reads it
        return 1
    print("" if checkpoint is None else f"the kept state is in {checkpoint}")  # noqa: T201 - ditto
    return 0


if __name__ == "__main__":
    sys.exit(main())
