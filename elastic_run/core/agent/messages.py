"""What the state machine of one agent is told, and what it answers: the words of `machine`.

Plain classes with slots, since a single node's launcher imports them while its workers boot.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.agent.restart_policy import Failure

# What became of a round on this node.
DONE = "done"
FAILED = "failed"
STOPPED = "stopped"
CANNOT_START = "cannot_start"

# Why a node leaves its job.
BY_SIGNAL = "signal"
UNKILLABLE = "unkillable"


class Event:
    """Something that happened; `round` is None where it belongs to no round."""

    __slots__ = ("round",)

    def __init__(self, round: int | None = None) -> None:  # noqa: A002 - the field's word
        self.round = round


class RoundFormed(Event):
    """The rendezvous gave this node its place in a round.

    Args:
        round: The agent's round.
        restart_count: Restarts of the job so far, where the job counts them; None where this agent does.
    """

    __slots__ = ("restart_count",)

    def __init__(self, round: int, *, restart_count: int | None = None) -> None:  # noqa: A002
        super().__init__(round)
        self.restart_count = restart_count


class RoundFailed(Event):
    """The rendezvous ended without a round, or the workers could not be started."""

    __slots__ = ("detail", "verdict")

    def __init__(self, round: int, *, verdict: str, detail: str) -> None:  # noqa: A002
        super().__init__(round)
        self.verdict = verdict
        self.detail = detail


class WorkerExited(Event):
    """A worker ended by itself or because it was told to.

    Args:
        round: The agent's round.
        local_rank: Its number on this node.
        exitcode: Its exit code, or minus the number of the signal that ended it.
        is_consequence: Whether it failed as those do who lose a peer, so that the cause may be somebody else's.
    """

    __slots__ = ("exitcode", "is_consequence", "local_rank")

    def __init__(self, round: int, *, local_rank: int, exitcode: int, is_consequence: bool = False) -> None:  # noqa: A002
        super().__init__(round)
        self.local_rank = local_rank
        self.exitcode = exitcode
        self.is_consequence = is_consequence


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
    """The launcher got a signal.

    Args:
        number: The signal.
        told: The signal that the workers get first when it stops them; by default the same.
    """

    __slots__ = ("number", "told")

    def __init__(self, number: int, told: int | None = None) -> None:
        super().__init__(None)
        self.told = number if told is None else told
        self.number = number


class PatienceOver(Event):
    """The cause of what failed has been awaited for long enough."""

    __slots__ = ()


class PauseOver(Event):
    """The pause before a restart has passed."""

    __slots__ = ()


class RoundWarned(Event):
    """The job will stop the round for a change of its nodes: the workers are told first."""

    __slots__ = ()


class RoundHalted(Event):
    """The job stops the round: another node's worker failed, or a node came or went."""

    __slots__ = ()


class JobOver(Event):
    """The job has come to its verdict, or can't be followed any more."""

    __slots__ = ("finish",)

    def __init__(self, finish: Finish) -> None:
        super().__init__(None)
        self.finish = finish


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


class AwaitCause(Command):
    """Bring `PatienceOver` after `delay` seconds."""

    __slots__ = ("delay", "round")

    def __init__(self, round: int, delay: float) -> None:  # noqa: A002
        self.round = round
        self.delay = delay


class Warn(Command):
    """Tell the workers that they will be stopped soon."""

    __slots__ = ()


class ReportFailing(Command):
    """Tell the job at once that a worker of the round has failed; how, follows when all of them are gone.

    Args:
        round: The agent's round.
        is_consequence: Whether all that failed so far look as if they had lost a peer.
    """

    __slots__ = ("is_consequence", "round")

    def __init__(self, round: int, *, is_consequence: bool = False) -> None:  # noqa: A002
        self.round = round
        self.is_consequence = is_consequence


class ReportReady(Command):
    """Tell the job that no process of the round lives on this node, and wait for what it decides.

    Args:
        round: The round that is over.
        outcome: `DONE`, `FAILED`, `STOPPED` or `CANNOT_START`.
        verdict: For `CANNOT_START`: a name from `contract.EXIT_CODES`.
        detail: For `CANNOT_START`: one sentence.
    """

    __slots__ = ("detail", "outcome", "round", "verdict")

    def __init__(self, round: int, outcome: str, *, verdict: str = "", detail: str = "") -> None:  # noqa: A002
        self.round = round
        self.outcome = outcome
        self.verdict = verdict
        self.detail = detail


class Leave(Command):
    """Tell the job that this node goes, and why: `BY_SIGNAL` or `UNKILLABLE`."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Finish(Command):
    """The job is over on this node.

    Args:
        verdict: A name from `contract.EXIT_CODES`.
        detail: One sentence more, or empty.
        signal: The signal that stopped the launcher, or None.
        exit_code: What the job has decided on, or None to take it from the verdict and this node's root cause.
    """

    __slots__ = ("detail", "exit_code", "signal", "verdict")

    def __init__(
        self, verdict: str, *, detail: str = "", signal: int | None = None, exit_code: int | None = None
    ) -> None:
        self.verdict = verdict
        self.detail = detail
        self.signal = signal
        self.exit_code = exit_code
