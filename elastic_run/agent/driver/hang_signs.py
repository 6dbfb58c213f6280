"""Reads this node's workers for the hang detection: signs of progress, and the activity of their processes.

The sources are /proc, the output that passes through this process, a file with each worker's heartbeats, and
nvidia-ml-py where it is installed. A worker's text of its stacks does not count as output.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.core.diagnosis.hang import Look, Signs
from elastic_run.core.diagnosis.stack_groups import find_place
from elastic_run.core.diagnosis.stack_text import parse_stacks
from elastic_run.multiprocessing.process.descendants import find_descendants
from elastic_run.multiprocessing.process.process_table import is_running, read_stat
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_run.agent.driver.round import Round
    from elastic_run.core.diagnosis.stack_groups import Dump

_TICK = os.sysconf("SC_CLK_TCK")
_WRITTEN = "wchar"
#: Switches of the first thread, in /proc/PID/status.
_WAKES = b"voluntary_ctxt_switches:"
_MOVED = ("rchar", "wchar", "read_bytes", "write_bytes")


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """The activity of one worker's processes so far.

    Args:
        is_running: Whether a thread of the worker's process has a processor, or waits for one, but the recorder's.
        has_running_child: Whether the same holds for one of its descendants.
        wakes: Number of times that the worker's main thread has slept and gone on.
        cpu: Seconds of processor time of the worker's process.
        children_cpu: Seconds of processor time of its descendants.
        moved: Bytes that all of them have read and written, without the worker's stacks.
        is_gpu_busy: Whether a GPU that the worker's process uses has computed lately.
    """

    is_running: bool
    has_running_child: bool
    wakes: int
    cpu: float
    children_cpu: float
    moved: int
    is_gpu_busy: bool = False


def read_signs(current: Round, heartbeats: Mapping[int, str]) -> dict[int, Signs]:
    """Return the signs of the workers that run, by local rank.

    Args:
        current: Their round.
        heartbeats: Path of the file of each worker's heartbeats.
    """
    received = current.listen_for_stacks().received
    found = {}
    for rank in current.workers.alive:
        pid = current.workers.pids[rank]
        stat = read_stat(pid)
        if stat is None:
            continue
        activity = current.output.activities.get(rank)
        marks = (
            _count_bytes(pid, (_WRITTEN,), received.get(rank, 0)),
            0 if activity is None else int(activity.last * 1e6),
            _changed_at(heartbeats.get(rank, "")),
            *map(_size, current.output_files(rank)),
        )
        found[rank] = Signs(marks, stat.cpu / _TICK)
    return found


def sample_processes(current: Round) -> dict[int, ProcessSample]:
    """Return the activity of the running workers' processes by local rank."""
    received = current.listen_for_stacks().received
    ranks = {current.workers.pids[rank]: rank for rank in current.workers.alive}
    stats = {pid: stat for pid in find_descendants(ranks.keys(), since=0) if (stat := read_stat(pid)) is not None}
    children = dict.fromkeys(ranks.values(), 0)
    computing: set[int] = set()
    moved = dict.fromkeys(ranks.values(), 0)
    for pid, stat in stats.items():
        leader = pid
        while leader not in ranks and (above := stats.get(leader)) is not None:
            # An orphan has another parent by now, and is still in the worker's session.
            leader = above.session if above.session in ranks else above.parent
        if leader in ranks:
            rank = ranks[leader]
            if pid != leader:
                children[rank] += stat.cpu
                computing |= {rank} if stat.state == b"R" else set()
            moved[rank] += _count_bytes(pid, _MOVED, received.get(rank, 0) if pid == leader else 0)
    return {
        rank: ProcessSample(
            # A thread that waits for the GIL wakes up 200 times a second, and this one waits because of our question.
            is_running=is_running(pid, besides=contract.RECORDER_THREAD.encode()),
            has_running_child=rank in computing,
            wakes=_read_wakes(pid),
            cpu=stats[pid].cpu / _TICK,
            children_cpu=children[rank] / _TICK,
            moved=moved[rank],
        )
        for pid, rank in ranks.items()
        if pid in stats
    }


def make_look(dump: Dump, sample: ProcessSample, answer: str) -> Look:
    """Return the look at one worker.

    Args:
        dump: Its stacks.
        sample: The activity of its processes before the look.
        answer: The answer of its flight recorder: `open` or `done`, and its numbers; or "".
    """
    stacks = parse_stacks(dump.text)
    frames = () if stacks.main is None else stacks.main.frames
    state, _, collectives = answer.partition(" ")
    return Look(
        stack=dump.problem or "\n".join(f"{frame.file}:{frame.line} {frame.function}" for frame in frames),
        place=find_place(stacks, dump.problem),
        collectives=collectives,
        is_open=state == "open",
        is_running=sample.is_running,
        has_running_child=sample.has_running_child,
        wakes=sample.wakes,
        cpu=sample.cpu,
        children_cpu=sample.children_cpu,
        moved=sample.moved,
        is_gpu_busy=sample.is_gpu_busy,
    )


def _count_bytes(pid: int, names: Iterable[str], stacks: int) -> int:
    """Return the bytes that a process has read or written, without those of its stacks; 0 where they are not known."""
    io = _read_io(pid)
    return sum(io.get(name, 0) for name in names) - stacks if io else 0


def _read_io(pid: int) -> dict[str, int]:
    """Return the bytes that a process has read and written; nothing where the kernel doesn't tell."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            return {name: int(value) for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


def _read_wakes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(_WAKES)), 0)
    except OSError:
        return 0


def _changed_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns if path else 0
    except OSError:
        return 0


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
