"""Rounds of many nodes: how long they take to form, and what they cost the coordinator.

All nodes start at once; the clock runs until the last one is in the round and has seen that rank 0's store listens. The
coordinator and one node are one real agent's, in one process as in a real job. The other nodes share two processes;
`crowd.LightNode` says what is light about them. Where that is said they are real sessions with all their threads.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import monotonic_ns, sleep
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Bar, Figure, alone, compare, compared, take_turns
from benchmarks.job import BenchmarkError, Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.installation import Effort, Installation

_ROOT = Path(__file__).resolve().parents[1]
#: Seconds that a round may take at each number of nodes; the others are for information.
_BARS = {1000: 0.3, 10_000: 5.0}
_SIZES = (256, 1000, 4000, 10_000)
#: Where torch's turn comes as often as ours, and where it is tried once.
_BESIDE_TORCH, _BEYOND_TORCH = 64, 256
#: Seconds after which a round is given up, and torch's where it is only tried.
_DEADLINE = 120.0
_WAIT_LIMIT = 30.0
#: Operations and bytes per node may differ so much between the smallest and the largest round.
_GROWTH = 2.0
_RUN_ID = "crowd"


@dataclass(frozen=True)
class Round:
    """What it took to form one.

    Args:
        nodes: Of so many nodes.
        seconds: From the start of the first node, or the arrival of the last, to the last one's being in it.
        frames: That the coordinator has got and sent.
        transferred: Bytes of them.
        crowd_cpu: Seconds of CPU time of all nodes but the first.
    """

    nodes: int
    seconds: float
    frames: int = 0
    transferred: int = 0
    crowd_cpu: float = 0.0


def measure(_: Installation, effort: Effort) -> list[Figure]:
    """Measure at each size, beside torch where that can do it."""
    beside = take_turns(
        {
            "elastic-run": partial(form_round, _BESIDE_TORCH),
            "torchrun": partial(form_round_of_torch, _BESIDE_TORCH),
        },
        rounds=effort.rounds,
    )
    sizes = [size for size in _SIZES if size <= effort.nodes]
    rounds = {_BESIDE_TORCH: [each for turn in beside["elastic-run"] for each in turn]}
    rounds |= {size: [form_round(size) for _ in range(effort.rounds)] for size in sizes}
    figures = [_figure_beside_torch(beside), *(_time_figure(size, rounds[size]) for size in sizes)]
    figures += [_arrival_figure(size, effort) for size in sizes if size in _BARS]
    return figures + _growth_figures(rounds)


def _figure_beside_torch(beside: Mapping[str, list[list[Round]]]) -> Figure:
    return compared(
        compare(beside, attrgetter("seconds")),
        benchmark="scale",
        name=_name(_BESIDE_TORCH),
        unit="s",
        note=_note(beside["elastic-run"][-1][-1]),
        headline=f"the launcher alone: the start of {_BESIDE_TORCH} simulated nodes together to the last rank",
        plots={"scale": f"{_BESIDE_TORCH} nodes"},
    )


def _time_figure(size: int, rounds: Sequence[Round]) -> Figure:
    seconds = [each.seconds for each in rounds]
    return alone(
        seconds,
        benchmark="scale",
        name=_name(size),
        unit="s",
        bar=Bar(_BARS[size]) if size in _BARS else None,
        note=f"lowest {min(seconds):.3g} s; {_note(rounds[-1])}{_try_torch(size) if size == _BEYOND_TORCH else ''}",
        plots={"scale": f"{size} nodes"},
    )


def _name(size: int) -> str:
    return f"{size} nodes started at once, until the last one is in the round"


def _note(one: Round) -> str:
    return f"the other nodes used {one.crowd_cpu:.2g} s of CPU time"


def _arrival_figure(size: int, effort: Effort) -> Figure:
    seconds = [form_round(size, is_last_late=True).seconds for _ in range(effort.rounds)]
    return alone(
        seconds,
        benchmark="scale",
        name=f"{size - 1} nodes waiting, from the start of the last one until all are in the round",
        unit="s",
        bar=None,
        note=f"lowest {min(seconds):.3g} s",
    )


def _growth_figures(rounds: dict[int, list[Round]]) -> list[Figure]:
    each = {
        "frames": {size: [one.frames / size for one in some] for size, some in rounds.items()},
        "kB": {size: [one.transferred / size / 1000 for one in some] for size, some in rounds.items()},
    }
    return [_growth_figure(unit, per_node) for unit, per_node in each.items()]


def _growth_figure(unit: str, per_node: dict[int, list[float]]) -> Figure:
    smallest, largest = min(per_node), max(per_node)
    medians = {size: median(some) for size, some in per_node.items()}
    return Figure(
        benchmark="scale",
        name=f"growth of the coordinator's {unit} per node from {smallest} to {largest} nodes",
        unit="",
        bar=Bar(_GROWTH),
        elastic_run=medians[largest] / medians[smallest],
        values={f"{size} nodes": [some] for size, some in per_node.items()},
        note=", ".join(f"{value:.3g} with {size} nodes" for size, value in medians.items()),
    )


# --- rounds ----------------------------------------------------------------------------------------------------------
def form_round(nodes: int, *, kind: str = "light", crowds: int = 2, is_last_late: bool = False) -> Round:
    """Let nodes meet at a coordinator."""
    with ExitStack() as stack:
        host = stack.enter_context(_program("crowd", "host", str(nodes), _RUN_ID))
        port = host.wait_lines(1, starting="listening")[0][1]
        host.wait_lines(1, starting="joined")
        late = 1 if is_last_late else 0
        shares = [*_share(nodes - 1 - late, crowds), *([1] * late)]
        place = (kind, f"127.0.0.1:{port}", _RUN_ID, str(nodes))
        programs = [
            stack.enter_context(_program("crowd", *place, str(1 + sum(shares[:index])), str(share)))
            for index, share in enumerate(shares)
        ]
        for program in programs:
            program.wait_lines(1, starting="ready")
        if is_last_late:
            for program in programs[:-1]:
                program.poke()
            for program in programs[:-1]:
                program.wait_lines(1, starting="joined", deadline=_DEADLINE)
            programs = [*programs[-1:], *programs[:-1]]
        before = _traffic(host, 1)
        begun = monotonic_ns()
        for program in programs if not is_last_late else programs[:1]:
            program.poke()
        formed = [program.wait_lines(1, starting="formed", deadline=_DEADLINE)[0] for program in (*programs, host)]
        after = _traffic(host, 2)
    return Round(
        nodes,
        (max(int(words[1]) for words in formed) - begun) / 1e9,
        after["frames"] - before["frames"],
        after["bytes"] - before["bytes"],
        sum(float(words[2]) for words in formed if len(words) > 2),
    )


def spend_idle(nodes: int, seconds: float) -> float:
    """Return the seconds of CPU time that the coordinator of a round of light nodes spends while nothing happens."""
    with ExitStack() as stack:
        host = stack.enter_context(_program("crowd", "host", str(nodes), _RUN_ID))
        port = host.wait_lines(1, starting="listening")[0][1]
        host.wait_lines(1, starting="joined")
        place = ("light", f"127.0.0.1:{port}", _RUN_ID, str(nodes), "1", str(nodes - 1))
        crowd = stack.enter_context(_program("crowd", *place))
        crowd.wait_lines(1, starting="ready")
        crowd.poke()
        crowd.wait_lines(1, starting="formed", deadline=_DEADLINE)
        sleep(seconds)
        before = _traffic(host, 1)["cpu"]
        sleep(seconds)
        return float(_traffic(host, 2)["cpu"] - before)


def form_round_of_torch(nodes: int, deadline: float = _DEADLINE) -> Round:
    """Let torch's handlers meet at torch's own server."""
    first, second = _share(nodes, 2)
    with _program("torch_crowd", "0", str(nodes), str(first)) as one:
        port = one.wait_lines(1, starting="listening")[0][1]
        with _program("torch_crowd", port, str(nodes), str(second)) as other:
            return Round(nodes, _run([one, other], deadline))


def _try_torch(nodes: int) -> str:
    """Return what to say of a round that is too large for torch."""
    try:
        return f"; torch: {form_round_of_torch(nodes, _WAIT_LIMIT).seconds:.3g} s"
    except BenchmarkError:
        return f"; torch: not within {_WAIT_LIMIT:g} s"


def _run(programs: Sequence[Job], deadline: float = _DEADLINE) -> float:
    """Let them begin; returns the seconds until all are in a round."""
    for program in programs:
        program.wait_lines(1, starting="ready")
    begun = monotonic_ns()
    for program in programs:
        program.poke()
    formed = [program.wait_lines(1, starting="formed", deadline=deadline)[0] for program in programs]
    return (max(int(words[1]) for words in formed) - begun) / 1e9


def _traffic(program: Job, answers: int) -> dict[str, Any]:
    program.poke()
    found: dict[str, Any] = json.loads(" ".join(program.wait_lines(answers, starting="{")[-1]))
    return found


def _share(nodes: int, parts: int) -> list[int]:
    return [nodes // parts + (part < nodes % parts) for part in range(parts)]


@contextmanager
def _program(name: str, *arguments: str) -> Iterator[Job]:
    module = f"benchmarks.{name}"
    with Job([sys.executable, "-m", module, *arguments], directory=_ROOT) as job:
        yield job
