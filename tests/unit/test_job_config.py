"""What a node that was with another configuration is told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_run.contract import LARGEST_NUMBER
from elastic_run.core.job.config import JobConfig, Window, describe_difference, describe_settled

TIMES = [
    *("min_uptime", "max_backoff", "join_timeout", "last_call_timeout", "keep_alive_interval"),
    *("scale_up_delay", "scale_up_grace"),
]
JOB = JobConfig(1, 4)
DIFFERENCES = {
    "nodes": (JobConfig(2, 4), "--nnodes is 2:4 here and 1:4 in the job"),
    "window": (
        JobConfig(1, 4, restart_window=Window(3, 60.0)),
        "--restart-window is 3 per 60 s here and none in the job",
    ),
    "codes": (
        JobConfig(1, 4, no_restart_exit_codes=(3, 4)),
        "--no-restart-exit-codes is 3,4 here and none in the job",
    ),
    "truth": (JobConfig(1, 4, has_successors=True), "successors of the endpoint is yes here and no in the job"),
    "two": (
        JobConfig(1, 4, max_restarts=2, keep_alive_interval=1.5),
        "--max-restarts is 2 here and 0 in the job; keep_alive_interval is 1.5 here and 2 in the job",
    ),
    "settled": (JobConfig(1, 4, last_call_timeout=1.0, max_backoff=2.0), ""),
}


@pytest.mark.parametrize(("node", "text"), DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_a_difference_names_the_flag_and_both_values(node: JobConfig, text: str) -> None:
    """Whoever disagrees learns in what, what it was told and what the job goes by."""
    assert describe_difference(JOB, node) == text


def test_a_settled_time_names_the_flag_and_both_values() -> None:
    """A node whose times have no effect learns which hold, in one sentence."""
    node = JobConfig(1, 4, last_call_timeout=60.0, min_uptime=2.5, max_restarts=9)
    assert describe_settled(JOB, node) == (
        "the values of the job's first node apply, not those of this node: "
        "--min-uptime is none, not 2.5 s; last_call_timeout is 30 s, not 60 s"
    )
    assert describe_settled(JOB, JOB) == ""


def test_every_setting_is_compared() -> None:
    """No setting can differ without being named, refused or settled; none is both."""
    for name in JobConfig.__slots__:
        before = getattr(JOB, name)
        if isinstance(before, bool):
            value: object = not before
        elif isinstance(before, int | float):
            value = before + 3
        else:
            value = {"on_split": "continue", "no_restart_exit_codes": (1,)}.get(name, 5)
        changes = {name: value, "max_nodes": 9} if name == "min_nodes" else {name: value}
        other = JobConfig(**{"min_nodes": 1, "max_nodes": 4, **changes})  # type: ignore[arg-type]  # all are of the right type
        assert bool(describe_difference(JOB, other)) != bool(describe_settled(JOB, other)), name


@pytest.mark.parametrize(
    "values",
    [
        {"max_nodes": 1 << 60},
        {"max_restarts": 1 << 60},
        {"max_restarts": math.nan},
        {"keep_alive_max_attempt": 1 << 60},
        *({name: value} for name in TIMES for value in (math.nan, math.inf, 1e300)),
    ],
)
def test_a_value_that_no_other_node_could_read_is_refused(values: dict[str, Any]) -> None:
    """A program gets an error before anything is started, which names the field."""
    with pytest.raises(ValueError, match=rf"^JobConfig: {next(iter(values))} is .*, and must be from 0 to [0-9.e+]+$"):
        JobConfig(**values)


def test_the_largest_number_is_taken() -> None:
    """It is what the message of the refusal allows."""
    assert JobConfig(max_restarts=LARGEST_NUMBER).max_restarts == LARGEST_NUMBER


def test_an_interval_that_no_node_could_keep_is_refused() -> None:
    """All nodes would be silent for the others at once."""
    with pytest.raises(ValueError, match=r"a keep-alive takes 0\.001 s or more$"):
        JobConfig(keep_alive_interval=1e-300)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_restarts": -1}, "max_restarts is -1, and must be"),
        *(({name: -0.5}, f"{name} is -0.5, and must be") for name in TIMES if name != "keep_alive_interval"),
    ],
)
def test_a_negative_number_or_time_is_refused(values: dict[str, Any], said: str) -> None:
    """A program gets an error before anything is started, which names the field."""
    with pytest.raises(ValueError, match=rf"^JobConfig: {said} from 0 to {LARGEST_NUMBER}$"):
        JobConfig(**values)


@pytest.mark.parametrize(("count", "seconds"), [(-1, 60.0), (1, -60.0), (1, 0.0), (1, math.nan)])
def test_a_window_that_makes_no_sense_is_refused(count: int, seconds: float) -> None:
    """A negative number, or no time in which it could be counted."""
    with pytest.raises(ValueError, match=rf"^Window: {count} per {seconds:g} s has a negative number, or no time$"):
        Window(count, seconds)
