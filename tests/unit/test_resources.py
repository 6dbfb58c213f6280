"""The curves of the workers' processor time and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.report.event_log import find_mistake
from elastic_run.report.history_charts import Span, draw_resources
from elastic_run.report.job_history import fold
from tests.unit.test_event_log import event

if TYPE_CHECKING:
    from typing import Any

    from elastic_run.report.history_charts import Chart


def draw(*readings: tuple[float, list[int], list[float], list[int]]) -> list[Chart]:
    """Draw a job of one node from moments, ranks, seconds of processor time and MiB."""

    def put(name: str, at: float, **fields: Any) -> dict[str, Any]:
        return event(name, agent="a", time=at, monotonic=at, round=0, restart=0, **fields)

    formed = put("round_formed", 0.0, node_rank=0, nodes=1, workers=9, job="a", round_id="")
    started = [put("worker_started", 0.0, rank=rank) for rank in range(9)]
    events = [put("resources", at, ranks=ranks, cpu_s=cpu, memory_mib=memory) for at, ranks, cpu, memory in readings]
    (job,) = fold([formed, *started, *events])
    return draw_resources(job, Span(0.0, 100.0))


def test_curves_of_processor_time_and_memory() -> None:
    """Processor time is what was used between two readings; the path goes from the left to the right edge."""
    cpu, memory = draw((0, [0, 1], [0, 0], [100, 2048]), (50, [0, 1], [50, 5], [300, 2048]), (100, [0], [75], [200]))
    assert (cpu.title, cpu.top, cpu.others) == ("Processor time", "100 %", 0)
    assert {curve.rank: curve.text for curve in cpu.curves} == {0: "83 % on average", 1: "10 % on average"}
    assert next(curve.path for curve in cpu.curves if curve.rank == 0) == "M0.0 0.0L500.0 0.0L1000.0 60.0"
    assert [(curve.rank, curve.text) for curve in memory.curves] == [(0, "300 MiB"), (1, "2.0 GiB")]
    assert memory.top == "2.0 GiB"


def test_the_rank_that_stands_out_is_drawn() -> None:
    """Of many ranks six are drawn: those whose processor time is farthest from the median, also below it."""
    ranks = list(range(9))
    used = [40.0] * 9
    used[7] = 0.0
    cpu, _ = draw((0, ranks, [0.0] * 9, [1] * 9), (50, ranks, used, [1] * 9))
    assert [curve.rank for curve in cpu.curves] == [0, 1, 2, 3, 4, 7]
    assert (len(cpu.curves), cpu.others) == (6, 3)


def test_many_readings_are_thinned_out() -> None:
    """A page of a month's job stays small; the last reading is drawn."""
    readings = [(at / 100, [0], [at / 100], [at]) for at in range(10_001)]
    cpu, memory = draw(*readings)
    assert len(cpu.curves[0].path) < 8000
    assert memory.curves[0].path.endswith("L1000.0 0.0")


@pytest.mark.parametrize(
    "readings", [[], [(1, [0], [1], [1])], [(1, [0, 77], [1], [])], [(5, [0], [1], [1]), (5, [1], [1], [1])]]
)
def test_too_few_readings_draw_nothing(readings: list[Any]) -> None:
    """Also if lists differ in length, and of ranks that no line has named."""
    assert draw(*readings) == []


@pytest.mark.parametrize("value", [["x"], [None], [True], [1e300], [float("nan")], [[1]], "12", {"0": 1}])
def test_lists_that_hold_no_numbers_are_no_events(value: object) -> None:
    """Nothing foreign comes into a drawing."""
    assert find_mistake(event("resources", cpu_s=value)) == "has a wrong value of cpu_s (resources)"
