"""Reads what this node's workers do: their use of the machine and their output, and the signs of progress.

A thread computes if it has a processor, or waits for one, and has not gone to sleep for a moment; the state at one
instant does not tell, as gloo's threads wake up 100 times a second in a rank that does nothing. Threads that take turns
under Python's lock sleep for each other, so a process computes as well if the time in which its threads ran or waited
for a processor makes up the whole moment. psutil tells no state of a thread, and takes twice the time.
"""

from __future__ import annotations

import os
import time

from elastic_run import contract
from elastic_run.core.failure.hang import Look, Signs
from elastic_run.core.failure.stacks import find_place, parse_stacks
from elastic_run.multiprocessing.output.tail import last_line
from elastic_run.multiprocessing.process_table import find_descendants, list_running_threads, read_stat
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from elastic_run.agent.context import AgentContext
    from elastic_run.agent.driver.round import Round
    from elastic_run.cluster.devices import GpuUse
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
#: Bytes of a file of /proc/PID at most, and bytes of a log file in which its last line is looked for.
_LIMIT = 4096
_READ = 512
#: Position of `utime` and `stime` behind the name in /proc/PID/stat.
_USER, _SYSTEM = 11, 12
#: Seconds for the GPUs' driver.
_GPU_WAIT = 1.0
#: Part of one processor that all background threads of a worker take at most while it waits.
_QUIET = 0.005


# --- use and output, for `elastic-run status`, the event log and the lines about stacks ------------------------------
@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker's process has used: seconds of processor time, resident bytes now, its state in psutil's words."""

    cpu: float
    memory: int
    state: str


def read_usage(current: Round) -> dict[int, Usage]:
    """Return what the workers that run have used, by local rank; their children are not in it."""
    pids = current.workers.pids
    found = {rank: read_process(pids[rank]) for rank in sorted(current.workers.alive)}
    return {rank: usage for rank, usage in found.items() if usage is not None}


def read_process(pid: int) -> Usage | None:
    """Return what one process has used, or None where that can't be read."""
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return Usage(cpu.user + cpu.system, process.memory_info().rss, process.status())
    except (psutil.Error, OSError):
        return None  # it has ended, or no file can be opened


def ask_gpu_use(context: AgentContext, deliver: Callable[[dict[int, GpuUse]], None]) -> None:
    """Deliver the GPU use by pid in the loop; a thread asks, and no second one while the driver hangs."""
    import threading

    from elastic_run.cluster import devices

    loop, earlier = context.loop, context.gpu_thread
    if not devices.has_library() or (earlier is not None and earlier.is_alive()):
        deliver({})
        return
    waiting = [deliver]

    def conclude(found: dict[int, GpuUse]) -> None:
        if waiting:
            timer.cancel()
            waiting.pop()(found)

    def read() -> None:
        found = devices.read_gpu_use()
        loop.call_soon_threadsafe(lambda: conclude(found))

    timer = loop.call_later(_GPU_WAIT, lambda: conclude({}))
    context.gpu_thread = threading.Thread(target=read, name="gpu use", daemon=True)
    context.gpu_thread.start()


def add_silences(dumps: dict[int, Dump], current: Round, now: float) -> dict[int, Dump]:
    """Return the stacks of some workers by global rank with the seconds since the last output of each."""
    local_ranks = {rank: local_rank for local_rank, rank in current.global_ranks.items()}
    return {
        rank: replace(dump, silence=find_output(current, local_ranks[rank], now)[0]) for rank, dump in dumps.items()
    }


def find_output(current: Round, local_rank: int, now: float) -> tuple[float | None, str]:
    """Return seconds since a worker's last output, None where not all of its output is seen here; and its last line."""
    activity = current.output.activities.get(local_rank)
    latest, line = (current.started, "") if activity is None else (activity.last, activity.last_line)
    for path in current.output_files(local_rank):
        try:
            status = os.stat(path)
            # Both of these clocks are this machine's own, and the difference is for display.
            written = now - (time.time() - status.st_mtime)
            if status.st_size and (written > latest or not line):
                latest, line = max(latest, written), last_line(_read_end(path, status.st_size))
        except OSError:
            continue  # removed by somebody
    return (max(0.0, now - latest) if current.sees_stdout(local_rank) else None), line


def _read_end(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(fd, _READ, max(0, size - _READ))
    finally:
        os.close(fd)


# --- quiet rounds, for every job --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Activity:
    """What the processes of a round have done so far."""

    cpu: float  # Seconds of processor time
    written: int  # Bytes that they have written to files, pipes and terminals
    workers: int  # Workers that run


def read_activity(workers: Sequence[int]) -> Activity:
    """Return CPU time and written bytes of workers and their descendants, such as data loaders, so far."""
    pids = find_descendants(frozenset(workers), since=0)
    stats = [stat for pid in pids if (stat := read_stat(pid)) is not None]
    written = sum(int(_read_io(pid).get(b"wchar:", 0)) for pid in pids)
    return Activity(sum(stat.cpu for stat in stats) / _TICK, written, len(workers))


def is_quiet(before: Activity, after: Activity, seconds: float) -> bool:
    """Whether nothing happened between two moments; less is a change, as processes take their time with them."""
    if not after.workers or before.workers != after.workers or before.written != after.written:
        return False
    return abs(after.cpu - before.cpu) <= _QUIET * after.workers * seconds


# --- ticks of the hang detection --------------------------------------------------------------------------------------
class SignReader:
    """Reads the signs of the workers of a round; `heartbeats` are the paths of the workers' files by local rank."""

    def __init__(self, current: Round, heartbeats: Mapping[int, str]) -> None:
        self._round = current
        self._heartbeats = heartbeats
        #: Files of /proc that stay open: a tick that opened them anew would take twice the time, and 8 idle workers
        #: would cost more than the bound, 0.1 % of a core.
        self._files: dict[str, int] = {}

    def read(self) -> dict[int, Signs]:
        """Return the signs of the workers that run, by local rank."""
        received = self._round.listen_for_stacks().received
        found = {}
        for rank in self._round.workers.alive:
            pid = self._round.workers.pids[rank]
            # The name in parentheses may hold spaces and parentheses itself: fields count from the last one.
            fields = self._read(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, _SYSTEM + 1)
            if len(fields) <= _SYSTEM:
                continue  # the process is gone
            written = self._read(f"/proc/{pid}/io").partition(b"\nwchar: ")[2].partition(b"\n")[0]
            activity = self._round.output.activities.get(rank)
            beat = _stat(self._heartbeats.get(rank, ""))
            files = map(_stat, self._round.output_files(rank))
            marks = (
                int(written) - received.get(rank, 0) if written else 0,  # 0 where the kernel does not tell
                0 if activity is None else int(activity.last * 1e6),
                0 if beat is None else beat.st_mtime_ns,
                *(0 if status is None else status.st_size for status in files),
            )
            found[rank] = Signs(marks, (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICK)
        return found

    def close(self) -> None:
        """Read no more."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _read(self, path: str) -> bytes:
        try:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._files[path], _LIMIT, 0)
        except OSError:
            return b""


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path) if path else None
    except OSError:
        return None


# --- looks of the hang detection --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ProcessSample:
    """The activity of one worker's processes so far."""

    #: The threads of the worker's process that have a processor, or wait for one, but the recorder's, and how often
    #: each has slept; the same of the first threads of its descendants.
    running: Mapping[str, int]
    running_children: Mapping[str, int]
    wakes: int  # Number of times that the worker's main thread has slept and gone on
    cpu: float  # Seconds of processor time of the worker's process
    children_cpu: float  # The same of its descendants
    moved: int  # Bytes that all of them have read and written, without the worker's stacks
    #: Seconds in which the threads of the worker's process have run or waited for a processor, in sum; 0 where none
    #: runs, or where it is not known.
    ready: float = 0.0
    is_computing: bool = False  # Whether one of the threads has not slept for a moment, or some thread was always ready
    has_computing_child: bool = False  # Whether the same holds for a descendant's

    @property
    def is_undecided(self) -> bool:
        """Whether a thread runs, and another moment may show that it computes."""
        is_own = bool(self.running) and not self.is_computing
        return is_own or (bool(self.running_children) and not self.has_computing_child)


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
            if io := _read_io(pid):
                stacks = received.get(rank, 0) if pid == leader else 0
                moved[rank] += sum(int(io.get(name, 0)) for name in _MOVED) - stacks
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
    """Return a worker's sample `MOMENT` seconds later, or more: the threads that run, and whether one has not slept."""
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


def make_look(dump: Dump, sample: ProcessSample, answer: str, *, is_gpu_busy: bool) -> Look:
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
        is_gpu_busy=is_gpu_busy,
    )


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
