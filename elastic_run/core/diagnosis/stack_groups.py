"""Which ranks are at the same place, and which are elsewhere.

Rules
- The place of a rank is the innermost frame of the user's program in its main thread. Python's own modules, installed
  packages and elastic-run are not the user's program; if nothing else is there, the innermost frame counts.
- Where that frame has called a library, the place is named after the function that it called: `all_reduce`, `backward`.
  Where a library has called a collective, such as a trainer, the place is named after the collective; where it waits
  for torch's DataLoader, after that: `__next__` would tell nothing.
- Ranks that wait for others come first, then the larger group: the odd one out comes last.
- A rank in a collective waits: NCCL spins and gloo sleeps, so processor time does not tell. So does a rank whose
  innermost call is in `torch.distributed`, which also has what computes (a model in FSDP) or writes (a checkpoint), or
  in DistributedDataParallel's own file, whose functions in C++ communicate.
- A program whose main thread has ended waits in `threading._shutdown` for its other threads, which is told instead.
- The rank to look at is one that has failed and lives; then one whose main thread has ended; then any that does not
  wait for others.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stack_text import parse_stacks
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elastic_run.core.diagnosis.stack_text import Frame, Stacks, Thread

#: The problem of a process that does not run until another process sends it SIGCONT.
STOPPED = "is stopped (SIGSTOP, or a shell's job control)"
#: Begins of the problems of ranks that have raised an exception, or have ended their main thread, and live on: by these
#: the nodes of a job know them from each other's documents.
RAISED = "has raised "
WROTE = "has written "
ENDED_MAIN = "has ended its main thread"
IGNORES = "ignores signal "
#: How likely the others wait for a rank: the smaller the number, the likelier.
FAILED, WROTE_LAST, HAS_ENDED, IS_ELSEWHERE, WAITS = range(5)
_DISTRIBUTED = "/torch/distributed/"
#: Parts of it that write and compute; their collectives are calls of `_COLLECTIVES`.
_NO_WAITS = ("/torch/distributed/checkpoint/", "/torch/distributed/tensor/")
_LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "/lib64/python3", "/elastic_run/", "<frozen "),
    _DISTRIBUTED,  # of a torch that is not installed, but built in place, or part of an archive
)
#: Files whose functions only communicate; those of torch are named after the collective.
_COLLECTIVES = tuple(f"/torch/distributed/{name}.py" for name in ("distributed_c10d", "_functional_collectives"))
_JOINING = ("/torch/distributed/rendezvous.py", "/elastic_run/worker/joining.py")
_DATA_PARALLEL = "/torch/nn/parallel/distributed.py"
_DATA_LOADER = "/torch/utils/data/dataloader.py"
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
        problem: What it is or does instead, where its stacks are not known, or no place.
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


def has_not_moved(before: Dump | None, after: Dump) -> bool:
    """Return whether a worker has not moved: its main thread is in the same calls, or the process is stopped.

    Args:
        before: An earlier dump of the worker, or None.
        after: A later dump.
    """
    if after.problem == STOPPED:
        return True
    if before is None or before.problem or after.problem:
        return False
    main = parse_stacks(after.text).main
    return main is not None and parse_stacks(before.text).main == main


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
    if is_in_shutdown(stacks):
        return Place(problem=f"{ENDED_MAIN}, and another thread still runs")
    own = _find_own(main.frames)
    frame, called = main.frames[own], [each for each in main.frames[:own] if each.function not in _WRAPPERS]
    collective = next((each for each in reversed(called) if each.file.endswith(_COLLECTIVES)), None)
    return Place(
        function=collective.function if collective else _name_call(called, frame),
        file=frame.file,
        line=frame.line,
        is_waiting=collective is not None or _communicates(called),
    )


def is_in_shutdown(stacks: Stacks) -> bool:
    """Whether the main thread has ended, and Python waits for the others; below that a function's worker has calls."""
    frames = () if stacks.main is None else stacks.main.frames
    return any(each.function == "_shutdown" and each.file.endswith("/threading.py") for each in frames)


def rank_suspicion(place: Place) -> int:
    """Return how likely the others wait for a rank that is at this place: `FAILED` to `WAITS`."""
    for suspicion, begins in ((FAILED, (RAISED,)), (WROTE_LAST, (WROTE,)), (HAS_ENDED, (ENDED_MAIN, IGNORES))):
        if place.problem.startswith(begins):
            return suspicion
    return WAITS if place.is_waiting else IS_ELSEWHERE


def _name_call(called: Sequence[Frame], frame: Frame) -> str:
    """Return the name of what a frame of the user's has called, innermost first; its own name if it is nothing."""
    if any(each.file.endswith(_DATA_LOADER) for each in called):
        return "DataLoader"
    return (called or [frame])[-1].function


def _communicates(called: Sequence[Frame]) -> bool:
    """Whether a rank waits for others in calls, innermost first, that are no collective of torch's."""
    if any(each.file.endswith(_JOINING) for each in called):
        return True
    file = called[0].file if called else ""
    is_distributed = _DISTRIBUTED in file and not any(part in file for part in _NO_WAITS)
    return is_distributed or file.endswith(_DATA_PARALLEL)


def _find_own(frames: tuple[Frame, ...]) -> int:
    """Return the position of the innermost frame of the user's program."""
    return next((at for at, frame in enumerate(frames) if not any(part in frame.file for part in _LIBRARIES)), 0)


def _order(place: Place) -> tuple[bool, bool]:
    return bool(place.problem), not place.is_waiting
