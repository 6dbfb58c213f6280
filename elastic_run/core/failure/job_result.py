"""The end of a job, which report, failure.json and error file show: a record without a search, also for a success."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.failure.root_cause import EqualErrors, WorkerEnd
    from elastic_run.core.failure.stacks import Place

#: Verdicts on this node, which may come before its first worker.
OF_NODE = frozenset(("unhealthy", "excluded"))
_EXIT_CODES = {name: code for code, name, _ in contract.EXIT_CODES if isinstance(code, int)}


@dataclass(frozen=True, slots=True)
class Rule:
    """What helps against one kind of failure."""

    match: str  # A regular expression that is searched for in what the worker said
    help: str  # What the user can do
    decision: str = ""  # What follows: one of `restart_policy.RULE_DECISIONS`, or "" for what the flags say
    cause: str = ""  # The only kind of cause that the rule is for, `OWN_ADDRESS`, a verdict of the launcher, or ""


@dataclass(frozen=True, slots=True)
class RecorderFinding:
    """What the dumps of the flight recorder say first."""

    text: str  # One sentence
    ranks: tuple[int, ...] = ()  # The ranks at which the cause lies; empty where no rank is accused
    is_whole_job: bool = True  # Whether all ranks of the job were asked for their dumps


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a failure."""

    kind: str  # One of the kinds of `diagnose`
    ranks: tuple[int, ...]  # The ranks at which it lies; those with an equal failure are folded
    confidence: str  # `certain`, `likely` or `possible`
    why: tuple[str, ...]  # From which evidence it follows, a clause each
    help: str = ""  # What the user can do, or ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failure that was tried again."""

    restart_count: int  # Number of the attempt, the first is 0
    root: WorkerEnd | None  # The worker that failed first, or None
    started_at: float  # Wall clock, seconds since the epoch
    uptime: float  # Seconds until the first failure
    kept_state: str | None = None  # The step of the state that was kept by then, with --keep-state


@dataclass(slots=True)
class JobResult:
    """The end of a job, which report, failure.json and error file show."""

    verdict: str  # A name from `contract.EXIT_CODES`
    exit_code: int  # The launcher's exit code
    entrypoint: str = ""  # The workers' program, such as `train.py`
    role: str = "default"  # Name of the workers' role
    run_id: str = ""  # The job's id
    root: WorkerEnd | None = None  # The worker that failed first in the last attempt, or None
    ends: tuple[WorkerEnd, ...] = ()  # The ends of the last attempt's workers on this node
    #: Where the ranks of a job of several nodes were that did not stop; None if this node knows only its own
    stuck: Mapping[int, Place] | None = None
    equal_errors: EqualErrors | None = None  # Which workers of a job of several nodes had the error of `root`, or None
    attempts: tuple[Attempt, ...] = ()  # The failures before it, oldest first
    restarts_used: int = 0  # Restarts that were made
    max_restarts: int = 0  # Restarts that were allowed
    log_dir: str = ""  # Directory of this run's logs, or ""
    detail: str = ""  # One sentence on a verdict of the launcher, or ""
    #: The finding from the flight recorder's dumps, such as a rank that did not join a collective, or None
    recorder: RecorderFinding | None = None
    versions: str = ""  # The nodes of each version of torch; "" if all have the same
    rule: Rule | None = None  # The user's own rule on the failure of `root`, or None
    #: Port of the workers' store if an agent serves it, so that each rank is a client; or None
    store_port: int | None = None
    signal: int | None = None  # The signal that stopped the launcher, or None
    world_size: int = 1  # Workers in the job
    nnodes: int = 1  # Nodes in the job
    #: Pid and kernel wait channel of each process that SIGKILL could not end
    survivors: tuple[tuple[int, str], ...] = ()
    ended_at: float = 0.0  # Wall clock, seconds since the epoch
    failure_file: str = ""  # Path of the failure.json that was written, or ""
    is_log_disk_full: bool = False  # Whether nothing more fits on the disk of the root cause's log files
    #: Whether this node shows one line in place of the whole report, which the host of `root` shows
    is_brief: bool = False
    causes: tuple[Cause, ...] = ()  # What `diagnose` says of all this
    advice: str | None = None  # What the user can do, or None


def exit_code_of(verdict: str, signal: int | None, root: WorkerEnd | None) -> int:
    """Return the launcher's exit code; see `contract.EXIT_CODES`."""
    if signal is not None:
        return contract.EXIT_SIGNAL_BASE + signal
    if verdict == "worker_failed":
        return contract.EXIT_FAILURE if root is None else root.job_exit_code
    return _EXIT_CODES[verdict]
