"""One agent's life as a state machine: what has happened goes in, what to do comes out.

Pure (law 3): `decide(agent, event, now) -> (agent, commands)`. No I/O, clock, logging, thread or randomness in here;
the driver in `agent` performs the commands and brings back events.

Rules
- Every event of a round carries the round's number; events of past rounds are dropped. In a job of several nodes the
  number is the job's: the agent takes it over with `RoundFormed`.
- A worker's failure stops the round; whether it is tried again is decided when the last of its processes is gone,
  because only then all that the workers wrote has been read and the cause is known.
- If all failed workers seem to have lost a peer, the agent waits for the cause for a moment while others run: it may
  still be cleaning up, and a worker that is told to stop first never says what was wrong. Another failure ends that.
- A signal wins over a restart and over a failure that is still being cleaned up, never over a success.
- In a job of several nodes the agent decides on none of this (`follows_job`): it tells the job what became of its
  round, waits (again `JOINING`), and does what the job has decided. A signal is its own: it leaves.
- `TRANSITIONS` is the machine: for each state and event the function that answers, and the states that may follow. A
  step that isn't in it raises. docs/architecture.md draws it from here.
"""

from __future__ import annotations

from elastic_run.core.agent.messages import (
    AwaitCause,
    Command,
    Event,
    Finish,
    Forward,
    GroupGone,
    Hurry,
    JobOver,
    Join,
    Leave,
    Pause,
    PauseOver,
    ReportFailing,
    ReportReady,
    RoundFailed,
    RoundFormed,
    RoundHalted,
    RoundWarned,
    Signalled,
    StartWorkers,
    StopWorkers,
    WaitOver,
    Warn,
    WorkerExited,
    WorkersHung,
    WorkerStuck,
)
from elastic_run.core.job import restart_policy as outcomes
from elastic_run.core.job.restart_policy import CAUSE_WAIT, Failure, GiveUp, decide_restart, has_budget
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.core.config import JobConfig

JOINING = "joining"
RUNNING = "running"
STOPPING = "stopping"
PAUSING = "pausing"
ENDED = "ended"

# Why a round is being stopped.
AFTER_SUCCESS = "success"
AFTER_FAILURE = "failure"
AFTER_SIGNAL = "signal"
AFTER_HALT = "halt"

SIGINT = 2
SIGTERM = 15

#: More early failures in a row than this make the pause no longer: it has long reached its maximum.
REMEMBERED_FAILURES = 64


class IllegalTransitionError(Exception):
    """An event came in a state in which it can't: a defect of the driver or of the table."""


@dataclass(frozen=True, slots=True)
class Agent:
    """What one agent knows."""

    config: JobConfig  # The job's configuration
    local_world_size: int  # Workers on this node
    forwarded: frozenset[int] = frozenset()  # Signals that are passed on to the workers and stop nothing
    follows_job: bool = False  # Whether a job of several nodes decides what follows a round
    wait_limit: float = CAUSE_WAIT  # Seconds for which the cause is awaited where it may be a worker's that still runs
    state: str = JOINING
    round: int = 0
    running: frozenset[int] = frozenset()  # Local ranks of the workers that run
    failures: tuple[Failure, ...] = ()  # Failed rounds, oldest first, as many as the pause depends on
    restart_times: tuple[float, ...] = ()  # Monotonic seconds of the restarts in the configuration's window
    restart_count: int = 0
    awaits_cause: bool = False
    stop_reason: str = ""  # Why the round is being stopped, or ""
    signal: int | None = None  # The signal that ends this agent, or None
    interrupts: int = 0  # SIGINTs so far
    is_hurried: bool = False
    start_failure: RoundFailed | None = None  # Why the round has no workers, or not all, or None
    ending: Finish | None = None  # How the agent ends when its workers are gone, where that is known, or None

    def replace(self, **changes: Any) -> Agent:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


Decision = tuple[Agent, tuple[Command, ...]]


@dataclass(frozen=True, slots=True)
class Transition:
    """What follows an event in a state."""

    #: Takes the agent, the event, monotonic seconds and the random number of `decide`
    react: Callable[[Agent, Any, float, float], Decision]
    after: tuple[str, ...]  # The states that may follow


def begin(agent: Agent) -> Decision:
    """Return the first decision: join."""
    return agent, (Join(agent.round, agent.restart_count),)


def decide(agent: Agent, event: Event, now: float, jitter: float = 0.0) -> Decision:
    """Return the agent after an event, and the commands to perform; `jitter` in [0, 1) is for a pause."""
    if agent.state == ENDED or not _is_current(agent, event):
        return agent, ()
    transition = TRANSITIONS.get((agent.state, type(event)))
    if transition is None:
        message = f"{type(event).__name__} in state {agent.state}"
        raise IllegalTransitionError(message)
    after, commands = transition.react(agent, event, now, jitter)
    if after.state not in transition.after:
        message = f"{type(event).__name__} led from {agent.state} to {after.state}"
        raise IllegalTransitionError(message)
    return after, commands


def _is_current(agent: Agent, event: Event) -> bool:
    """Whether an event belongs to no round, to the present one, or begins a round of the job."""
    is_new = agent.follows_job and isinstance(event, RoundFormed)
    return is_new or event.round in (None, agent.round)


def may_start_again(agent: Agent) -> bool:
    """Whether another round may follow the one that is being stopped, so that it is worth preparing."""
    if agent.ending is not None or agent.start_failure is not None:
        return False
    if agent.stop_reason == AFTER_FAILURE and not agent.follows_job:
        return has_budget(agent.config, agent.restart_count)
    return agent.stop_reason in (AFTER_FAILURE, AFTER_HALT)


def has_news(before: Agent, after: Agent) -> bool:
    """Whether something happened between two states that the user wants to know while the job goes on."""
    return (before.restart_count, before.signal, before.is_hurried) != (
        after.restart_count,
        after.signal,
        after.is_hurried,
    )


# --- joining and pausing ---------------------------------------------------------------------------------------------
def _start_round(agent: Agent, event: RoundFormed, *_: float) -> Decision:
    restarts = agent.restart_count if event.restart_count is None else event.restart_count
    running = frozenset(range(agent.local_world_size))
    agent = agent.replace(state=RUNNING, round=event.round, running=running, restart_count=restarts, awaits_cause=False)
    return agent, (StartWorkers(agent.round),)


def _end_without_round(agent: Agent, event: RoundFailed, *_: float) -> Decision:
    leave = (
        (Leave(outcomes.UNHEALTHY, event.detail),) if agent.follows_job and event.verdict == outcomes.UNHEALTHY else ()
    )
    return agent.replace(state=ENDED), (*leave, Finish(event.verdict, detail=event.detail))


def _end_with_job(agent: Agent, event: JobOver, *_: float) -> Decision:
    return agent.replace(state=ENDED), (event.finish,)


def _end_by_signal(agent: Agent, event: Signalled, *_: float) -> Decision:
    if event.number in agent.forwarded:
        return agent, ()
    finish = Finish("signal", signal=event.number)
    return agent.replace(state=ENDED, signal=event.number), (*_leave_by_signal(agent), finish)


def _join_again(agent: Agent, *_: object) -> Decision:
    return agent.replace(state=JOINING), (Join(agent.round, agent.restart_count),)


# --- running ---------------------------------------------------------------------------------------------------------
def _stop(agent: Agent, reason: str, signal: int = SIGTERM) -> Decision:
    if agent.state == STOPPING:
        return agent, ()
    return agent.replace(state=STOPPING, stop_reason=reason), (StopWorkers(signal),)


def _stop_after_wait(agent: Agent, *_: object) -> Decision:
    return _stop(agent, AFTER_FAILURE)


def _stop_hung(agent: Agent, *_: object) -> Decision:
    after, commands = _stop(agent, AFTER_FAILURE)
    report = (ReportFailing(agent.round),) if agent.follows_job else ()
    return after, (*report, *commands)


def _give_up_stuck(agent: Agent, *_: object) -> Decision:
    # A fresh worker would fight the wedged one for its device, so there is no restart.
    after, commands = _stop(agent, AFTER_FAILURE)
    return after.replace(ending=Finish("unkillable_worker")), commands


def _stop_after_start_failure(agent: Agent, event: RoundFailed, *_: float) -> Decision:
    # Some workers may run already: they go first, then the job ends.
    after, commands = _stop(agent, AFTER_FAILURE)
    return after.replace(start_failure=agent.start_failure or event), commands


def _warn(agent: Agent, *_: object) -> Decision:
    return agent, (Warn(),)


def _halt(agent: Agent, *_: object) -> Decision:
    return _stop(agent, AFTER_FAILURE if agent.awaits_cause else AFTER_HALT)


def _stop_with_job(agent: Agent, event: JobOver, *_: float) -> Decision:
    after, commands = _stop(agent, AFTER_HALT)
    return after.replace(ending=event.finish), commands


def _stop_by_signal(agent: Agent, event: Signalled, *_: float) -> Decision:
    if event.number in agent.forwarded:
        return agent, (Forward(event.number),)
    after, commands = _stop(_count_interrupt(agent, event), AFTER_SIGNAL, event.told)
    return after.replace(signal=event.number), (*_leave_by_signal(agent), *commands)


def _without(agent: Agent, event: WorkerExited) -> Agent:
    return agent.replace(running=agent.running - {event.local_rank})


def _on_exit(agent: Agent, event: WorkerExited, *_: float) -> Decision:
    agent = _without(agent, event)
    if event.exitcode != 0:
        return _on_failure(agent, event)
    if not agent.running:
        # Processes that the workers left in the background live on after the job has succeeded; see the driver.
        return _stop(agent, AFTER_FAILURE if agent.awaits_cause else AFTER_SUCCESS)
    return agent, ()


def _on_failure(agent: Agent, event: WorkerExited) -> Decision:
    may_wait = event.is_secondary and agent.wait_limit > 0
    is_told = agent.awaits_cause and may_wait
    report = (ReportFailing(agent.round, is_secondary=may_wait),) if agent.follows_job and not is_told else ()
    if may_wait and agent.running:
        wait = () if agent.awaits_cause else (AwaitCause(agent.round, agent.wait_limit),)
        return agent.replace(awaits_cause=True), (*report, *wait)
    after, commands = _stop(agent, AFTER_FAILURE)
    return after, (*report, *commands)


# --- stopping --------------------------------------------------------------------------------------------------------
def _stay(agent: Agent, *_: object) -> Decision:
    return agent, ()


def _count_exit(agent: Agent, event: WorkerExited, *_: float) -> Decision:
    return _without(agent, event), ()


def _leave_by_signal(agent: Agent) -> tuple[Command, ...]:
    """Tell the job once that this node goes."""
    return (Leave(outcomes.BY_SIGNAL),) if agent.follows_job and agent.signal is None else ()


def _count_interrupt(agent: Agent, event: Signalled) -> Agent:
    return agent.replace(interrupts=agent.interrupts + (event.number == SIGINT))


def _on_signal_while_stopping(agent: Agent, event: Signalled, *_: float) -> Decision:
    if event.number in agent.forwarded:
        return agent, ()
    leave = _leave_by_signal(agent)
    agent = _count_interrupt(agent, event)
    has_verdict = agent.follows_job and agent.ending is not None
    is_success = agent.stop_reason == AFTER_SUCCESS
    if is_success and agent.follows_job:
        # Its round is done, but the job may go on without it.
        agent = agent.replace(signal=event.number)
    if (is_success or has_verdict or agent.interrupts > 1) and not agent.is_hurried:
        return agent.replace(is_hurried=True), (Hurry(),)
    if agent.stop_reason in (AFTER_FAILURE, AFTER_HALT) and not has_verdict:
        return agent.replace(stop_reason=AFTER_SIGNAL, signal=event.number), leave
    return agent, ()


def _on_group_gone(agent: Agent, event: GroupGone, now: float, jitter: float) -> Decision:
    finish = _find_end(agent, event)
    if finish is not None:
        leave = (Leave(outcomes.UNKILLABLE),) if agent.follows_job and finish.verdict == "unkillable_worker" else ()
        return agent.replace(state=ENDED), (*leave, finish)
    if agent.follows_job:
        return _tell_job(agent)
    if agent.start_failure is not None:
        return agent.replace(state=ENDED), (Finish(agent.start_failure.verdict, detail=agent.start_failure.detail),)
    if agent.stop_reason == AFTER_SUCCESS:
        return agent.replace(state=ENDED), (Finish("success"),)
    if agent.stop_reason == AFTER_HALT:
        # A foreign rendezvous has nodes that wait: no failure of this round's, so no restart of the budget.
        agent = agent.replace(round=agent.round + 1, stop_reason="", state=JOINING)
        return agent, (Join(agent.round, agent.restart_count),)
    return _after_failure(agent, event.failure or Failure(exit_code=1), now, jitter)


def _find_end(agent: Agent, event: GroupGone) -> Finish | None:
    """Return the end of this agent, if no other node has a say in it."""
    if event.is_unkillable:
        return Finish("unkillable_worker", signal=agent.signal)
    if agent.stop_reason == AFTER_SIGNAL:
        return Finish("signal", signal=agent.signal)
    return agent.ending


def _tell_job(agent: Agent) -> Decision:
    """Report the round, and wait for the next one or the verdict."""
    failed = agent.start_failure
    if failed is not None:
        report = ReportReady(agent.round, outcomes.CANNOT_START, verdict=failed.verdict, detail=failed.detail)
    else:
        report = ReportReady(agent.round, _OUTCOMES[agent.stop_reason])
    if agent.signal is not None:
        return agent.replace(state=ENDED), (report, Leave(outcomes.BY_SIGNAL), Finish("signal", signal=agent.signal))
    return agent.replace(state=JOINING, round=agent.round + 1, stop_reason="", start_failure=None), (report,)


#: What became of a round on this node, by why it was stopped.
_OUTCOMES = {AFTER_SUCCESS: outcomes.DONE, AFTER_FAILURE: outcomes.FAILED, AFTER_HALT: outcomes.STOPPED}


def _after_failure(agent: Agent, failure: Failure, now: float, jitter: float) -> Decision:
    failures = (*agent.failures[-REMEMBERED_FAILURES:], failure)
    agent = agent.replace(failures=failures)
    window = agent.config.restart_window
    answer = decide_restart(agent.config, failures, agent.restart_times, now, jitter, used=agent.restart_count)
    if isinstance(answer, GiveUp):
        return agent.replace(state=ENDED), (Finish(answer.verdict, detail=answer.detail),)
    agent = agent.replace(
        round=agent.round + 1,
        restart_times=(*agent.restart_times, now)[-(window.count if window else 1) :],
        restart_count=agent.restart_count + 1,
        stop_reason="",
        state=JOINING,
    )
    if answer.delay > 0:
        return agent.replace(state=PAUSING), (Pause(agent.round, answer.delay),)
    return agent, (Join(agent.round, agent.restart_count),)


#: The machine: (state, event) -> the function that answers, and the states that may follow.
TRANSITIONS: dict[tuple[str, type[Event]], Transition] = {
    (JOINING, RoundFormed): Transition(_start_round, (RUNNING,)),
    (JOINING, RoundFailed): Transition(_end_without_round, (ENDED,)),
    (JOINING, JobOver): Transition(_end_with_job, (ENDED,)),
    (JOINING, Signalled): Transition(_end_by_signal, (JOINING, ENDED)),
    (RUNNING, WorkerExited): Transition(_on_exit, (RUNNING, STOPPING)),
    (RUNNING, WaitOver): Transition(_stop_after_wait, (STOPPING,)),
    (RUNNING, WorkerStuck): Transition(_give_up_stuck, (STOPPING,)),
    (RUNNING, WorkersHung): Transition(_stop_hung, (STOPPING,)),
    (RUNNING, RoundFailed): Transition(_stop_after_start_failure, (STOPPING,)),
    (RUNNING, RoundWarned): Transition(_warn, (RUNNING,)),
    (RUNNING, RoundHalted): Transition(_halt, (STOPPING,)),
    (RUNNING, JobOver): Transition(_stop_with_job, (STOPPING,)),
    (RUNNING, Signalled): Transition(_stop_by_signal, (RUNNING, STOPPING)),
    (STOPPING, WorkerExited): Transition(_count_exit, (STOPPING,)),
    (STOPPING, WaitOver): Transition(_stay, (STOPPING,)),
    (STOPPING, WorkerStuck): Transition(_give_up_stuck, (STOPPING,)),
    (STOPPING, WorkersHung): Transition(_stay, (STOPPING,)),
    (STOPPING, RoundFailed): Transition(_stop_after_start_failure, (STOPPING,)),
    (STOPPING, RoundWarned): Transition(_stay, (STOPPING,)),
    (STOPPING, RoundHalted): Transition(_stay, (STOPPING,)),
    (STOPPING, JobOver): Transition(_stop_with_job, (STOPPING,)),
    (STOPPING, Signalled): Transition(_on_signal_while_stopping, (STOPPING,)),
    (STOPPING, GroupGone): Transition(_on_group_gone, (JOINING, PAUSING, ENDED)),
    (PAUSING, PauseOver): Transition(_join_again, (JOINING,)),
    (PAUSING, Signalled): Transition(_end_by_signal, (PAUSING, ENDED)),
}
