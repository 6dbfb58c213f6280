"""Which ranks are at the same place, and which are elsewhere.

Rules
- The place of a rank is the innermost frame of the user's program in its main thread. Python's own modules, installed
  packages and elastic-run are not the user's program; if nothing else is there, the innermost frame counts.
- Where that frame has called a library, the place is named after the function that it called: `all_reduce`, `backward`.
- Ranks that wait for others come first, then the larger group: the odd one out comes last. A rank inside
  `torch.distributed` waits: NCCL spins and gloo sleeps, so processor time does not tell.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stack_text import parse_stacks
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.core.diagnosis.stack_text import Frame, Stacks, Thread

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "/elastic_run/", "<frozen ")
_DISTRIBUTED = "/torch/distributed/"
#: Functions that only pass a call on.
_WRAPPERS = frozenset(("wrapper", "inner", "decorate_context", "_call_impl", "_wrapped_call_impl", "__call__", "_fn"))


@dataclass(frozen=True, slots=True)
class Dump:
    """What is known of one worker at one moment.

    Args:
        text: What its faulthandler has written, or "".
        problem: Why that is missing or not whole, as what the worker is or does (`is stopped`), or "".
        details: What the kernel tells of its threads, or "".
        silence: Seconds since its last output; None where not all of its output is seen.
    """

    text: str = ""
    problem: str = ""
    details: str = ""
    silence: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is.

    Args:
        function: What it runs.
        file: Path of the user's file, or "".
        line: The line in there.
        is_waiting: Whether it waits for other ranks.
        problem: What it is or does instead, where its stacks are not known.
    """

    function: str = ""
    file: str = ""
    line: int = 0
    is_waiting: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that are at the same place.

    Args:
        place: The place.
        ranks: Their global ranks, in order.
        thread: The main thread of the first of them, or None.
    """

    place: Place
    ranks: tuple[int, ...]
    thread: Thread | None = None


def group_dumps(dumps: Mapping[int, Dump]) -> tuple[Group, ...]:
    """Put ranks together that are at the same place.

    Args:
        dumps: By global rank.

    Returns:
        The groups: those that wait for others, then the largest, then those whose stacks are not known.
    """
    stacks = {rank: parse_stacks(dump.text) for rank, dump in dumps.items()}
    groups = group_places({rank: find_place(stacks[rank], dump.problem) for rank, dump in dumps.items()})
    return tuple(Group(group.place, group.ranks, stacks[group.ranks[0]].main) for group in groups)


def group_places(places: Mapping[int, Place]) -> tuple[Group, ...]:
    """Put ranks together that are at the same place.

    Args:
        places: By global rank.

    Returns:
        The groups, in the order of `group_dumps`, without threads.
    """
    ranks: dict[Place, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place, []).append(rank)
    groups = [Group(place, tuple(own)) for place, own in ranks.items()]
    return tuple(sorted(groups, key=lambda group: (*_order(group.place), -len(group.ranks), group.ranks)))


def shorten_groups(groups: Sequence[Group], most: int) -> tuple[Sequence[Group], tuple[int, ...], Sequence[Group]]:
    """Leave out groups of the middle where there are too many: the odd one out is among the last.

    Args:
        groups: In the order in which they are told.
        most: Groups that are kept.

    Returns:
        The groups before, the ranks that are left out, and the groups after them.
    """
    if len(groups) <= most:
        return groups, (), ()
    first, last = most // 2, len(groups) - (most - most // 2)
    return groups[:first], tuple(rank for group in groups[first:last] for rank in group.ranks), groups[last:]


def find_place(stacks: Stacks, problem: str = "") -> Place:
    """Return where a worker is.

    Args:
        stacks: Its threads.
        problem: What it is or does instead, where they are not known.
    """
    main = stacks.main
    if main is None or not main.frames:
        cut = "has more than 100 threads, the main thread is not among those that Python shows"
        return Place(problem=problem or (cut if stacks.is_cut else "runs no Python code at the moment"))
    own = _find_own(main.frames)
    frame, called = main.frames[own], main.frames[:own]
    names = [each.function for each in reversed(called) if each.function not in _WRAPPERS]
    return Place(
        function=names[0] if names else frame.function,
        file=frame.file,
        line=frame.line,
        is_waiting=any(_DISTRIBUTED in each.file for each in called),
    )


def _find_own(frames: tuple[Frame, ...]) -> int:
    """Return the position of the innermost frame of the user's program."""
    return next((at for at, frame in enumerate(frames) if not any(part in frame.file for part in _LIBRARIES)), 0)


def _order(place: Place) -> tuple[bool, bool]:
    return bool(place.problem), not place.is_waiting
