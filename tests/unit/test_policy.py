"""The restart policy as a table."""

from __future__ import annotations

import pytest

from elastic_run.core.agent.restart_policy import Failure, GiveUp, Restart, RestartPolicy, decide_restart

SAME = "ValueError: x"
NOW = 1000.0


def _fail(uptime: float = 60.0, signature: object = SAME, code: int = 1, *, own_fault: bool = False) -> Failure:
    return Failure(exit_code=code, signature=signature, uptime=uptime, is_deterministic=own_fault)


# policy, failures so far, times of the restarts so far -> pause before the next restart
RESTARTS = {
    "first": (RestartPolicy(1), [_fail()], [], 0.0),
    "the same late failure": (RestartPolicy(3), [_fail(), _fail()], [0.0], 0.0),
    "the same early failure, no minimum": (RestartPolicy(3), [_fail(1), _fail(1)], [0.0], 0.075),
    "another early failure": (RestartPolicy(3, min_uptime=5), [_fail(1), _fail(1, "b")], [0.0], 0.075),
    "early, then late": (RestartPolicy(3, min_uptime=5), [_fail(1), _fail(6)], [0.0], 0.0),
    "late, then early": (RestartPolicy(3, min_uptime=5), [_fail(6), _fail(1)], [0.0], 0.0),
    "unknown failures are not the same": (RestartPolicy(3, min_uptime=5), [_fail(1, None)] * 2, [0.0], 0.075),
    "third early one": (RestartPolicy(9), [_fail(1, i) for i in range(3)], [0.0] * 2, 0.15),
    "capped": (RestartPolicy(99, max_backoff=2.0), [_fail(1, i) for i in range(50)], [0.0] * 49, 1.5),
    "no backoff": (RestartPolicy(99, max_backoff=0.0), [_fail(1, i) for i in range(50)], [0.0] * 49, 0.0),
    "import error late": (RestartPolicy(3), [_fail(61, own_fault=True)] * 2, [0.0], 0.0),
    "window, old restarts": (RestartPolicy(window_count=1, window_seconds=10), [_fail()], [0.0, 989.0], 0.0),
    "window and total": (RestartPolicy(3, window_count=2, window_seconds=10), [_fail()], [995.0], 0.0),
    "a window without a length": (RestartPolicy(3, window_count=1), [_fail()], [995.0], 0.0),
}

GIVE_UPS = {
    "no restarts": (RestartPolicy(0), [_fail()], [], "worker_failed", ""),
    "used up": (RestartPolicy(1), [_fail()], [0.0], "worker_failed", ""),
    "listed": (RestartPolicy(5, no_restart_exit_codes=frozenset({3})), [_fail(code=3)], [], "worker_failed", "listed"),
    "window": (RestartPolicy(window_count=2, window_seconds=10), [_fail()], [991.0, 999.0], "worker_failed", "window"),
    "total before window": (RestartPolicy(1, window_count=9, window_seconds=9), [_fail()], [1.0], "worker_failed", ""),
    "same twice": (RestartPolicy(5, min_uptime=5), [_fail(1), _fail(4)], [0.0], "repeated_failure", "min-uptime 5 s"),
    "import error twice": (RestartPolicy(5), [_fail(2, own_fault=True)] * 2, [0.0], "repeated_failure", "same error"),
}


@pytest.mark.parametrize(("policy", "failures", "restarts", "pause"), RESTARTS.values(), ids=RESTARTS.keys())
def test_restart(policy: RestartPolicy, failures: list[Failure], restarts: list[float], pause: float) -> None:
    """A failure within the budget is tried again, after the pause that it deserves."""
    answer = decide_restart(policy, failures, restarts, NOW, 0.5)
    assert isinstance(answer, Restart)
    assert answer.delay == pytest.approx(pause)


@pytest.mark.parametrize(("policy", "failures", "restarts", "verdict", "words"), GIVE_UPS.values(), ids=GIVE_UPS.keys())
def test_give_up(
    policy: RestartPolicy, failures: list[Failure], restarts: list[float], verdict: str, words: str
) -> None:
    """A failure that is not tried again ends the job with its verdict, and says why."""
    answer = decide_restart(policy, failures, restarts, NOW, 0.5)
    assert isinstance(answer, GiveUp)
    assert answer.verdict == verdict
    assert words in answer.detail
    assert bool(words) == bool(answer.detail)


def test_jitter_spreads_the_pause() -> None:
    """The pause is between half and all of its length."""
    failures = [_fail(1, i) for i in range(2)]
    low, high = (decide_restart(RestartPolicy(9), failures, [0.0], NOW, jitter) for jitter in (0.0, 0.999))
    assert isinstance(low, Restart)
    assert isinstance(high, Restart)
    assert low.delay == pytest.approx(0.05)
    assert high.delay == pytest.approx(0.1, rel=0.01)


def test_policies_compare_by_value() -> None:
    """Two policies that say the same are equal, and show what they say."""
    assert RestartPolicy(3) == RestartPolicy(3)
    assert RestartPolicy(3) != RestartPolicy(4)
    assert "max_restarts=3" in repr(RestartPolicy(3))
