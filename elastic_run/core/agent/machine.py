"""One agent's life as a state machine: what has happened goes in, what to do comes out.

Pure (law 3): `decide(agent, event, now) -> (agent, commands)`. No I/O, clock, logging, thread or randomness in here;
the driver in `agent` performs the commands and brings back events.

Rules
- Every event of a round carries the round's number; events of past rounds are dropped.
- A worker's failure stops the round; whether it is tried again is decided when the last of its processes is gone,
  because only then all that the workers wrote has been read and the cause is known.
- Where all that failed look as if they had lost a peer, the cause is awaited for a moment while others run: it may
  still be cleaning up, and who is told to stop first never says what was wrong. Any other failure ends the wait.
- A signal wins over a restart and over a failure that is still being cleaned up, never over a success.
- In a job of several nodes the agent decides on none of this (`follows_job`): it tells the job what became of its
  round, waits (again `JOINING`), and does what the job has decided. A signal is its own: it leaves.
- `TRANSITIONS` is the whole machine. A step that isn't in it raises. docs/architecture.md draws it from here.

Longer than a page on purpose: a third of it are names for those who import from here, the rest is one machine.
"""

from __future__ import annotations

from elastic_run.core.agent.messages import (
    BY_SIGNAL,
    CANNOT_START,
    DONE,
    FAILED,
    STOPPED,
    UNKILLABLE,
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
    PatienceOver,
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
    Warn,
    WorkerExited,
    WorkerStuck,
)
from elastic_run.core.agent.restart_policy import Failure, GiveUp, RestartPolicy, decide_restart, has_budget
from elastic_run.core.agent.shutdown import CAUSE_PATIENCE

__all__ = [
    "AFTER_FAILURE",
    "AFTER_HALT",
    "AFTER_SIGNAL",
    "AFTER_SUCCESS",
    "BY_SIGNAL",
    "CANNOT_START",
    "DONE",
    "ENDED",
    "FAILED",
    "JOINING",
    "PAUSING",
    "RUNNING",
    "STOPPED",
    "STOPPING",
    "TRANSITIONS",
    "UNKILLABLE",
    "Agent",
    "AwaitCause",
    "Command",
    "Event",
    "Finish",
    "Forward",
    "GroupGone",
    "Hurry",
    "IllegalTransitionError",
    "JobOver",
    "Join",
    "Leave",
    "PatienceOver",
    "Pause",
    "PauseOver",
    "ReportFailing",
    "ReportReady",
    "RoundFailed",
    "RoundFormed",
    "RoundHalted",
    "RoundWarned",
    "Signalled",
    "StartWorkers",
    "StopWorkers",
    "Warn",
    "WorkerExited",
    "WorkerStuck",
    "begin",
    "decide",
    "has_news",
    "may_start_again",
]

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


#: (state, event) -> the states that may follow.
TRANSITIONS: dict[tuple[str, type[Event]], tuple[str, ...]] = {
    (JOINING, RoundFormed): (RUNNING,),
    (JOINING, RoundFailed): (ENDED,),
    (JOINING, JobOver): (ENDED,),
    (JOINING, Signalled): (JOINING, ENDED),
    (RUNNING, WorkerExited): (RUNNING, STOPPING),
    (RUNNING, PatienceOver): (STOPPING,),
    (RUNNING, WorkerStuck): (STOPPING,),
    (RUNNING, RoundFailed): (STOPPING,),
    (RUNNING, RoundWarned): (RUNNING,),
    (RUNNING, RoundHalted): (STOPPING,),
    (RUNNING, JobOver): (STOPPING,),
    (RUNNING, Signalled): (RUNNING, STOPPING),
    (STOPPING, WorkerExited): (STOPPING,),
    (STOPPING, PatienceOver): (STOPPING,),
    (STOPPING, WorkerStuck): (STOPPING,),
    (STOPPING, RoundFailed): (STOPPING,),
    (STOPPING, RoundWarned): (STOPPING,),
    (STOPPING, RoundHalted): (STOPPING,),
    (STOPPING, JobOver): (STOPPING,),
    (STOPPING, Signalled): (STOPPING,),
    (STOPPING, GroupGone): (JOINING, PAUSING, ENDED),
    (PAUSING, PauseOver): (JOINING,),
    (PAUSING, Signalled): (PAUSING, ENDED),
}


class IllegalTransitionError(Exception):
    """An event came in a state in which it can't: a defect of the driver or of the table."""


class Agent:
    """What one agent knows.

    Args:
        policy: What the user said about restarts.
        local_world_size: Workers on this node.
        forwarded: Signals that are passed on to the workers and stop nothing.
        follows_job: Whether a job of several nodes decides what follows a round.
        patience: Seconds for which the cause is awaited where it may be a worker's that still runs.
    """

    __slots__ = (
        "awaits_cause",
        "ending",
        "failures",
        "follows_job",
        "forwarded",
        "interrupts",
        "is_hurried",
        "local_world_size",
        "patience",
        "policy",
        "restart_count",
        "restart_times",
        "round",
        "running",
        "signal",
        "start_failure",
        "state",
        "stop_reason",
    )

    def __init__(
        self,
        *,
        policy: RestartPolicy,
        local_world_size: int,
        forwarded: frozenset[int] = frozenset(),
        follows_job: bool = False,
        patience: float = CAUSE_PATIENCE,
    ) -> None:
        self.policy = policy
        self.local_world_size = local_world_size
        self.forwarded = forwarded
        self.follows_job = follows_job
        self.patience = patience
        self.state = JOINING
        self.round = 0
        self.running: frozenset[int] = frozenset()
        self.failures: tuple[Failure, ...] = ()
        self.restart_times: tuple[float, ...] = ()
        self.restart_count = 0
        self.awaits_cause = False
        self.stop_reason = ""
        self.signal: int | None = None
        self.interrupts = 0
        self.is_hurried = False
        self.start_failure: RoundFailed | None = None
        self.ending: Finish | None = None

    def replace(self, **changes: object) -> Agent:
        """Return a copy with some fields changed."""
        copy = Agent(policy=self.policy, local_world_size=self.local_world_size, forwarded=self.forwarded)
        for name in self.__slots__:
            setattr(copy, name, changes.get(name, getattr(self, name)))
        return copy


Decision = tuple[Agent, tuple[Command, ...]]


def begin(agent: Agent) -> Decision:
    """Return the first decision: join."""
    return agent, (Join(agent.round, agent.restart_count),)


def decide(agent: Agent, event: Event, now: float, jitter: float = 0.0) -> Decision:
    """Decide what follows an event.

    Args:
        agent: What the agent knows.
        event: What has happened.
        now: Monotonic seconds.
        jitter: A random number in [0, 1), for the pause before a restart.

    Returns:
        What the agent knows now, and the commands to perform, in order.

    Raises:
        IllegalTransitionError: The event can't happen in this state.
    """
    is_past = event.round is not None and event.round != agent.round
    if is_past or agent.state == ENDED:
        return agent, ()
    allowed = TRANSITIONS.get((agent.state, type(event)))
    if allowed is None:
        message = f"{type(event).__name__} in state {agent.state}"
        raise IllegalTransitionError(message)
    after, commands = _react(agent, event, now, jitter)
    if after.state not in allowed:
        message = f"{type(event).__name__} led from {agent.state} to {after.state}"
        raise IllegalTransitionError(message)
    return after, commands


def may_start_again(agent: Agent) -> bool:
    """Whether another round may follow the one that is being stopped, so that it is worth preparing."""
    if agent.ending is not None or agent.start_failure is not None:
        return False
    if agent.stop_reason == AFTER_FAILURE and not agent.follows_job:
        return has_budget(agent.policy, agent.restart_count)
    return agent.stop_reason in (AFTER_FAILURE, AFTER_HALT)


def has_news(before: Agent, after: Agent) -> bool:
    """Whether something happened between two states that the user wants to know while the job goes on."""
    return (before.restart_count, before.signal, before.is_hurried) != (
        after.restart_count,
        after.signal,
        after.is_hurried,
    )


def _react(agent: Agent, event: Event, now: float, jitter: float) -> Decision:  # noqa: PLR0911 - one per event
    if isinstance(event, Signalled):
        return _on_signal(agent, event)
    if isinstance(event, WorkerExited):
        return _on_exit(agent, event)
    if isinstance(event, GroupGone):
        return _on_group_gone(agent, event, now, jitter)
    if isinstance(event, RoundFormed):
        return _on_formed(agent, event)
    if isinstance(event, (RoundFailed, WorkerStuck)):
        return _on_round_failed(agent, event)
    if isinstance(event, PatienceOver):
        return _stop(agent, AFTER_FAILURE)
    if isinstance(event, (RoundWarned, RoundHalted, JobOver)):
        return _on_job(agent, event)
    return agent.replace(state=JOINING), (Join(agent.round, agent.restart_count),)


def _on_formed(agent: Agent, event: RoundFormed) -> Decision:
    restarts = agent.restart_count if event.restart_count is None else event.restart_count
    running = frozenset(range(agent.local_world_size))
    agent = agent.replace(state=RUNNING, running=running, restart_count=restarts, awaits_cause=False)
    return agent, (StartWorkers(agent.round),)


def _on_round_failed(agent: Agent, event: RoundFailed | WorkerStuck) -> Decision:
    if isinstance(event, WorkerStuck):
        # A fresh worker would fight the wedged one for its device, so there is no restart.
        after, commands = _stop(agent, AFTER_FAILURE)
        return after.replace(ending=Finish("unkillable_worker")), commands
    if agent.state == JOINING:
        return agent.replace(state=ENDED), (Finish(event.verdict, detail=event.detail),)
    # Some workers may run already: they go first, then the job ends.
    after, commands = _stop(agent, AFTER_FAILURE)
    return after.replace(start_failure=agent.start_failure or event), commands


def _on_job(agent: Agent, event: RoundWarned | RoundHalted | JobOver) -> Decision:
    if isinstance(event, RoundWarned):
        return agent, (Warn(),) if agent.state == RUNNING else ()
    if isinstance(event, RoundHalted):
        return _stop(agent, AFTER_FAILURE if agent.awaits_cause else AFTER_HALT)
    if agent.state == JOINING:
        return agent.replace(state=ENDED), (event.finish,)
    after, commands = _stop(agent, AFTER_HALT)
    return after.replace(ending=event.finish), commands


def _on_exit(agent: Agent, event: WorkerExited) -> Decision:
    agent = agent.replace(running=agent.running - {event.local_rank})
    if agent.state == STOPPING:
        return agent, ()
    if event.exitcode != 0:
        return _on_failure(agent, event)
    if not agent.running:
        # What the workers left in the background lives on once the job has succeeded; the driver sees to that.
        return _stop(agent, AFTER_FAILURE if agent.awaits_cause else AFTER_SUCCESS)
    return agent, ()


def _on_failure(agent: Agent, event: WorkerExited) -> Decision:
    may_wait = event.is_consequence and agent.patience > 0
    is_told = agent.awaits_cause and may_wait
    report = (ReportFailing(agent.round, is_consequence=may_wait),) if agent.follows_job and not is_told else ()
    if may_wait and agent.running:
        wait = () if agent.awaits_cause else (AwaitCause(agent.round, agent.patience),)
        return agent.replace(awaits_cause=True), (*report, *wait)
    after, commands = _stop(agent, AFTER_FAILURE)
    return after, (*report, *commands)


def _stop(agent: Agent, reason: str, signal: int = SIGTERM) -> Decision:
    if agent.state == STOPPING:
        return agent, ()
    return agent.replace(state=STOPPING, stop_reason=reason), (StopWorkers(signal),)


def _on_signal(agent: Agent, event: Signalled) -> Decision:
    if event.number in agent.forwarded:
        return agent, (Forward(event.number),) if agent.state == RUNNING else ()
    agent = agent.replace(interrupts=agent.interrupts + (event.number == SIGINT))
    leave = (Leave(BY_SIGNAL),) if agent.follows_job and agent.signal is None else ()
    if agent.state in (JOINING, PAUSING):
        finish = Finish("signal", signal=event.number)
        return agent.replace(state=ENDED, signal=event.number), (*leave, finish)
    if agent.state == RUNNING:
        after, commands = _stop(agent, AFTER_SIGNAL, event.told)
        return after.replace(signal=event.number), (*leave, *commands)
    return _on_signal_while_stopping(agent, event, leave)


def _on_signal_while_stopping(agent: Agent, event: Signalled, leave: tuple[Command, ...]) -> Decision:
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
        leave = (Leave(UNKILLABLE),) if agent.follows_job and finish.verdict == "unkillable_worker" else ()
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
    """Return the end of this agent, where nobody has to be asked."""
    if event.is_unkillable:
        return Finish("unkillable_worker", signal=agent.signal)
    if agent.stop_reason == AFTER_SIGNAL:
        return Finish("signal", signal=agent.signal)
    return agent.ending


def _tell_job(agent: Agent) -> Decision:
    """Report the round, and wait for the next one or the verdict."""
    failed = agent.start_failure
    if failed is not None:
        report = ReportReady(agent.round, CANNOT_START, verdict=failed.verdict, detail=failed.detail)
    else:
        report = ReportReady(agent.round, _OUTCOMES[agent.stop_reason])
    if agent.signal is not None:
        return agent.replace(state=ENDED), (report, Leave(BY_SIGNAL), Finish("signal", signal=agent.signal))
    return agent.replace(state=JOINING, round=agent.round + 1, stop_reason="", start_failure=None), (report,)


#: What became of a round on this node, by why it was stopped.
_OUTCOMES = {AFTER_SUCCESS: DONE, AFTER_FAILURE: FAILED, AFTER_HALT: STOPPED}


def _after_failure(agent: Agent, failure: Failure, now: float, jitter: float) -> Decision:
    failures = (*agent.failures[-REMEMBERED_FAILURES:], failure)
    agent = agent.replace(failures=failures)
    answer = decide_restart(agent.policy, failures, agent.restart_times, now, jitter, used=agent.restart_count)
    if isinstance(answer, GiveUp):
        return agent.replace(state=ENDED), (Finish(answer.verdict, detail=answer.detail),)
    agent = agent.replace(
        round=agent.round + 1,
        restart_times=(*agent.restart_times, now)[-(agent.policy.window_count or 1) :],
        restart_count=agent.restart_count + 1,
        stop_reason="",
        state=JOINING,
    )
    if answer.delay > 0:
        return agent.replace(state=PAUSING), (Pause(agent.round, answer.delay),)
    return agent, (Join(agent.round, agent.restart_count),)
