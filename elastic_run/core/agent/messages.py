"""The events and the commands of an agent's state machine, `machine`."""

from __future__ import annotations

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.restart_policy import Failure


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; `round` is None where it belongs to no round."""

    round: int | None


@dataclass(frozen=True, slots=True)
class RoundFormed(Event):
    """The rendezvous gave this node its place in a round."""

    #: Restarts of the job so far, where the job counts them; None where this agent does
    restart_count: int | None = None


@dataclass(frozen=True, slots=True)
class RoundFailed(Event):
    """The rendezvous ended without a round, the workers could not be started, or this node is unhealthy."""

    verdict: str
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerExited(Event):
    """A worker ended by itself or because it was told to."""

    local_rank: int  # Its number on this node
    exitcode: int  # Its exit code, or minus the number of the signal that ended it
    #: Whether it failed as workers do that lose a peer, so that another worker may be the cause
    is_secondary: bool = False


@dataclass(frozen=True, slots=True)
class GroupGone(Event):
    """No process of the round lives any more, or what lives can't be killed."""

    failure: Failure | None
    is_unkillable: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStuck(Event):
    """A worker was in uninterruptible sleep for longer than the user allows."""


@dataclass(frozen=True, slots=True)
class WorkersHung(Event):
    """No rank of the job has made progress for too long, and the user wants a restart."""


@dataclass(frozen=True, slots=True)
class Signalled(Event):
    """The launcher got a signal."""

    round: int | None = field(default=None, init=False)
    number: int  # The signal
    replacement: int | None = None  # The signal that the workers get first in its place when it stops them, or None

    @property
    def told(self) -> int:
        """The signal that the workers get first when it stops them."""
        return self.number if self.replacement is None else self.replacement


@dataclass(frozen=True, slots=True)
class WaitOver(Event):
    """The cause of what failed has been awaited for long enough."""


@dataclass(frozen=True, slots=True)
class PauseOver(Event):
    """The pause before a restart has passed."""


@dataclass(frozen=True, slots=True)
class RoundWarned(Event):
    """The job will stop the round for a change of its nodes: the workers are told first."""


@dataclass(frozen=True, slots=True)
class RoundHalted(Event):
    """The job stops the round: another node's worker failed, or a node came or went."""


@dataclass(frozen=True, slots=True)
class JobOver(Event):
    """The job has come to its verdict, or can't be followed any more."""

    round: int | None = field(default=None, init=False)
    finish: Finish


# --- commands --------------------------------------------------------------------------------------------------------
class Command:
    """Something for the driver to do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Join(Command):
    """Ask the rendezvous for a place in the next round."""

    round: int
    restart_count: int


@dataclass(frozen=True, slots=True)
class StartWorkers(Command):
    """Start this node's workers of the round that was formed."""

    round: int


@dataclass(frozen=True, slots=True)
class StopWorkers(Command):
    """Stop every process of the round: `signal` first, SIGKILL at the end of the grace period."""

    signal: int


@dataclass(frozen=True, slots=True)
class Hurry(Command):
    """Send SIGKILL now."""


@dataclass(frozen=True, slots=True)
class Forward(Command):
    """Pass a signal on to the workers; nothing is stopped."""

    signal: int


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Bring `PauseOver` after `delay` seconds."""

    round: int
    delay: float


@dataclass(frozen=True, slots=True)
class AwaitCause(Command):
    """Bring `WaitOver` after `delay` seconds."""

    round: int
    delay: float


@dataclass(frozen=True, slots=True)
class Warn(Command):
    """Tell the workers that they will be stopped soon."""


@dataclass(frozen=True, slots=True)
class ReportFailing(Command):
    """Tell the job at once that a worker of the round has failed; how, follows when all of them are gone."""

    round: int  # The agent's round
    is_secondary: bool = False  # Whether all that failed so far look as if they had lost a peer


@dataclass(frozen=True, slots=True)
class ReportReady(Command):
    """Tell the job that no process of the round lives on this node, and wait for what it decides."""

    round: int  # The round that is over
    outcome: str  # A name of `restart_policy`
    verdict: str = ""  # For `CANNOT_START`: a name from `contract.EXIT_CODES`
    detail: str = ""  # For `CANNOT_START`: one sentence


@dataclass(frozen=True, slots=True)
class Leave(Command):
    """Tell the job that this node goes, and why: `BY_SIGNAL`, `UNKILLABLE` or `UNHEALTHY`."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Finish(Command):
    """The job is over on this node."""

    verdict: str  # A name from `contract.EXIT_CODES`
    detail: str = ""  # One sentence more, or empty
    signal: int | None = None  # The signal that stopped the launcher, or None
    #: The exit code that the job has decided on; None for that of the verdict or this node's root cause
    exit_code: int | None = None
