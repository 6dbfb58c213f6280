"""The stop of a round, step by step."""

from __future__ import annotations

from elastic_run.core.shutdown import KILL_PATIENCE, LATE, Step, Stop, advance

GRACE = 10.0


def _stop() -> Stop:
    return Stop(started_at=100.0, signal=15, grace=GRACE)


def _wants(step: Step) -> set[str]:
    return {name for name in ("tell_leaders", "tell_groups", "kill", "give_up") if getattr(step, name)}


def test_leader_first_group_late_kill_at_the_end() -> None:
    """A worker that ignores everything is told, its group is told late, and SIGKILL ends the grace period."""
    stop, step = advance(_stop(), leaders_alive=True, is_hurried=False, now=100.0)
    assert _wants(step) == {"tell_leaders"}
    assert step.next_at == 100.0 + GRACE * LATE
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=step.next_at)
    assert _wants(step) == {"tell_groups"}
    assert step.next_at == 100.0 + GRACE
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=step.next_at)
    assert _wants(step) == {"kill"}
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=111.0)
    assert _wants(step) == set()
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=110.0 + KILL_PATIENCE)
    assert _wants(step) == {"give_up"}


def test_the_group_is_told_as_soon_as_no_leader_is_left() -> None:
    """Children without a worker have nobody to help: they are not kept waiting."""
    stop, _ = advance(_stop(), leaders_alive=True, is_hurried=False, now=100.0)
    stop, step = advance(stop, leaders_alive=False, is_hurried=False, now=100.5)
    assert _wants(step) == {"tell_groups"}
    _, step = advance(stop, leaders_alive=False, is_hurried=False, now=100.6)
    assert _wants(step) == set()
    assert step.next_at == 100.0 + GRACE


def test_no_leader_from_the_start() -> None:
    """After a success only leftovers are told."""
    _, step = advance(_stop(), leaders_alive=False, is_hurried=False, now=100.0)
    assert _wants(step) == {"tell_groups"}


def test_hurry_kills_now() -> None:
    """A second Ctrl-C does not wait for the grace period."""
    stop, step = advance(_stop(), leaders_alive=True, is_hurried=True, now=100.0)
    assert _wants(step) == {"kill"}
    _, step = advance(stop, leaders_alive=True, is_hurried=True, now=100.1)
    assert _wants(step) == set()


def test_no_grace_kills_at_once() -> None:
    """--shutdown-timeout 0 is SIGKILL."""
    _, step = advance(Stop(started_at=1.0, signal=15, grace=0.0), leaders_alive=True, is_hurried=False, now=1.0)
    assert _wants(step) == {"kill"}
