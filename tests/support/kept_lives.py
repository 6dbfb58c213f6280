"""Processes that keep state, killed at random moments: what is left is loaded, and has to be whole and of one save.

    python -m tests.support.kept_lives save SEED KILLS DIRECTORY
    python -m tests.support.kept_lives flush SEED KILLS DIRECTORY

- save: two nodes with one rank each restore, save and copy to each other; a rank or a server of a node is killed. Then
  each node loads the state alone, as if the other one were lost, and the next life loads it together.
- flush: the process that writes a checkpoint on the way out is killed; plain torch loads the checkpoint then.

All numbers of a state are its step, so that a torn or mixed one shows. Processes are forked from this one, which has
imported torch: a life takes a fifth of a second.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from elastic_run.agent.kept_memory import KeptMemories
from elastic_run.worker import MemoryReader, MemoryWriter
from elastic_run.worker.kept_checkpoint import write_checkpoint
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

_RANKS = 2
#: Numbers of one rank's part: 4 MB.
_NUMBERS = 1 << 20
#: Seconds in which a life restores, saves and copies some times.
_LIFE = 0.3


def _say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def _fork(work: Callable[..., object], *arguments: object) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(*arguments)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the parent says what is wrong
        traceback.print_exc()
        os._exit(1)


def _load_whole(reader: MemoryReader, where: str) -> int:
    """Load all parts; return the step, 0 without a state."""
    if reader.label is None:
        return 0
    parts = {f"part{rank}": torch.zeros(_NUMBERS) for rank in range(_RANKS)}
    load(parts, storage_reader=reader)
    found = sorted({float(end) for part in parts.values() for end in part.aminmax()})
    if found != [float(reader.label)]:
        message = f"torn or mixed, {where}: {found} in step {reader.label}"
        raise SystemExit(message)
    return int(reader.label)


# --- save, copy, restore ---------------------------------------------------------------------------------------------
class _Node:
    """A node's memories and the process that serves them."""

    def __init__(self) -> None:
        self.memories = KeptMemories(2 * _RANKS * (_NUMBERS * 4 + (1 << 16)), 1, 1, is_served=True)
        self.server: subprocess.Popen[bytes] | None = None

    def serve(self) -> int:
        """Start the server unless it runs; return its pid."""
        if self.server is None or self.server.poll() is not None:
            command, variables, listening = self.memories.serve_command() or ([], {}, 0)
            self.server = subprocess.Popen(command, env={**os.environ, **variables}, pass_fds=(listening,))
        return self.server.pid

    def close(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.kill()
            self.server.wait()
        self.memories.close()


def _train(rank: int, node: _Node, meeting: Path, saved: memoryview) -> None:
    os.environ.update(node.memories.describe(0), RANK=f"{rank}", WORLD_SIZE=f"{_RANKS}")
    dist.init_process_group("gloo", store=FileStore(str(meeting), _RANKS), rank=rank, world_size=_RANKS)
    try:
        step = _load_whole(MemoryReader(), "together")
    except SystemExit as error:
        saved[_RANKS] = 1
        _say(error)
        raise
    saved[_RANKS + 1] = step
    part = torch.empty(_NUMBERS)
    while True:
        step += 1
        save({f"part{rank}": part.fill_(step)}, checkpoint_id=f"{step}", storage_writer=MemoryWriter())
        saved[rank] = step


def _has_saved(saved: memoryview, first: int) -> bool:
    return max(saved[:_RANKS]) > first


def _kill_savers(pick: random.Random, kills: int, directory: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK="0")
    nodes = [_Node() for _ in range(_RANKS)]
    # The last step of each rank whose save has returned; whether a rank has found what is torn; the loaded step.
    saved = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    try:
        for life in range(kills):
            servers = [node.serve() for node in nodes]
            meeting, first = directory / f"{life}", max(saved[:_RANKS])
            ranks = [_fork(_train, rank, node, meeting, saved) for rank, node in enumerate(nodes)]
            victim = pick.choice(("rank 0", "rank 1", "server 0", "server 1"))
            if pick.random() < 0.5:  # in a save or a copy, else at any moment since the start
                wait_until(partial(_has_saved, saved, first))
            time.sleep(pick.uniform(0, _LIFE))
            os.kill((ranks if victim < "s" else servers)[int(victim[-1])], signal.SIGKILL)
            time.sleep(pick.uniform(0, 0.02))
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            steps = [_load_alone(node) for node in nodes]
            last = max(saved[:_RANKS])
            _say("life", life, "without", victim, "saved", last, "left", *steps)
            # A save waits for the copies of the one before, which fail without a server.
            is_copied = victim < "s" and last > max(first, saved[_RANKS + 1])
            if saved[_RANKS] or (is_copied and min(steps) < last - 1):
                message = f"life {life}: a torn state was loaded, or a copy is missing"
                raise SystemExit(message)
    finally:
        for node in nodes:
            node.close()


def _load_alone(node: _Node) -> int:
    os.environ.update(node.memories.describe(0), WORLD_SIZE="1")
    return _load_whole(MemoryReader(), "alone")


# --- flush -----------------------------------------------------------------------------------------------------------
def _kill_writers(pick: random.Random, kills: int, directory: Path) -> None:
    memories = KeptMemories(3 * _NUMBERS * 4, 1)
    os.environ.update(memories.describe(0), RANK="0")
    kept, before, longest = directory / "kept", 0, 0.0
    for number in range(kills + 1):
        step = number + 1
        parts = {f"part{rank}": torch.full((_NUMBERS // _RANKS,), float(step)) for rank in range(_RANKS)}
        save(parts, checkpoint_id=f"{step}", storage_writer=MemoryWriter(), no_dist=True)
        begun = time.monotonic()
        pid = _fork(write_checkpoint, kept)
        if number:
            time.sleep(pick.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        longest = longest or 1.1 * (time.monotonic() - begun)
        load(parts, checkpoint_id=kept / "latest", no_dist=True)
        found = sorted({float(end) for part in parts.values() for end in part.aminmax()})
        _say("flush", step, "ended by", status, "left", *found)
        allowed = [step] if status == 0 else [before, step]
        if len(found) != 1 or found[0] not in allowed:
            message = f"the checkpoint has {found} where {allowed} was written"
            raise SystemExit(message)
        before = int(found[0])
    newest = write_checkpoint(kept)
    left = {each.name for each in kept.iterdir()}
    if newest is None or left != {"latest", newest.name} or (kept / "latest").resolve() != newest.resolve():
        message = f"left in the directory: {left}"
        raise SystemExit(message)


def main() -> None:
    """Do what the command line says."""
    torch.set_num_threads(1)  # a fork has none of the others
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    kind, seed, kills, directory = sys.argv[1:]
    pick = random.Random(seed)  # noqa: S311 - it repeats
    {"save": _kill_savers, "flush": _kill_writers}[kind](pick, int(kills), Path(directory))


if __name__ == "__main__":
    main()
