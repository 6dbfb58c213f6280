"""Whether a job hangs: no rank of it has made progress for the timeout, and looks at several moments agree on that.

Pure: what was seen of each rank and when goes in, the state that follows comes out.

Rules
- Signs (heartbeats, bytes of output) are read at every tick. A new sign is progress, and ends what is known of the
  rank.
- A look is the rank's stack, its number of collectives, and what its processes did. It is taken where a tick brings no
  sign. Another stack or another number is progress; so a rank has to be still in two looks at least.
- A rank that has moved since its last look is still from this look on: it may have moved just now. If the tick before
  showed its progress, a sign or processor time, and nothing has shown any since, it is still from that tick on.
- Processor time, wake-ups, reads and writes of a rank at the same stack are progress, with two exceptions. A rank that
  waits in a collective (its stack or its flight recorder says so) gets nothing done by what its other processes do.
  A GPU that computes for a rank counts like its processor time, unless the rank waits: NCCL's wait keeps a GPU busy.
  And processor time at the same stack may be a spinning wait, or an endless loop of a data loader: where the recorder
  says that a collective is open it counts for nothing, and elsewhere, while another rank waits, for `_SPIN` times as
  long as no progress would. Reads and writes count without end.
- The job hangs when every rank that runs has been still for the timeout. If the observer itself did not run, it has
  seen nothing: all begins anew.
- `auto`: the timeout is `_RHYTHM` times the longest stillness of this round that ended by itself, at least `FLOOR`.
- Of several nodes, each reports what its last look has shown, in seconds of its own clock, so no two clocks are
  compared. There is no verdict before all nodes of the round have answered.
"""

from __future__ import annotations

from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.core.failure.stacks import RAISED, WROTE, Dump, Place, find_place, is_in_shutdown, parse_stacks
from elastic_run.records import dataclass, field, fields, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Document = Mapping[str, Any]

#: Part of a processor that the background threads and processes of a rank that waits take at most.
_IDLE = 0.02
#: Times per second that the main thread of a rank wakes up which polls a file, a queue or a data loader, at most.
_POLLS = 20
#: Bytes per second that they read and write at most: a service that sends metrics.
_TRICKLE = 10_000
#: A rank that computes at one place for so many timeouts while another rank waits is in a spinning wait.
_SPIN = 10
#: Looks within a timeout where nothing seems to change, and ticks.
_LOOKS = 4
_TICKS = 8
#: Seconds between two ticks, at most: a verdict is late by one. With 0.5 s, 8 idle workers took 0.15 % of a core.
_LONGEST_TICK = 0.8
#: Looks within a timeout, at most, where the ranks that compute change all the time.
_MOST_LOOKS = 64
#: Seconds of processor time that a look itself takes of a rank, at most.
_LOOK_COST = 0.03
#: Ticks, and seconds, without this process that are too many.
_ABSENCE, _ABSENCE_SECONDS = 5, 3.0
#: With `auto`: the shortest timeout in seconds, and how many times the longest stillness it is.
FLOOR = 300.0
_RHYTHM = 10


@dataclass(frozen=True, slots=True)
class Signs:
    """What is read of a rank at each tick."""

    marks: tuple[int, ...]  # Counts of its heartbeats and of its output: a change is progress
    cpu: float  # Seconds of processor time of the worker's process


@dataclass(frozen=True, slots=True)
class Look:
    """One rank at one moment."""

    stack: str  # Equal where the main thread is at the same place of the same calls, or is unknown for the same reason
    place: Place = Place()  # That place
    collectives: str = ""  # What the flight recorder has counted; "" where it doesn't tell
    is_open: bool = False  # Whether it tells of a collective that has not ended
    is_running: bool = False  # Whether a thread of the worker's process has a processor, or waits for one
    has_running_child: bool = False  # Whether one of its descendants does so
    wakes: int = 0  # Times that the main thread has slept and gone on
    cpu: float = 0.0  # Seconds of processor time of the worker's process
    children_cpu: float = 0.0  # The same of its descendants
    moved: int = 0  # Bytes that all of them have read and written
    is_gpu_busy: bool = False  # Whether a GPU that the worker's process uses has computed lately

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others."""
        return self.is_open or self.place.is_waiting


@dataclass(frozen=True, slots=True)
class Stillness:
    """How long a rank has been without progress."""

    place: Place  # Where it is
    waits: bool  # Whether it waits for others
    same: float  # Seconds in which stack, collectives and signs did not change
    idle: float  # The part of them, up to now, in which its processes did nothing either


@dataclass(frozen=True, slots=True)
class _Rank:
    """What is known of a rank since its last progress."""

    look: Look
    looked_at: float
    same_since: float
    idle_since: float


@dataclass(frozen=True, slots=True)
class HangWatch:
    """The watch over one round's ranks of one node."""

    given: float  # The timeout in seconds; 0 for `auto`
    longest_tick: float = _LONGEST_TICK  # Seconds between two ticks, at most
    signs: Mapping[int, Signs] = field(default_factory=dict)  # Of the last tick, by rank
    busy: frozenset[int] = frozenset()  # Ranks that used a processor in the tick before the last look
    #: Ranks that did so in the tick before the look before, and not in that of the last look
    calmed: frozenset[int] = frozenset()
    ranks: Mapping[int, _Rank] = field(default_factory=dict)  # What is known of ranks since their last progress
    ticked_at: float | None = None  # When the last tick was, or None
    previous_at: float = 0.0  # When the tick before that was
    looked_at: float | None = None  # When the last look since the last sign was, or None
    longest: float = 0.0  # The longest stillness that ended by itself
    told: Mapping[int, Look] | None = None  # The looks of the hang that was told, or None

    @property
    def timeout(self) -> float:
        """Seconds without progress that are a hang."""
        return self.given or max(FLOOR, _RHYTHM * self.longest)

    @property
    def period(self) -> float:
        """Seconds between two ticks, at most."""
        return min(self.timeout / _TICKS, self.longest_tick)


def tick(watch: HangWatch, now: float, signs: Mapping[int, Signs]) -> tuple[HangWatch, bool]:
    """Return what is known after a tick has read the signs of each rank that runs, and whether to look at the ranks."""
    if watch.ticked_at is None:
        return replace(watch, signs=signs, ticked_at=now), False
    seconds, before = now - watch.ticked_at, watch.signs
    watch = replace(watch, signs=signs, ticked_at=now, previous_at=watch.ticked_at)
    if seconds > max(_ABSENCE * watch.period, _ABSENCE_SECONDS):
        return replace(watch, ranks={}, busy=frozenset(), looked_at=None), False
    moved = {rank for rank in signs if rank not in before or signs[rank].marks != before[rank].marks}
    if moved or before.keys() - signs.keys():
        kept = {rank: known for rank, known in watch.ranks.items() if rank in signs and rank not in moved}
        return replace(watch, ranks=kept, longest=_longest(watch, now), looked_at=None), False
    busy = frozenset(rank for rank in signs if signs[rank].cpu - before[rank].cpu > _allow(seconds))
    if _is_look_due(watch, now, has_change=busy != watch.busy):
        return replace(watch, busy=busy, calmed=watch.busy - busy), True
    return watch, False


def count_pause(watch: HangWatch, now: float) -> float:
    """Return the seconds until the next tick: less than the period if the timeout will be over before."""
    if watch.looked_at is None or watch.told is not None:
        return watch.period
    beyond = count_seconds(measure(watch, now + watch.period)) - watch.timeout
    return watch.period - beyond if 0 <= beyond < watch.period else watch.period


def look(watch: HangWatch, now: float, looks: Mapping[int, Look]) -> HangWatch:
    """Take what a look has shown."""
    ranks = {rank: _follow(watch, rank, seen, now) for rank, seen in looks.items()}
    has_progress = any(
        ranks[rank].idle_since > known.idle_since for rank, known in watch.ranks.items() if rank in ranks
    )
    longest = _longest(watch, now) if has_progress else watch.longest
    told = watch.told
    if told is not None and any(rank not in told or _has_moved(told[rank], seen) for rank, seen in looks.items()):
        told = None
    return replace(watch, ranks=ranks, looked_at=now, longest=longest, told=told)


def tell(watch: HangWatch) -> HangWatch:
    """Take note that this hang was told: it is not told again."""
    return replace(watch, told={rank: known.look for rank, known in watch.ranks.items()})


def measure(watch: HangWatch, now: float) -> dict[int, Stillness]:
    """Return how long each rank has been still; those with a sign since the last look are not."""
    found = {rank: Stillness(Place(), waits=False, same=0.0, idle=0.0) for rank in watch.signs}
    for rank in found.keys() & watch.ranks.keys():
        known = watch.ranks[rank]
        same, idle = now - known.same_since, now - known.idle_since
        found[rank] = Stillness(known.look.place, known.look.waits, same, idle)
    return found


def count_seconds(ranks: Mapping[int, Stillness]) -> float:
    """Return for how many seconds no rank has made progress."""
    waiting = {rank for rank, still in ranks.items() if still.waits}
    return min(
        (max(still.idle, still.same / _SPIN if waiting - {rank} else 0.0) for rank, still in ranks.items()), default=0.0
    )


def _follow(watch: HangWatch, rank: int, seen: Look, now: float) -> _Rank:
    """Return what is known of a rank after one look more."""
    known = watch.ranks.get(rank)
    if known is None or _has_moved(known.look, seen):
        is_computing = rank in watch.busy or seen.is_running or seen.has_running_child or seen.is_gpu_busy
        since = now if is_computing and not seen.is_open else _begin(watch, rank, now)
        return _Rank(seen, now, since, since)
    seconds, before = now - known.looked_at, known.look
    if abs(seen.moved - before.moved) > _TRICKLE * seconds and not seen.waits:
        return _Rank(seen, now, now, now)
    # On a machine with too few processors, a process that computes may get next to no time.
    is_computed_for = seen.has_running_child or abs(seen.children_cpu - before.children_cpu) > _allow(seconds)
    is_computed_for |= seen.is_gpu_busy
    is_computing = seen.is_running or seen.cpu - before.cpu > _allow(seconds)
    is_computing |= seen.wakes - before.wakes > _POLLS * seconds or (is_computed_for and not seen.waits)
    idle_since = now if is_computing and not seen.is_open else known.idle_since
    return _Rank(seen, now, known.same_since, idle_since)


def _begin(watch: HangWatch, rank: int, now: float) -> float:
    """Return from when on a rank is still that has moved since its last look, and shows no progress at this one."""
    known = watch.ranks.get(rank)
    if known is not None and (rank not in watch.calmed or known.looked_at >= watch.previous_at):
        return now
    return max(watch.previous_at, now - watch.period)  # what a late tick has missed is unknown


def _has_moved(before: Look, after: Look) -> bool:
    counts = {before.collectives, after.collectives} - {""}
    return before.stack != after.stack or len(counts) > 1


def _allow(seconds: float) -> float:
    """Return the processor time that a rank which does nothing takes in some seconds, at most."""
    return _IDLE * seconds + _LOOK_COST


def _is_look_due(watch: HangWatch, now: float, *, has_change: bool) -> bool:
    """Whether it is time for another look: after a part of the timeout, after a change, and at the timeout's end."""
    at = watch.looked_at
    if at is None or now - at >= watch.timeout / _LOOKS:
        return True
    if has_change and now - at >= watch.timeout / _MOST_LOOKS:
        return True
    is_over = count_seconds(measure(watch, now)) >= watch.timeout > count_seconds(measure(watch, at))
    return is_over and watch.told is None


def _longest(watch: HangWatch, now: float) -> float:
    """Return the longest stillness, where the present one has just ended."""
    return max(watch.longest, count_seconds(measure(watch, now)))


# --- all nodes of a job -----------------------------------------------------------------------------------------------
#: Seconds after which a node of a large job takes it that no other node asks the nodes for their ranks, and the seconds
#: that each further node waits for those before it.
_UNASKED = 45.0
_TURN = 0.1
#: The timeout of a node that detects no hangs, and of one that can't tell yet.
NO_DETECTION = -1
NOT_YET = -2


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that has a rank: its node's name, its pid, and its number on the node."""

    host: str
    pid: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class JobStillness:
    """The ranks of all nodes."""

    seconds: float  # For how long no rank has made progress; 0 where that is not known of all nodes
    timeout: float  # The longest timeout of all nodes, in seconds
    ranks: Mapping[int, Stillness]  # How long each rank has been still, by global rank
    owners: Mapping[int, Owner]  # The worker of each rank
    #: Seconds until `seconds` may reach the timeout, at the earliest; below 0 where a node's next look is due
    left: float = 0.0
    without: tuple[str, ...] = ()  # Names of nodes that detect no hangs


def count_wait(group_rank: int, *, over_for: float, unasked_for: float) -> float:
    """Return the seconds until a node of a large job asks all nodes itself; 0 or less if it is its turn.

    If each of 1,000 nodes asked all nodes, there would be a million answers. Rank 0 asks at once, or never if its
    workers have ended; then the next node gets its turn a moment later.
    """
    turn = group_rank * _TURN
    return 0.0 if group_rank == 0 else max(turn - over_for, _UNASKED + turn - unasked_for)


def describe_rank(rank: int, still: Stillness, *, pid: int, local_rank: int) -> dict[str, Any]:
    """Return what a node tells of one of its ranks; `core.job.node_status` has the types."""
    place = {each.name: getattr(still.place, each.name) for each in fields(Place)}
    seen = {"same": still.same, "idle": still.idle, "waits": still.waits}
    return {"rank": rank, "pid": pid, "local_rank": local_rank, **seen, **place}


def join_nodes(documents: Sequence[Document], *, expected: int, round_number: int) -> JobStillness:
    """Put the answers of the nodes together."""
    ranks, owners, now = {}, {}, {}
    for document in documents:
        for worker in document["workers"]:
            place = Place(**{each.name: worker[each.name] for each in fields(Place)})
            ranks[worker["rank"]] = still = Stillness(place, worker["waits"], worker["same"], worker["idle"])
            now[worker["rank"]] = replace(still, same=still.same + document["age"], idle=still.idle + document["age"])
            owners[worker["rank"]] = Owner(document["host"], worker["pid"], worker["local_rank"])
    timeouts = [document["timeout"] for document in documents]
    timeout, is_complete = max(timeouts, default=0.0), len(documents) == expected
    is_judged = min(timeouts, default=NOT_YET) >= 0 and all(one["round"] == round_number for one in documents)
    return JobStillness(
        seconds=count_seconds(ranks) if is_complete and is_judged else 0.0,
        timeout=timeout,
        ranks=ranks,
        owners=owners,
        left=(timeout - count_seconds(now) if is_judged else timeout) if is_complete else 0.0,
        without=tuple(document["host"] for document in documents if document["timeout"] == NO_DETECTION),
    )


# --- an exception that has ended a main thread, as the worker itself reports it (see `worker_start`) -----------------
# So the agent may count it as failed, though its process lives on. A traceback on stderr may be of a handled one.
#: At the end of a program multiprocessing calls these functions; each may wait, for the reason beside it.
_OF_MULTIPROCESSING = {
    "_exit_function": "a child process still runs",
    "__call__": "a queue, a pool or another object of multiprocessing does not end",
}
#: Threads, and characters of an exception, that a line shows.
_MOST_NAMES = 3
_MOST_SUMMARY = 120


@dataclass(frozen=True, slots=True)
class Uncaught:
    """An exception that has ended a main thread."""

    at: float  # Monotonic seconds
    exception: ExceptionText  # Its class and its message, without a traceback
    #: Name of each other thread for which Python waits at its end, by its number in hex
    threads: tuple[tuple[str, str], ...] = ()


def read_uncaught(text: str) -> Uncaught | None:
    """Read what a worker has written: the moment, the class, the message, and each thread's number and name."""
    at, *fields = text.split("\x1f")
    try:
        name, message, *threads = fields
        exception = ExceptionText(name, message)
        exception.lines = (exception.summary,)
        named = (thread.partition(" ") for thread in threads)
        return Uncaught(float(at), exception, tuple((number, name) for number, _, name in named))
    except ValueError:
        return None


def confirm(written: ExceptionText | None, told: Uncaught) -> ExceptionText:
    """Return the exception that stderr shows, with its traceback, if the worker reports the same; else that."""
    if written is None or written.name != told.exception.name:
        return told.exception
    written.is_certain = True
    return written


def describe_survival(told: Uncaught, dump: Dump | None = None) -> str:
    """Say in a clause what keeps the process alive, such as `thread loader still runs`."""
    stacks = parse_stacks("" if dump is None else dump.text)
    frames = () if stacks.main is None else stacks.main.frames
    if frames and not is_in_shutdown(stacks):  # exit functions and destructors come when these threads have ended
        function = next((each.function for each in frames if each.file.endswith("/multiprocessing/util.py")), "")
        return _OF_MULTIPROCESSING.get(function) or f"it {_describe_place(find_place(stacks))}"
    text = "" if dump is None or len(stacks.threads) == 1 else dump.text
    living = [name for number, name in told.threads if not text or f"0x{number:0>16}" in text]
    if living:
        more = f" and {len(living) - _MOST_NAMES} more" if len(living) > _MOST_NAMES else ""
        names = f"{', '.join(living[:_MOST_NAMES])}{more}"
        return f"thread {names} still runs" if len(living) == 1 else f"threads {names} still run"
    if dump is not None and dump.problem:
        return f"it {dump.problem}"
    return "another thread still runs" if frames else "an exit function, a destructor or native code still runs"


def place_failed(told: Uncaught, dump: Dump) -> Place:
    """Return the place of a rank that has failed and lives, for the report on a job that hangs."""
    said = told.exception.summary[:_MOST_SUMMARY]
    return Place(problem=f"{RAISED}{said}, and has not ended: {describe_survival(told, dump)}")


def place_last_words(place: Place, written: ExceptionText) -> Place:
    """Return the place of a rank whose last output is an exception: it may have failed, or have handled it."""
    said = written.summary[:_MOST_SUMMARY]
    return Place(problem=f"{WROTE}{said} and nothing after it, and {place.problem or _describe_place(place)}")


def _describe_place(place: Place) -> str:
    return f"is in {place.function} ({place.file.rpartition('/')[2]}:{place.line})"
