"""One agent's life as a state machine: what has happened goes in, what to do comes out.

Pure (law 3): `decide(agent, event, now) -> (agent, commands)`. No I/O, clock, logging, thread or randomness in here;
the driver in `agent` performs the commands and brings back events.

Rules
- Every event of a round carries the round's number; events of past rounds are dropped.
- A worker's failure stops the round; whether it is tried again is decided when the last of its processes is gone,
  because only then all that the workers wrote has been read and the cause is known.
- A signal wins over a restart and over a failure that is still being cleaned up, never over a success.
- `TRANSITIONS` is the whole machine. A step that isn't in it raises. docs/architecture.md draws it from here.
"""

from __future__ import annotations

from elastic_run.core.policy import Failure, GiveUp, RestartPolicy, decide_restart

JOINING = "joining"
RUNNING = "running"
STOPPING = "stopping"
PAUSING = "pausing"
ENDED = "ended"

# Why a round is being stopped.
AFTER_SUCCESS = "success"
AFTER_FAILURE = "failure"
AFTER_SIGNAL = "signal"

SIGINT = 2
SIGTERM = 15

#: More early failures in a row than this make the pause no longer: it has long reached its maximum.
REMEMBERED_FAILURES = 64


class Event:
    """Something that happened; `round` is None where it belongs to no round."""

    __slots__ = ("round",)

    def __init__(self, round: int | None = None) -> None:  # noqa: A002 - the field's word
        self.round = round


class RoundFormed(Event):
    """The rendezvous gave this node its place in a round."""

    __slots__ = ()


class RoundFailed(Event):
    """The rendezvous ended without a round, or the workers could not be started."""

    __slots__ = ("detail", "verdict")

    def __init__(self, round: int, *, verdict: str, detail: str) -> None:  # noqa: A002
        super().__init__(round)
        self.verdict = verdict
        self.detail = detail


class WorkerExited(Event):
    """A worker ended by itself or because it was told to."""

    __slots__ = ("exitcode", "local_rank")

    def __init__(self, round: int, *, local_rank: int, exitcode: int) -> None:  # noqa: A002
        super().__init__(round)
        self.local_rank = local_rank
        self.exitcode = exitcode


class GroupGone(Event):
    """No process of the round lives any more, or what lives can't be killed."""

    __slots__ = ("failure", "is_unkillable")

    def __init__(self, round: int, *, failure: Failure | None, is_unkillable: bool = False) -> None:  # noqa: A002
        super().__init__(round)
        self.failure = failure
        self.is_unkillable = is_unkillable


class WorkerStuck(Event):
    """A worker was in uninterruptible sleep for longer than the user allows."""

    __slots__ = ()


class Signalled(Event):
    """The launcher got a signal."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__(None)
        self.number = number


class PauseOver(Event):
    """The pause before a restart has passed."""

    __slots__ = ()


class Command:
    """Something for the driver to do."""

    __slots__ = ()


class Join(Command):
    """Ask the rendezvous for a place in the next round."""

    __slots__ = ("restart_count", "round")

    def __init__(self, round: int, restart_count: int) -> None:  # noqa: A002
        self.round = round
        self.restart_count = restart_count


class StartWorkers(Command):
    """Start this node's workers of the round that was formed."""

    __slots__ = ("round",)

    def __init__(self, round: int) -> None:  # noqa: A002
        self.round = round


class StopWorkers(Command):
    """Stop every process of the round: `signal` first, SIGKILL at the end of the grace period."""

    __slots__ = ("signal",)

    def __init__(self, signal: int) -> None:
        self.signal = signal


class Hurry(Command):
    """Send SIGKILL now."""

    __slots__ = ()


class Forward(Command):
    """Pass a signal on to the workers; nothing is stopped."""

    __slots__ = ("signal",)

    def __init__(self, signal: int) -> None:
        self.signal = signal


class Pause(Command):
    """Bring `PauseOver` after `delay` seconds."""

    __slots__ = ("delay", "round")

    def __init__(self, round: int, delay: float) -> None:  # noqa: A002
        self.round = round
        self.delay = delay


class Finish(Command):
    """The job is over on this node.

    Args:
        verdict: A name from `contract.EXIT_CODES`.
        detail: One sentence more, or empty.
        signal: The signal that stopped the launcher, or None.
    """

    __slots__ = ("detail", "signal", "verdict")

    def __init__(self, verdict: str, *, detail: str = "", signal: int | None = None) -> None:
        self.verdict = verdict
        self.detail = detail
        self.signal = signal


#: (state, event) -> the states that may follow.
TRANSITIONS: dict[tuple[str, type[Event]], tuple[str, ...]] = {
    (JOINING, RoundFormed): (RUNNING,),
    (JOINING, RoundFailed): (ENDED,),
    (JOINING, Signalled): (JOINING, ENDED),
    (RUNNING, WorkerExited): (RUNNING, STOPPING),
    (RUNNING, WorkerStuck): (STOPPING,),
    (RUNNING, RoundFailed): (STOPPING,),
    (RUNNING, Signalled): (RUNNING, STOPPING),
    (STOPPING, WorkerExited): (STOPPING,),
    (STOPPING, WorkerStuck): (STOPPING,),
    (STOPPING, RoundFailed): (STOPPING,),
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
    """

    __slots__ = (
        "ending",
        "failures",
        "forwarded",
        "interrupts",
        "is_hurried",
        "local_world_size",
        "policy",
        "restart_times",
        "round",
        "running",
        "signal",
        "state",
        "stop_reason",
    )

    def __init__(
        self, *, policy: RestartPolicy, local_world_size: int, forwarded: frozenset[int] = frozenset()
    ) -> None:
        self.policy = policy
        self.local_world_size = local_world_size
        self.forwarded = forwarded
        self.state = JOINING
        self.round = 0
        self.running: frozenset[int] = frozenset()
        self.failures: tuple[Failure, ...] = ()
        self.restart_times: tuple[float, ...] = ()
        self.stop_reason = ""
        self.signal: int | None = None
        self.interrupts = 0
        self.is_hurried = False
        self.ending: Finish | None = None

    @property
    def restart_count(self) -> int:
        """Restarts so far."""
        return len(self.restart_times)

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
        running = frozenset(range(agent.local_world_size))
        return agent.replace(state=RUNNING, running=running), (StartWorkers(agent.round),)
    if isinstance(event, RoundFailed):
        return _on_round_failed(agent, event)
    if isinstance(event, WorkerStuck):
        # A fresh worker would fight the wedged one for its device, so there is no restart.
        after, commands = _stop(agent, AFTER_FAILURE)
        return after.replace(ending=Finish("unkillable_worker")), commands
    return agent.replace(state=JOINING), (Join(agent.round, agent.restart_count),)


def _on_round_failed(agent: Agent, event: RoundFailed) -> Decision:
    if agent.state == JOINING:
        return agent.replace(state=ENDED), (Finish(event.verdict, detail=event.detail),)
    # Some workers may run already: they go first, then the job ends.
    after, commands = _stop(agent, AFTER_FAILURE)
    return after.replace(ending=agent.ending or Finish(event.verdict, detail=event.detail)), commands


def _on_exit(agent: Agent, event: WorkerExited) -> Decision:
    agent = agent.replace(running=agent.running - {event.local_rank})
    if agent.state == STOPPING:
        return agent, ()
    if event.exitcode != 0:
        return _stop(agent, AFTER_FAILURE)
    if not agent.running:
        # What the workers left behind (a daemon, a shell's background job) goes with them: law 6.
        return _stop(agent, AFTER_SUCCESS)
    return agent, ()


def _stop(agent: Agent, reason: str, signal: int = SIGTERM) -> Decision:
    if agent.state == STOPPING:
        return agent, ()
    return agent.replace(state=STOPPING, stop_reason=reason), (StopWorkers(signal),)


def _on_signal(agent: Agent, event: Signalled) -> Decision:
    if event.number in agent.forwarded:
        return agent, (Forward(event.number),) if agent.state == RUNNING else ()
    agent = agent.replace(interrupts=agent.interrupts + (event.number == SIGINT))
    if agent.state in (JOINING, PAUSING):
        return agent.replace(state=ENDED, signal=event.number), (Finish("signal", signal=event.number),)
    if agent.state == RUNNING:
        after, commands = _stop(agent, AFTER_SIGNAL, event.number)
        return after.replace(signal=event.number), commands
    return _on_signal_while_stopping(agent, event)


def _on_signal_while_stopping(agent: Agent, event: Signalled) -> Decision:
    is_enough = agent.stop_reason == AFTER_SUCCESS or agent.interrupts > 1
    if is_enough and not agent.is_hurried:
        return agent.replace(is_hurried=True), (Hurry(),)
    if agent.stop_reason == AFTER_FAILURE:
        return agent.replace(stop_reason=AFTER_SIGNAL, signal=event.number), ()
    return agent, ()


def _on_group_gone(agent: Agent, event: GroupGone, now: float, jitter: float) -> Decision:
    if event.is_unkillable:
        return agent.replace(state=ENDED), (Finish("unkillable_worker", signal=agent.signal),)
    if agent.stop_reason == AFTER_SUCCESS:
        return agent.replace(state=ENDED), (Finish("success"),)
    if agent.stop_reason == AFTER_SIGNAL:
        return agent.replace(state=ENDED), (Finish("signal", signal=agent.signal),)
    if agent.ending is not None:
        return agent.replace(state=ENDED), (agent.ending,)
    return _after_failure(agent, event.failure or Failure(exit_code=1), now, jitter)


def _after_failure(agent: Agent, failure: Failure, now: float, jitter: float) -> Decision:
    failures = (*agent.failures[-REMEMBERED_FAILURES:], failure)
    agent = agent.replace(failures=failures)
    answer = decide_restart(agent.policy, failures, agent.restart_times, now, jitter)
    if isinstance(answer, GiveUp):
        return agent.replace(state=ENDED), (Finish(answer.verdict, detail=answer.detail),)
    agent = agent.replace(
        round=agent.round + 1, restart_times=(*agent.restart_times, now), stop_reason="", state=JOINING
    )
    if answer.delay > 0:
        return agent.replace(state=PAUSING), (Pause(agent.round, answer.delay),)
    return agent, (Join(agent.round, agent.restart_count),)
