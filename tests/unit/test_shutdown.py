"""The stop of a round, step by step."""

from __future__ import annotations

from elastic_run.core.agent.shutdown import KILL_LIMIT, KILL_WAIT, LATE, STACKS_LEAD, Condition, Step, Stop, advance

GRACE = 10.0


def _stop() -> Stop:
    return Stop(started_at=100.0, signal=15, grace=GRACE)


def _wants(step: Step) -> set[str]:
    return {name for name in ("tell_leaders", "tell_groups", "ask_stacks", "kill", "give_up") if getattr(step, name)}


def test_leader_first_group_late_kill_at_the_end() -> None:
    """A worker that ignores everything is told, its group is told late, and SIGKILL ends the grace period."""
    stop, step = advance(_stop(), leaders_alive=True, is_hurried=False, now=100.0)
    assert _wants(step) == {"tell_leaders"}
    assert step.next_at == 100.0 + GRACE * LATE
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=step.next_at)
    assert _wants(step) == {"tell_groups"}
    assert step.next_at == 100.0 + GRACE - STACKS_LEAD
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=step.next_at)
    assert _wants(step) == {"ask_stacks"}
    assert step.next_at == 100.0 + GRACE
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=step.next_at)
    assert _wants(step) == {"kill"}
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=111.0)
    assert _wants(step) == set()
    stop, step = advance(stop, leaders_alive=True, is_hurried=False, now=110.0 + KILL_WAIT)
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


def test_stacks_are_asked_for_once_and_only_of_workers_that_run() -> None:
    """Before SIGKILL the workers that did not stop tell where they are; a short grace period does without."""
    late = 100.0 + GRACE - STACKS_LEAD
    stop, step = advance(_stop(), leaders_alive=True, is_hurried=False, now=late)
    assert _wants(step) == {"tell_leaders", "tell_groups", "ask_stacks"}
    _, step = advance(stop, leaders_alive=True, is_hurried=False, now=late + 0.1)
    assert (_wants(step), step.next_at) == (set(), 100.0 + GRACE)
    _, step = advance(_stop(), leaders_alive=False, is_hurried=False, now=late)
    assert _wants(step) == {"tell_groups"}
    short = Stop(started_at=1.0, signal=15, grace=STACKS_LEAD)
    _, step = advance(short, leaders_alive=True, is_hurried=False, now=1.0)
    assert _wants(step) == {"tell_leaders"}


def test_no_grace_kills_at_once() -> None:
    """--shutdown-timeout 0 is SIGKILL."""
    _, step = advance(Stop(started_at=1.0, signal=15, grace=0.0), leaders_alive=True, is_hurried=False, now=1.0)
    assert _wants(step) == {"kill"}


def _kill() -> Stop:
    stop, step = advance(_stop(), leaders_alive=True, is_hurried=True, now=100.0)
    assert _wants(step) == {"kill"}
    return stop


def _look(stop: Stop, now: float, **conditions: Condition) -> tuple[Stop, Step]:
    numbered = {ord(name): condition for name, condition in conditions.items()}
    return advance(stop, leaders_alive=True, is_hurried=True, now=now, conditions=numbered)


def test_memory_that_shrinks_and_processor_time_are_progress() -> None:
    """A process that gives back its memory is waited for, and `KILL_WAIT` counts from its last progress."""
    stop = _kill()
    for second in range(1, 60):
        stop, step = _look(stop, 100.0 + second, a=Condition(is_running=False, memory=1000 - second, cpu=7))
        assert _wants(step) == set()
    for second in range(60, 90):
        stop, step = _look(stop, 100.0 + second, a=Condition(is_running=False, memory=0, cpu=second))
        assert _wants(step) == set()
    last = Condition(is_running=False, memory=0, cpu=89)
    stop, step = _look(stop, 189.0 + KILL_WAIT - 0.1, a=last)
    assert _wants(step) == set()
    assert step.next_at == 189.0 + KILL_WAIT
    _, step = _look(stop, step.next_at, a=last)
    assert _wants(step) == {"give_up"}


def test_a_process_that_runs_is_waited_for_but_not_for_ever() -> None:
    """One that has a processor or waits for one is never stuck; minutes are the limit all the same."""
    stop = _kill()
    runs = Condition(is_running=True, memory=5, cpu=5)
    for second in range(1, int(KILL_LIMIT)):
        stop, step = _look(stop, 100.0 + second, a=runs)
        assert _wants(step) == set()
    _, step = _look(stop, 100.0 + KILL_LIMIT, a=runs)
    assert _wants(step) == {"give_up"}


def test_one_that_sleeps_without_progress_is_given_up_when_no_other_makes_any() -> None:
    """A stuck process is reported at once where it is alone, and after the others have ended where it is not."""
    stuck, runs = Condition(is_running=False, memory=9, cpu=9), Condition(is_running=True, memory=5, cpu=5)
    stop, step = _look(_kill(), 101.0, a=stuck, b=runs)
    stop, step = _look(stop, 100.0 + KILL_WAIT, a=stuck, b=runs)
    assert _wants(step) == set()
    stop, step = _look(stop, 101.0 + KILL_WAIT, a=stuck)
    assert _wants(step) == {"give_up"}
    _, step = _look(_kill(), 100.0 + KILL_WAIT, a=stuck)
    assert _wants(step) == {"give_up"}
