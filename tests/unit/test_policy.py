"""The restart policy, ranks, and what a node with another configuration is told."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_run.contract import LARGEST_NUMBER
from elastic_run.core.config import JobConfig, Window, describe_difference
from elastic_run.core.job.documents import NodeInfo, StoreAddress
from elastic_run.core.job.ranks import WorkerRanks, assign_group_ranks, assign_worker_ranks
from elastic_run.core.job.restart_policy import Failure, GiveUp, Restart, decide_restart
from elastic_run.core.job.short_lists import list_ranks
from elastic_run.core.job.state import Node

# --- the restart policy -----------------------------------------------------------------------------------------------
SAME = "ValueError: x"
NOW = 1000.0


def _fail(uptime: float = 60.0, signature: str | None = SAME, code: int = 1, *, own_fault: bool = False) -> Failure:
    return Failure(exit_code=code, signature=signature, uptime=uptime, is_deterministic=own_fault)


# configuration, failures so far, times of the restarts so far -> pause before the next restart
RESTARTS = {
    "first": (JobConfig(max_restarts=1), [_fail()], [], 0.0),
    "the same late failure": (JobConfig(max_restarts=3), [_fail(), _fail()], [0.0], 0.0),
    "the same early failure, no minimum": (JobConfig(max_restarts=3), [_fail(1), _fail(1)], [0.0], 0.075),
    "another early failure": (JobConfig(max_restarts=3, min_uptime=5), [_fail(1), _fail(1, "b")], [0.0], 0.075),
    "early, then late": (JobConfig(max_restarts=3, min_uptime=5), [_fail(1), _fail(6)], [0.0], 0.0),
    "late, then early": (JobConfig(max_restarts=3, min_uptime=5), [_fail(6), _fail(1)], [0.0], 0.0),
    "unknown failures are not the same": (JobConfig(max_restarts=3, min_uptime=5), [_fail(1, None)] * 2, [0.0], 0.075),
    "third early one": (JobConfig(max_restarts=9), [_fail(1, str(i)) for i in range(3)], [0.0] * 2, 0.15),
    "capped": (JobConfig(max_restarts=99, max_backoff=2.0), [_fail(1, str(i)) for i in range(50)], [0.0] * 49, 1.5),
    "no backoff": (JobConfig(max_restarts=99, max_backoff=0.0), [_fail(1, str(i)) for i in range(50)], [0.0] * 49, 0.0),
    "import error late": (JobConfig(max_restarts=3), [_fail(61, own_fault=True)] * 2, [0.0], 0.0),
    "window, old restarts": (JobConfig(restart_window=Window(1, 10)), [_fail()], [0.0, 989.0], 0.0),
    "window and total": (JobConfig(max_restarts=3, restart_window=Window(2, 10)), [_fail()], [995.0], 0.0),
    "a window without a length": (JobConfig(max_restarts=3, restart_window=Window(1)), [_fail()], [995.0], 0.0),
}

GIVE_UPS = {
    "no restarts": (JobConfig(max_restarts=0), [_fail()], [], "worker_failed", ""),
    "used up": (JobConfig(max_restarts=1), [_fail()], [0.0], "worker_failed", ""),
    "listed": (JobConfig(max_restarts=5, no_restart_exit_codes=(3,)), [_fail(code=3)], [], "worker_failed", "listed"),
    "window": (JobConfig(restart_window=Window(2, 10)), [_fail()], [991.0, 999.0], "worker_failed", "window"),
    "total before window": (
        JobConfig(max_restarts=1, restart_window=Window(9, 9)),
        [_fail()],
        [1.0],
        "worker_failed",
        "",
    ),
    "same twice": (
        JobConfig(max_restarts=5, min_uptime=5),
        [_fail(1), _fail(4)],
        [0.0],
        "repeated_failure",
        "min-uptime 5 s",
    ),
    "import error twice": (
        JobConfig(max_restarts=5),
        [_fail(2, own_fault=True)] * 2,
        [0.0],
        "repeated_failure",
        "same error",
    ),
}


@pytest.mark.parametrize(("config", "failures", "restarts", "pause"), RESTARTS.values(), ids=RESTARTS.keys())
def test_restart(config: JobConfig, failures: list[Failure], restarts: list[float], pause: float) -> None:
    """A failure within the budget is tried again, after the pause that it deserves."""
    answer = decide_restart(config, failures, restarts, NOW, 0.5)
    assert isinstance(answer, Restart)
    assert answer.delay == pytest.approx(pause)


@pytest.mark.parametrize(("config", "failures", "restarts", "verdict", "words"), GIVE_UPS.values(), ids=GIVE_UPS.keys())
def test_give_up(config: JobConfig, failures: list[Failure], restarts: list[float], verdict: str, words: str) -> None:
    """A failure that is not tried again ends the job with its verdict, and says why."""
    answer = decide_restart(config, failures, restarts, NOW, 0.5)
    assert isinstance(answer, GiveUp)
    assert answer.verdict == verdict
    assert words in answer.detail
    assert bool(words) == bool(answer.detail)


def test_jitter_spreads_the_pause() -> None:
    """The pause is between half and all of its length."""
    failures = [_fail(1, str(i)) for i in range(2)]
    low, high = (decide_restart(JobConfig(max_restarts=9), failures, [0.0], NOW, jitter) for jitter in (0.0, 0.999))
    assert isinstance(low, Restart)
    assert isinstance(high, Restart)
    assert low.delay == pytest.approx(0.05)
    assert high.delay == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(
    ("config", "failures", "decision"),
    [
        (JobConfig(max_restarts=3), [Failure(1)], Restart),
        (JobConfig(max_restarts=3), [Failure(1, decision="stop", rule="quota")], GiveUp),
        (JobConfig(max_restarts=3, no_restart_exit_codes=(7,)), [Failure(7)], GiveUp),
        (JobConfig(max_restarts=3, no_restart_exit_codes=(7,)), [Failure(7, decision="restart")], Restart),
        (JobConfig(max_restarts=3), [Failure(1, "x", is_deterministic=True)] * 2, GiveUp),
        (JobConfig(max_restarts=3), [Failure(1, "x", is_deterministic=True, decision="restart")] * 2, Restart),
        (JobConfig(max_restarts=0), [Failure(1, decision="restart")], GiveUp),
        (JobConfig(max_restarts=3), [Failure(1, decision="exclude")], Restart),
    ],
)
def test_a_rule_of_the_user_decides(config: JobConfig, failures: list[Failure], decision: type) -> None:
    """`stop` ends the job, `restart` restarts within the budget, `exclude` is no matter of the restart."""
    answer = decide_restart(config, failures, [], NOW, 0.5, used=len(failures) - 1)
    assert isinstance(answer, decision)
    if isinstance(answer, GiveUp) and failures[-1].rule:
        assert answer.detail == "the rule 'quota' of --failure-rules decides stop"


def test_a_launch_without_a_main_guard_is_not_restarted() -> None:
    """Without a rule, `stop` stands for the program that fails every time, and the report says so."""
    answer = decide_restart(JobConfig(max_restarts=3), [Failure(1, decision="stop")], [], NOW, 0.5)
    assert isinstance(answer, GiveUp)
    assert "without `if __name__ == '__main__':`" in answer.detail


# --- ranks of nodes and workers, beside an oracle ---------------------------------------------------------------------
_STORE = StoreAddress("h", 1)


def _node(name: str, rank: int | None = None, preferred: int | None = None, location: str = "") -> Node:
    info = NodeInfo(name, 1, 1, preferred_rank=preferred, location=location)
    return Node(name, info, _STORE, arrived=1, arrived_at=0.0, rank=rank)


_RANKS = st.none() | st.integers(-1, 7)


@given(st.lists(st.tuples(_RANKS, _RANKS), min_size=1, max_size=6))
def test_group_ranks_are_dense_and_unique_and_wishes_are_heard(wishes: list[tuple[int | None, int | None]]) -> None:
    """Ranks run from 0 to the number of nodes; who comes first gets what it had, then what it prefers."""
    candidates = [_node(f"n{index}", rank, preferred) for index, (rank, preferred) in enumerate(wishes)]
    ranks = assign_group_ranks(candidates)
    assert list(ranks.values()) == list(range(len(wishes)))
    had = {rank for rank, _ in wishes if rank in range(len(wishes))}
    for rank in had:
        assert ranks[next(c.node for c in candidates if c.rank == rank)] == rank
    new = {preferred for rank, preferred in wishes if rank is None and preferred in range(len(wishes))}
    for preferred in new - had:
        holder = next(candidate for candidate in candidates if ranks[candidate.node] == preferred)
        assert holder.node_info.preferred_rank == preferred


def test_the_rest_is_given_out_in_order_of_joining() -> None:
    """Nodes without a wish take the lowest free ranks, the first the lowest."""
    ranks = assign_group_ranks([_node("a"), _node("b", rank=1), _node("c", preferred=0), _node("d")])
    assert ranks == {"c": 0, "b": 1, "a": 2, "d": 3}


def test_nodes_of_one_switch_are_neighbours() -> None:
    """Where locations are known, they order the nodes that have neither a rank nor a wish."""
    order = [("a", "s2/0"), ("b", "s1/1"), ("c", ""), ("d", "s2/2"), ("e", "s1/0")]
    candidates = [_node(node, location=location) for node, location in order]
    assert list(assign_group_ranks([*candidates, _node("f", rank=0)])) == ["f", "c", "e", "b", "a", "d"]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 4)), max_size=6))
def test_worker_ranks_are_those_of_counting_one_by_one(sizes: list[tuple[str, int]]) -> None:
    """Numbering the workers one after the other, in all and per role, gives the same ranks."""
    workers = [(node, role) for node, (role, size) in enumerate(sizes) for _ in range(size)]
    for node, ranks in enumerate(assign_worker_ranks(sizes)):
        role = sizes[node][0]
        alike = [number for number, other in workers if other == role]
        assert ranks == WorkerRanks(
            base_rank=[number for number, _ in workers].index(node),
            role_rank=alike.index(node),
            role_world_size=len(alike),
        )


def test_ranks_are_listed_as_ranges() -> None:
    """Consecutive ranks are one range; of many ranges the first ones are shown, with the number of all ranks."""
    assert list_ranks([0, 1, 2, 4]) == "0-2, 4"
    assert list_ranks(range(0, 40, 2)) == "0, 2, 4, 6, 8, ... (20 in all)"


# --- what a node with another configuration is told -------------------------------------------------------------------
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


def test_every_setting_is_compared() -> None:
    """No setting can differ without being refused, but for durations that only the coordinator applies."""
    durations = {"min_uptime", "max_backoff", "join_timeout", "last_call_timeout", "scale_up_delay", "scale_up_grace"}
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
        assert bool(describe_difference(JOB, other)) != (name in durations), name


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
