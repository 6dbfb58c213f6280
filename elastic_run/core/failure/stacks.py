"""Stacks of workers: what faulthandler writes as records, the place of each rank, and the ranks at the same place.

Source of the format: Python/traceback.c of CPython 3.9 to 3.14. Threads are listed from the newest to the oldest, the
main thread last. Of more than 100 threads, or frames of a thread, Python writes three dots in place of the rest.

- The place of a rank is the innermost frame of the user's program in its main thread. Python's own modules, installed
  packages and elastic-run are not the user's program; if nothing else is there, the innermost frame counts.
- Where that frame has called a library, the place is named after the function that it called: `all_reduce`, `backward`.
  Where a library has called a collective, such as a trainer, the place is named after the collective; where it waits
  for torch's DataLoader, after that: `__next__` would say nothing.
- A rank in a collective waits: NCCL spins and gloo sleeps, so processor time does not show it. So does a rank whose
  innermost call is in `torch.distributed`, except in parts that compute (a model in FSDP) or write (a checkpoint), or
  in DistributedDataParallel's own file, whose functions in C++ communicate.
"""

from __future__ import annotations

import re

from elastic_run import contract
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Python 3.14 adds the thread's name in brackets.
_THREAD = re.compile(r"(?:(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(.*)\])?|Stack) \(most recent call first\):$")
_STARTS = re.compile(r"^(?:(?:Current thread|Thread) 0x|Stack )", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a thread's stack."""

    file: str
    line: int  # 0 where Python doesn't know it
    function: str  # `<module>` for a file's top level


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a process."""

    frames: tuple[Frame, ...]  # Its calls, innermost first
    name: str = ""  # Its name, where Python tells it, or ""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The threads of a process."""

    threads: tuple[Thread, ...]  # As far as they are known, the oldest last
    is_cut: bool = False  # Whether there are more than Python writes, the main thread among them

    @property
    def main(self) -> Thread | None:
        """The thread with which the program began, or None where it is not known."""
        return None if self.is_cut or not self.threads else self.threads[-1]


def parse_stacks(text: str) -> Stacks:
    """Read a text of faulthandler's; other lines are passed over."""
    threads: list[tuple[str, list[Frame]]] = []
    is_cut = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            threads.append((thread[1] or "", []))
        elif (frame := _FRAME.match(line)) and threads and frame[1] != contract.STACK_HANDLER_FILE:
            threads[-1][1].append(Frame(frame[1], int(frame[2]) if frame[2] != "???" else 0, frame[3]))
        elif line == "...":
            is_cut = True
    return Stacks(tuple(Thread(tuple(frames), name) for name, frames in threads), is_cut)


def shorten_stacks(text: str, most: int) -> str:
    """Return at most so many characters: whole threads from the oldest on, or the main thread's innermost calls."""
    if len(text) <= most:
        return text
    starts = [match.start() for match in _STARTS.finditer(text)]
    kept = next((start for start in starts if len(text) - start <= most), starts[-1] if starts else 0)
    return text[kept : kept + most]


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
    """What is known of one worker at one moment."""

    text: str = ""  # What its faulthandler has written, or ""
    problem: str = ""  # Why that is missing or not whole, as what the worker is or does (`is stopped`), or ""
    details: str = ""  # What the kernel tells of its threads, or ""
    silence: float | None = None  # Seconds since its last output; None where not all of its output is seen


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is."""

    function: str = ""  # What it runs
    file: str = ""  # Path of the user's file, or ""
    line: int = 0  # The line in there
    is_waiting: bool = False  # Whether it waits for other ranks
    problem: str = ""  # What it is or does instead, where its stacks are not known, or no place


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that are at the same place."""

    place: Place
    ranks: tuple[int, ...]  # Global ranks, in order
    thread: Thread | None = None  # The main thread of the first of them


def group_dumps(dumps: Mapping[int, Dump]) -> tuple[Group, ...]:
    """Put ranks together that are at the same place, as `group_places` does, each group with its first main thread."""
    stacks = {rank: parse_stacks(dump.text) for rank, dump in dumps.items()}
    groups = group_places({rank: find_place(stacks[rank], dump.problem) for rank, dump in dumps.items()})
    return tuple(Group(group.place, group.ranks, stacks[group.ranks[0]].main) for group in groups)


def group_places(places: Mapping[int, Place]) -> tuple[Group, ...]:
    """Put ranks together that are at the same place: first those that wait for others, then the largest groups."""
    ranks: dict[Place, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place, []).append(rank)
    groups = [Group(place, tuple(own)) for place, own in ranks.items()]
    return tuple(sorted(groups, key=_order))


def shorten_groups(groups: Sequence[Group], most: int) -> tuple[Sequence[Group], tuple[int, ...], Sequence[Group]]:
    """Return the first groups, the ranks that are left out in the middle, and the last: the odd one out is there."""
    if len(groups) <= most:
        return groups, (), ()
    first, last = most // 2, len(groups) - (most - most // 2)
    return groups[:first], tuple(rank for group in groups[first:last] for rank in group.ranks), groups[last:]


def has_not_moved(before: Dump | None, after: Dump) -> bool:
    """Return whether a worker has not moved: its main thread is in the same calls, or the process is stopped."""
    if after.problem == STOPPED:
        return True
    if before is None or before.problem or after.problem:
        return False
    main = parse_stacks(after.text).main
    return main is not None and parse_stacks(before.text).main == main


def find_place(stacks: Stacks, problem: str = "") -> Place:
    """Return where a worker is."""
    main = stacks.main
    if main is None or not main.frames:
        cut = "has more than 100 threads, the main thread is not among those that Python shows"
        return Place(problem=problem or (cut if stacks.is_cut else "runs no Python code at the moment"))
    if is_in_shutdown(stacks):
        return Place(problem=f"{ENDED_MAIN}, and another thread still runs")
    frames = main.frames
    own = next((at for at, each in enumerate(frames) if not any(part in each.file for part in _LIBRARIES)), 0)
    frame, called = frames[own], [each for each in frames[:own] if each.function not in _WRAPPERS]
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


def _order(group: Group) -> tuple[bool, bool, int, tuple[int, ...]]:
    return bool(group.place.problem), not group.place.is_waiting, -len(group.ranks), group.ranks
