"""The restart policy as a table."""

from __future__ import annotations

import pytest

from elastic_run.core.job.config import JobConfig, Window
from elastic_run.core.job.restart_policy import Failure, GiveUp, Restart, decide_restart

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
