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
- The job hangs when every rank that runs has been still for the timeout. One rank with progress is enough for none.
- If the observer itself did not run, it has seen nothing: all begins anew.
- `auto`: the timeout is `_RHYTHM` times the longest stillness of this round that ended by itself, at least `FLOOR`.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stack_groups import Place
from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Part of a processor that the background threads and processes of a rank that waits take at most.
_IDLE = 0.02
#: Times per second that the main thread of a rank wakes up which polls a file, a queue or a data loader, at most. One
#: that takes pieces from a network wakes up more often, and needs little processor time.
_POLLS = 20
#: Bytes per second that they read and write at most: a service that sends metrics.
_TRICKLE = 10_000
#: A rank that computes at one place for so many timeouts, itself or by its children, while another rank waits, is in a
#: spinning wait, or its children are in an endless loop.
_SPIN = 10
#: Looks within a timeout where nothing seems to change, and ticks.
_LOOKS = 4
_TICKS = 8
#: Seconds between two ticks, at most. A verdict is late by one tick at most, until the last sign is seen. With several
#: nodes, their answers come on top; all of it should take less than 2 s. Shorter ticks cost more: with 0.5 s, 8 idle
#: workers took 0.13 to 0.17 % of a core.
_LONGEST_TICK = 0.8
#: Looks within a timeout, at most, where the ranks that compute change all the time.
_MOST_LOOKS = 64
#: Seconds of processor time that a look itself takes of a rank, at most.
_LOOK_COST = 0.03
#: Ticks, and seconds, without this process that are too many.
_ABSENCE = 5
_ABSENCE_SECONDS = 3.0
#: With `auto`: the shortest timeout in seconds, and how many times the longest stillness it is.
FLOOR = 300.0
_RHYTHM = 10


@dataclass(frozen=True, slots=True)
class Signs:
    """What is read of a rank at each tick.

    Args:
        marks: Counts of its heartbeats and of its output: a change is progress.
        cpu: Seconds of processor time of the worker's process.
    """

    marks: tuple[int, ...]
    cpu: float


@dataclass(frozen=True, slots=True)
class Look:
    """One rank at one moment.

    Args:
        stack: Equal where the main thread is at the same place of the same calls, or is unknown for the same reason.
        place: That place.
        collectives: What the flight recorder has counted; "" where it doesn't tell.
        is_open: Whether it tells of a collective that has not ended.
        is_running: Whether a thread of the worker's process has a processor, or waits for one.
        has_running_child: Whether one of its descendants does so.
        wakes: Times that the main thread has slept and gone on.
        cpu: Seconds of processor time of the worker's process.
        children_cpu: The same of its descendants.
        moved: Bytes that all of them have read and written.
        is_gpu_busy: Whether a GPU that the worker's process uses has computed lately.
    """

    stack: str
    place: Place = Place()
    collectives: str = ""
    is_open: bool = False
    is_running: bool = False
    has_running_child: bool = False
    wakes: int = 0
    cpu: float = 0.0
    children_cpu: float = 0.0
    moved: int = 0
    is_gpu_busy: bool = False

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others."""
        return self.is_open or self.place.is_waiting


@dataclass(frozen=True, slots=True)
class Stillness:
    """How long a rank has been without progress.

    Args:
        place: Where it is.
        waits: Whether it waits for others.
        same: Seconds in which stack, collectives and signs did not change.
        idle: The part of them, up to now, in which its processes did nothing either.
    """

    place: Place
    waits: bool
    same: float
    idle: float


@dataclass(frozen=True, slots=True)
class _Rank:
    """What is known of a rank since its last progress."""

    look: Look
    looked_at: float
    same_since: float
    idle_since: float


@dataclass(frozen=True, slots=True)
class HangWatch:
    """The watch over one round's ranks of one node.

    Args:
        given: The timeout in seconds; 0 for `auto`.
        longest_tick: Seconds between two ticks, at most.
        signs: Of the last tick, by rank.
        busy: Ranks that used a processor in the tick before the last look.
        calmed: Ranks that did so in the tick before the look before, and not in that of the last look.
        ranks: What is known of ranks since their last progress.
        ticked_at: When the last tick was, or None.
        previous_at: When the tick before that was.
        looked_at: When the last look since the last sign was, or None.
        longest: The longest stillness that ended by itself.
        told: The looks of the hang that was told, or None.
    """

    given: float
    longest_tick: float = _LONGEST_TICK
    signs: Mapping[int, Signs] = field(default_factory=dict)
    busy: frozenset[int] = frozenset()
    calmed: frozenset[int] = frozenset()
    ranks: Mapping[int, _Rank] = field(default_factory=dict)
    ticked_at: float | None = None
    previous_at: float = 0.0
    looked_at: float | None = None
    longest: float = 0.0
    told: Mapping[int, Look] | None = None

    @property
    def timeout(self) -> float:
        """Seconds without progress that are a hang."""
        return self.given or max(FLOOR, _RHYTHM * self.longest)

    @property
    def period(self) -> float:
        """Seconds between two ticks, at most."""
        return min(self.timeout / _TICKS, self.longest_tick)


def tick(watch: HangWatch, now: float, signs: Mapping[int, Signs]) -> tuple[HangWatch, bool]:
    """Take what a tick has read.

    Args:
        watch: What is known.
        now: Monotonic seconds.
        signs: Of each rank that runs.

    Returns:
        What is known now, and whether to look at the ranks.
    """
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
    """Return the seconds until the next tick: the period, or less if no rank will have made progress for the timeout.

    Args:
        watch: What is known.
        now: Monotonic seconds.
    """
    if watch.looked_at is None or watch.told is not None:
        return watch.period
    beyond = count_seconds(measure(watch, now + watch.period)) - watch.timeout
    return watch.period - beyond if 0 <= beyond < watch.period else watch.period


def look(watch: HangWatch, now: float, looks: Mapping[int, Look]) -> HangWatch:
    """Take what a look has shown.

    Args:
        watch: What is known.
        now: Monotonic seconds.
        looks: Of each rank that runs.
    """
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
    """Return how long each rank has been still; those with a sign since the last look are not.

    Args:
        watch: What is known.
        now: Monotonic seconds.
    """
    found = {}
    for rank in watch.signs:
        known = watch.ranks.get(rank)
        if known is None:
            found[rank] = Stillness(Place(), waits=False, same=0.0, idle=0.0)
        else:
            same, idle = now - known.same_since, now - known.idle_since
            found[rank] = Stillness(known.look.place, waits=known.look.waits, same=same, idle=idle)
    return found


def count_seconds(ranks: Mapping[int, Stillness]) -> float:
    """Return for how many seconds no rank has made progress.

    Args:
        ranks: All ranks that run, of one node or of a whole job.
    """
    waiting = {rank for rank, still in ranks.items() if still.waits}
    return min((_count(still, others_wait=bool(waiting - {rank})) for rank, still in ranks.items()), default=0.0)


def _count(still: Stillness, *, others_wait: bool) -> float:
    return max(still.idle, still.same / _SPIN if others_wait else 0.0)


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
