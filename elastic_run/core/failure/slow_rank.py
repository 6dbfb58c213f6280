"""Which rank the others wait for, again and again: from the moments at which the ranks have called their collectives.

Pure: what each node knows of the calls comes in at intervals; the share of each rank and the slow ranks come out.

- Only collectives count in which each rank waits for all others. The others have waited for the rank that called last,
  from the typical call (the lower median) to the last one.
- A backend that measures its collectives, such as NCCL, needs no clock: the last rank has spent the least time in one,
  so minus the duration stands for the moment. gloo's recorder has the moments of calls, by each node's own clock:
  between nodes they are ages, and a wait that is not longer than question and answer took counts for nothing.
- A rank takes a window, the time between two answers with collectives, if the others have waited longer for it than for
  all other ranks of its group together. It is slow if it takes most windows of five minutes: ranks that differ at
  random do so in turns, and a rank that saves a checkpoint does so now and then.
"""

from __future__ import annotations

from itertools import pairwise

from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    Document = Mapping[str, Any]

#: Part of a window for which the others have waited for the rank that takes it, at least.
_NOTABLE = 0.05
#: Part of the windows that a slow rank has taken, the number of windows, and part of the time that it costs, at least.
_MOST = 0.8
_LEAST_WINDOWS = 20
_COSTLY = 0.1
#: Part of the mean time between two collectives below which one follows the other closely.
_CLOSE = 0.8
_MICROSECOND = 1e-6
#: Answers of a node's ranks that are put together: the last rank may tell of a call much later than the others.
ANSWERS = 3


# --- what is known of the calls ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as some ranks of its group have called it; moments are in seconds."""

    rank: int  # The rank that called last
    last: float
    typical: float


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of one group since the last answer, as the ranks of one node have called them."""

    group: str  # A name that no other group has
    size: int  # Ranks of the group on all nodes
    is_measured: bool  # Whether the moments stand for durations
    ranks: tuple[int, ...]  # The group's ranks on this node
    calls: Mapping[int, Call]  # By the number of the collective; those of the last `ANSWERS`
    scale: float = 1.0  # How many new collectives there were for each that is told
    new: int = 0  # Collectives of the last answer


def join_ranks(answers: Sequence[Mapping[int, Sequence[Document]]], counted: Mapping[str, int]) -> list[Calls]:
    """Put answers of one node's recorders together, by global rank, without the collectives that were counted."""
    found: dict[str, dict[int, list[Document]]] = {}
    for rank, answer in (told for each in answers for told in each.items()):
        for group in answer:
            found.setdefault(group["group"], {}).setdefault(rank, []).append(group)
    return [_join_group(group, of_rank, counted.get(group, -1)) for group, of_rank in found.items()]


def _join_group(name: str, of_rank: Mapping[int, Sequence[Document]], counted: int) -> Calls:
    told = {rank: (call for group in groups for call in group["calls"]) for rank, groups in of_rank.items()}
    moments = {rank: {number: at for number, at in calls if number > counted} for rank, calls in told.items()}
    calls = {}
    for number in sorted(set.intersection(*map(set, moments.values()))):
        ordered = sorted((own[number] * _MICROSECOND, rank) for rank, own in moments.items())
        last, rank = ordered[-1]
        calls[number] = Call(rank, last, typical=ordered[(len(ordered) - 1) // 2][0])
    one = next(iter(of_rank.values()))[-1]
    scale = max(groups[-1]["scale"] for groups in of_rank.values())
    return Calls(name, one["size"], one["is_measured"], tuple(of_rank), calls, scale, len(one["calls"]))


def describe_calls(found: Sequence[Calls], now: float, most: int) -> list[dict[str, Any]]:
    """Return what a node tells of its calls at a moment of its own clock; of each group the newest, `most` in all."""
    limit = max(1, most // max(1, len(found)))
    return [_describe_group(each, 0.0 if each.is_measured else now, limit) for each in found]


def _describe_group(each: Calls, base: float, limit: int) -> dict[str, Any]:
    first, end = 0, max(each.calls, default=0) + 1
    # Two whole blocks: nodes that are asked at slightly different moments have one of them in common.
    if len(each.calls) > limit:
        end -= end % -(-limit // 2)
        first = end - limit
    told = [
        [number, call.rank, *(round((moment - base) / _MICROSECOND) for moment in (call.last, call.typical))]
        for number, call in each.calls.items()
        if first <= number < end
    ]
    scale = each.scale * max(1.0, each.new / max(1, len(told)))
    fields = {"group": each.group, "size": each.size, "is_measured": each.is_measured, "ranks": each.ranks}
    return {**fields, "scale": scale, "calls": told}


def read_calls(groups: Sequence[Any], at: float) -> list[Calls]:
    """Read what a node has told, at a moment of the reader's clock; groups that are not of that form are left out."""
    found = []
    for group in groups:
        try:
            base = 0.0 if group["is_measured"] is True else at
            ranks, size, scale = tuple(map(int, group["ranks"])), int(group["size"]), float(group["scale"])
            calls = {
                int(number): Call(rank, base + last * _MICROSECOND, base + typical * _MICROSECOND)
                for number, rank, last, typical in group["calls"]
                if rank in ranks
            }
            found.append(Calls(str(group["group"]), size, group["is_measured"] is True, ranks, calls, scale))
        except (TypeError, ValueError, KeyError, OverflowError):
            continue
    return found


# --- one window -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Window:
    """The time between two answers."""

    ended_at: float
    seconds: float
    ranks: frozenset[int]  # The ranks of which it is known whether the others waited for them
    waits: Mapping[int, float]  # For how many seconds the others waited for each rank; ranks without waits are not here
    taken_by: frozenset[int]  # The ranks that have taken it: one at most of each group
    counted: Mapping[str, int]  # The number of the last collective of each group that is in this window or one before


def measure(parts: Iterable[Calls], watch: SlowRanks, now: float, error: float) -> Window | None:
    """Return the window that ends now; None if no collective after those that were counted is known of all ranks."""
    seconds, counted = now - (watch.since or 0.0), watch.counted
    groups: dict[str, list[Calls]] = {}
    for part in parts:
        groups.setdefault(part.group, []).append(part)
    members: dict[str, frozenset[int]] = {}
    waits: dict[str, dict[int, float]] = {}
    last: dict[str, int] = {}
    for name, nodes in groups.items():
        ranks = frozenset(rank for node in nodes for rank in node.ranks)
        calls = _join_nodes(nodes, counted.get(name, -1)) if len(ranks) == nodes[0].size > 1 else {}
        if calls:
            members[name] = ranks
            last[name] = max(calls)
            longest = _find_longest([*calls.values()], is_measured=nodes[0].is_measured)
            scale = max(node.scale for node in nodes)
            waits[name] = _add_waits(longest, scale, seconds, error if len(nodes) > 1 else 0.0)
    if not members:
        return None
    own: dict[int, float] = {}
    taken = set()
    for name, of_rank in waits.items():
        for rank, wait in of_rank.items():
            # A rank that has waited itself, in another group, is late for that: this time is not its own.
            others = (other for other in waits if other != name and rank in members[other])
            left = wait - max((_count_others(waits[other], rank) for other in others), default=0.0)
            if left > own.get(rank, 0.0):
                own[rank] = left
                if left > _count_others(of_rank, rank) and left >= _NOTABLE * seconds:
                    taken.add(rank)
    return Window(now, seconds, frozenset().union(*members.values()), own, frozenset(taken), {**counted, **last})


def _join_nodes(nodes: Sequence[Calls], counted: int) -> dict[int, Call]:
    """Return the collectives after the one that was counted last which all nodes of a group know, in their order."""
    joined = {}
    for number in sorted(set.intersection(*({n for n in node.calls if n > counted} for node in nodes))):
        last = max((node.calls[number] for node in nodes), key=lambda call: call.last)
        typical = sorted((node.calls[number].typical, len(node.ranks)) for node in nodes)
        left = (nodes[0].size - 1) // 2
        while left >= typical[0][1]:
            left -= typical.pop(0)[1]
        joined[number] = Call(last.rank, last.last, typical[0][0])
    return joined


def _find_longest(calls: Sequence[Call], *, is_measured: bool) -> list[Call]:
    """Return the collectives whose waits count.

    The moments of calls do not tell whether a rank waits at once, or goes on and waits later, as DDP does with its
    buckets. So of collectives that follow each other closely, only the longest wait counts.
    """
    if is_measured:
        return list(calls)
    mean = (calls[-1].typical - calls[0].typical) / max(1, len(calls) - 1)
    chosen = [calls[0]]
    for before, call in pairwise(calls):
        if call.typical - before.typical >= _CLOSE * mean:
            chosen.append(call)
        elif call.last - call.typical > chosen[-1].last - chosen[-1].typical:
            chosen[-1] = call
    return chosen


def _add_waits(calls: Iterable[Call], scale: float, seconds: float, error: float) -> dict[int, float]:
    waits: dict[int, float] = {}
    for call in calls:
        wait = call.last - call.typical
        if wait > error:
            waits[call.rank] = min(seconds, waits.get(call.rank, 0.0) + wait * scale)
    return waits


def _count_others(waits: Mapping[int, float], rank: int) -> float:
    return sum(wait for other, wait in waits.items() if other != rank)


# --- the windows of five minutes --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SlowRanks:
    """The watch over the ranks of one round."""

    span: float  # Seconds in which a slow rank is slow
    recent: float  # Seconds of which `count_shares` tells
    since: float | None = None  # When the last window ended, or None before the first answer
    windows: tuple[Window, ...] = ()
    told: frozenset[int] = field(default_factory=frozenset)  # Slow ranks that were told

    @property
    def counted(self) -> Mapping[str, int]:
        """The number of the last collective of each group that is in a window."""
        return self.windows[-1].counted if self.windows else {}


def add(watch: SlowRanks, parts: Iterable[Calls], now: float, error: float = 0.0) -> SlowRanks:
    """Add an answer of all nodes; without collectives the window goes on."""
    if watch.since is None:
        return replace(watch, since=now)
    window = measure(parts, watch, now, error)
    if window is None:
        return watch
    windows = [*watch.windows, window]
    while len(windows) > _LEAST_WINDOWS and windows[1].ended_at - windows[1].seconds <= now - watch.span:
        del windows[0]
    shares = _count_shares(windows)
    told = frozenset(rank for rank in watch.told if shares.get(rank, 0.0) >= _NOTABLE)
    return replace(watch, since=now, windows=tuple(windows), told=told)


def count_shares(watch: SlowRanks, now: float) -> dict[int, float]:
    """Return the share of the last minute in which the others waited for each rank, as far as it is known."""
    return _count_shares([window for window in watch.windows if window.ended_at > now - watch.recent])


def _count_shares(windows: Sequence[Window]) -> dict[int, float]:
    seconds = sum(window.seconds for window in windows)
    shares = dict.fromkeys(sorted(frozenset().union(*(window.ranks for window in windows))), 0.0)
    for window in windows:
        for rank, wait in window.waits.items():
            shares[rank] += wait / seconds
    return shares


def find_slow(watch: SlowRanks, now: float) -> dict[int, float]:
    """Return the slow ranks that were not told yet, each with its share of the time."""
    windows = watch.windows
    if len(windows) < _LEAST_WINDOWS or windows[0].ended_at - windows[0].seconds > now - watch.span:
        return {}
    return {
        rank: share
        for rank, share in _count_shares(windows).items()
        if share > _COSTLY
        and rank not in watch.told
        and sum(rank in window.taken_by for window in windows) >= _MOST * len(windows)
    }


def tell(watch: SlowRanks, ranks: Iterable[int]) -> SlowRanks:
    """Take note that these ranks were told."""
    return replace(watch, told=watch.told.union(ranks))
