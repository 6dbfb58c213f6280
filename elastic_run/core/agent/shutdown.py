"""How a worker is stopped: its leader first, its group late, SIGKILL to all of it at the end.

Pure. A worker is a session leader; its DataLoader processes and shells are in its group, and a trainer that is asked
to save a checkpoint still needs them. So within the one grace period of a stop

- at once, the leader gets the signal;
- when the leader is gone, or after `LATE` of the grace period, all other processes of its session get it;
- shortly before the end, workers that still run are asked for their stacks;
- at the end, or when the user hurries, everything left gets SIGKILL;
- a process that was sent SIGKILL may take minutes to end, because it gives back its memory first: the agent waits while
  it makes progress. A process that sleeps for `KILL_WAIT` without progress is in uninterruptible sleep.
"""

from __future__ import annotations

from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Part of the grace period after which the group is told too.
LATE = 0.8
#: Seconds before SIGKILL at which workers that still run are asked for their stacks; not in a grace period that is
#: shorter than twice that.
STACKS_LEAD = 0.5
#: Seconds without progress after SIGKILL.
KILL_WAIT = 5.0
#: Seconds that the kernel gets in all to carry out SIGKILL.
KILL_LIMIT = 300.0
#: Seconds between two looks at processes that were sent SIGKILL; the kernel reports no progress.
_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of a process that was sent SIGKILL."""

    is_running: bool  # Whether any of its threads has a processor, or waits for one
    memory: int  # Its resident pages
    cpu: int  # Clock ticks of processor time that it has taken so far


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of a round's workers, as far as it has gone."""

    started_at: float  # Monotonic seconds
    signal: int  # The signal that the workers get
    grace: float  # Seconds until SIGKILL
    leader_told: bool = False
    group_told: bool = False
    stacks_asked: bool = False
    killed_at: float | None = None
    conditions: Mapping[int, Condition] = field(default_factory=dict)
    progress_at: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now."""

    tell_leaders: bool = False  # Send the signal to the living leaders
    tell_groups: bool = False  # Send the signal to all processes of the sessions
    ask_stacks: bool = False  # Ask the workers that still run for their stacks
    kill: bool = False  # Send SIGKILL to all processes of the sessions
    give_up: bool = False  # Stop waiting; the processes that still live are unkillable
    next_at: float | None = None  # Monotonic seconds at which to ask again, or None


def advance(
    stop: Stop,
    *,
    leaders_alive: bool,
    is_hurried: bool,
    now: float,
    conditions: Mapping[int, Condition] | None = None,
) -> tuple[Stop, Step]:
    """Return a stop after its next step, and the step.

    `leaders_alive` says whether any worker itself still runs, `is_hurried` whether the user asked twice. `conditions`,
    used only after SIGKILL, has the processes that were sent it and are still there, by pid.
    """
    if stop.killed_at is not None:
        return _await_end(stop, stop.killed_at, conditions or {}, now)
    kill_at = stop.started_at + stop.grace
    if is_hurried or now >= kill_at:
        return replace(stop, leader_told=True, group_told=True, killed_at=now), Step(kill=True, next_at=now + _LOOK)
    late_at = stop.started_at + stop.grace * LATE
    tell_leaders = not stop.leader_told
    tell_groups = not stop.group_told and (not leaders_alive or now >= late_at)
    stacks_at = kill_at - STACKS_LEAD
    may_ask = leaders_alive and stop.grace >= 2 * STACKS_LEAD and not stop.stacks_asked
    ask_stacks = may_ask and now >= stacks_at
    after = replace(
        stop,
        leader_told=True,
        group_told=stop.group_told or tell_groups,
        stacks_asked=stop.stacks_asked or ask_stacks,
    )
    later = [kill_at, *(() if after.group_told else (late_at,)), *((stacks_at,) if may_ask and not ask_stacks else ())]
    return after, Step(
        tell_leaders=tell_leaders and leaders_alive,
        tell_groups=tell_groups,
        ask_stacks=ask_stacks,
        next_at=min(later),
    )


def _await_end(stop: Stop, killed_at: float, conditions: Mapping[int, Condition], now: float) -> tuple[Stop, Step]:
    """Go on waiting for what was sent SIGKILL while any of it makes progress."""
    progress_at = {}
    for pid, condition in conditions.items():
        before = stop.conditions.get(pid)
        is_moving = condition.is_running or (before is not None and condition != before)
        progress_at[pid] = now if is_moving else stop.progress_at.get(pid, killed_at)
    last = max(progress_at.values(), default=killed_at)
    give_up_at = min(last + KILL_WAIT, killed_at + KILL_LIMIT)
    after = replace(stop, conditions=conditions, progress_at=progress_at)
    return after, Step(give_up=now >= give_up_at, next_at=min(now + _LOOK, give_up_at))
