"""Reads this node's workers for the hang detection: signs of progress, and the activity of their processes.

The sources are /proc, the output that passes through this process, a file with each worker's heartbeats, and
nvidia-ml-py where it is installed. A worker's text of its stacks does not count as output. psutil tells no state of a
thread, and takes more than twice the time of a tick.

A thread computes if it has a processor, or waits for one, and has not gone to sleep for a moment. The state at one
instant does not tell: gloo's threads wake up 100 times a second in a rank that does nothing, and a thread that computes
on a machine with too few processors gets next to no processor time. Threads that take turns under Python's lock sleep
for each other; where the agent too gets its processor late, each of them has slept since. So a process computes as well
if the time in which its threads ran or waited for a processor makes up the whole moment: gloo's threads wait little.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.agent.driver.failed_ranks import find_last_words
from elastic_run.core.failure.hang import Look, Signs, place_failed, place_last_words
from elastic_run.core.failure.stacks import find_place, parse_stacks
from elastic_run.multiprocessing.process.process_table import find_descendants, list_running_threads, read_stat
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_run.agent.driver.round import Round
    from elastic_run.core.failure.stacks import Dump

_TICK = os.sysconf("SC_CLK_TCK")
#: Seconds without sleep in which a thread computes. A thread that polls sleeps sooner, also if it has to wait for a
#: processor; one that computes and gets no processor waits longer.
MOMENT = 0.04
#: Moments of a look at most: threads that compute in turns under Python's lock sleep for each other.
MOMENTS = 3
#: Lines of /proc/PID/status: the state, and how often the thread has slept.
_STATE, _SLEEPS = b"State:", b"voluntary_ctxt_switches:"
_MOVED = (b"rchar:", b"wchar:", b"read_bytes:", b"write_bytes:")
#: Bytes of a file of /proc/PID at most.
_LIMIT = 4096
#: Position of `utime` and `stime` behind the name in /proc/PID/stat.
_USER, _SYSTEM = 11, 12


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """The activity of one worker's processes so far.

    Args:
        running: The threads of the worker's process that have a processor, or wait for one, but the recorder's, and how
            often each has slept.
        running_children: The same of the first threads of its descendants.
        wakes: Number of times that the worker's main thread has slept and gone on.
        cpu: Seconds of processor time of the worker's process.
        children_cpu: Seconds of processor time of its descendants.
        moved: Bytes that all of them have read and written, without the worker's stacks.
        ready: Seconds in which the threads of the worker's process have run or waited for a processor, in sum; 0 where
            none runs, or where it is not known.
        is_computing: Whether one of the threads has not slept for a moment, or some thread was ready all the time.
        has_computing_child: Whether the same holds for a descendant's.
        is_gpu_busy: Whether a GPU that the worker's process uses has computed lately.
    """

    running: Mapping[str, int]
    running_children: Mapping[str, int]
    wakes: int
    cpu: float
    children_cpu: float
    moved: int
    ready: float = 0.0
    is_computing: bool = False
    has_computing_child: bool = False
    is_gpu_busy: bool = False

    @property
    def is_undecided(self) -> bool:
        """Whether a thread runs, and another moment may show that it computes."""
        is_own = bool(self.running) and not self.is_computing
        return is_own or (bool(self.running_children) and not self.has_computing_child)


class SignReader:
    """Reads the signs of the workers of a round; `heartbeats` are the paths of the workers' files by local rank."""

    def __init__(self, current: Round, heartbeats: Mapping[int, str]) -> None:
        self._round = current
        self._heartbeats = heartbeats
        self._counters: dict[int, ProcessCounters] = {}

    def read(self) -> dict[int, Signs]:
        """Return the signs of the workers that run, by local rank."""
        received = self._round.listen_for_stacks().received
        found = {}
        for rank in self._round.workers.alive:
            if rank not in self._counters:
                self._counters[rank] = ProcessCounters(self._round.workers.pids[rank])
            counters = self._counters[rank].read()
            if counters is None:
                continue
            written, cpu = counters
            activity = self._round.output.activities.get(rank)
            marks = (
                0 if written is None else written - received.get(rank, 0),
                0 if activity is None else int(activity.last * 1e6),
                _changed_at(self._heartbeats.get(rank, "")),
                *map(_size, self._round.output_files(rank)),
            )
            found[rank] = Signs(marks, cpu)
        return found

    def close(self) -> None:
        """Read no more."""
        for counters in self._counters.values():
            counters.close()


class ProcessCounters:
    """The counters of a worker's process that each tick reads: bytes written, and processor time.

    The two files of /proc stay open: a tick that opened them anew would take twice the time, and 8 idle workers would
    cost more than the bound, 0.1 % of a core.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: dict[str, int] = {}

    def read(self) -> tuple[int | None, float] | None:
        """Return the bytes written, None where the kernel does not tell, and the seconds of processor time; or None.

        None instead of both says that the process is gone.
        """
        # The name in parentheses may hold spaces and parentheses itself: fields count from the last one.
        fields = self._read("stat").rpartition(b")")[2].split(None, _SYSTEM + 1)
        if len(fields) <= _SYSTEM:
            return None
        written = self._read("io").partition(b"\nwchar: ")[2].partition(b"\n")[0]
        return int(written) if written else None, (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICK

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _read(self, name: str) -> bytes:
        try:
            fd = self._files.get(name)
            if fd is None:
                fd = self._files[name] = os.open(f"/proc/{self._pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(fd, _LIMIT, 0)
        except OSError:
            return b""


def sample_processes(current: Round) -> dict[int, ProcessSample]:
    """Return the activity of the running workers' processes by local rank."""
    received = current.listen_for_stacks().received
    ranks = {current.workers.pids[rank]: rank for rank in current.workers.alive}
    stats = {pid: stat for pid in find_descendants(ranks.keys(), since=0) if (stat := read_stat(pid)) is not None}
    children = dict.fromkeys(ranks.values(), 0)
    running: dict[int, list[str]] = {rank: [] for rank in ranks.values()}
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
                running[rank] += [str(pid)] if stat.state == b"R" else []
            moved[rank] += _count_bytes(pid, _MOVED, received.get(rank, 0) if pid == leader else 0)
    return {
        rank: ProcessSample(
            running=(own := _read_running(pid)),
            running_children=_count_sleeps(running[rank]),
            wakes=_read_status(str(pid))[1],
            cpu=stats[pid].cpu / _TICK,
            children_cpu=children[rank] / _TICK,
            moved=moved[rank],
            ready=_read_ready(pid) if own else 0.0,
        )
        for pid, rank in ranks.items()
        if pid in stats
    }


def follow(sample: ProcessSample, pid: int, seconds: float) -> ProcessSample:
    """Return a worker's sample a moment later: with the threads that run by now, and whether one has not slept since.

    The moment was `MOMENT` seconds long, or more where this process got its processor late.
    """
    running, children = _read_running(pid), _count_sleeps(sample.running_children)
    ready = _read_ready(pid) if running else 0.0
    is_always_ready = bool(sample.ready) and ready - sample.ready >= seconds
    is_computing = is_always_ready or bool(running.items() & sample.running.items())
    return replace(
        sample,
        running=running,
        running_children=children,
        ready=ready,
        is_computing=sample.is_computing or is_computing,
        has_computing_child=sample.has_computing_child or bool(children.items() & sample.running_children.items()),
    )


def make_look(dump: Dump, sample: ProcessSample, answer: str) -> Look:
    """Return the look at one worker; its flight recorder answers `open` or `done`, and its numbers; or ""."""
    stacks = parse_stacks(dump.text)
    frames = () if stacks.main is None else stacks.main.frames
    state, _, collectives = answer.partition(" ")
    return Look(
        stack=dump.problem or "\n".join(f"{frame.file}:{frame.line} {frame.function}" for frame in frames),
        place=find_place(stacks, dump.problem),
        collectives=collectives,
        is_open=state == "open",
        is_running=sample.is_computing,
        has_running_child=sample.has_computing_child,
        wakes=sample.wakes,
        cpu=sample.cpu,
        children_cpu=sample.children_cpu,
        moved=sample.moved,
        is_gpu_busy=sample.is_gpu_busy,
    )


def add_failure(look: Look, current: Round, rank: int, dump: Dump) -> Look:
    """Return a look with the exception that has ended the main thread of a local rank, or that is its last output."""
    told = current.uncaught.get(rank)
    if told is not None:
        return replace(look, place=place_failed(told, dump))
    written = None if look.waits else find_last_words(current, rank)
    return look if written is None else replace(look, place=place_last_words(look.place, written))


def _count_bytes(pid: int, names: Iterable[bytes], stacks: int) -> int:
    """Return the bytes that a process has read or written, without those of its stacks; 0 where they are not known."""
    io = _read_io(pid)
    return sum(int(io.get(name, 0)) for name in names) - stacks if io else 0


def _read_io(pid: int) -> dict[bytes, bytes]:
    """Return the counters of /proc/PID/io by name; an empty dict if the file can't be read."""
    try:
        with open(f"/proc/{pid}/io", "rb", buffering=0) as file:
            words = file.read(_LIMIT).split()
    except OSError:
        return {}
    return dict(zip(words[::2], words[1::2], strict=False))


def _read_running(pid: int) -> dict[str, int]:
    # A thread that waits for the GIL wakes up 200 times a second, and the recorder's waits because of our question.
    return _count_sleeps(list_running_threads(pid, besides=contract.RECORDER_THREAD.encode()))


def _read_ready(pid: int) -> float:
    """Return the seconds in which the threads of a process have run or waited for a processor; 0 where not known."""
    seconds = 0.0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", "rb", buffering=0) as file:
                run, waited, _ = file.read(_LIMIT).split()
            seconds += (int(run) + int(waited)) / 1e9
    except (OSError, ValueError):
        return 0.0
    return seconds


def _count_sleeps(tasks: Iterable[str]) -> dict[str, int]:
    """Return how often threads have slept, of those that run."""
    found = {task: _read_status(task) for task in tasks}
    return {task: sleeps for task, (state, sleeps) in found.items() if state == b"R"}


def _read_status(task: str) -> tuple[bytes, int]:
    """Return the letter of a thread's state, and how often it has slept and gone on; 0 where that is not known."""
    try:
        with open(f"/proc/{task}/status", "rb") as file:
            found = {line.split()[0]: line.split()[1] for line in file if line.startswith((_STATE, _SLEEPS))}
    except OSError:
        return b"", 0
    return found.get(_STATE, b""), int(found.get(_SLEEPS, 0))


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
