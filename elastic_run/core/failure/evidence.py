"""What is known of a failed attempt, and a cause that follows from it: the records of `diagnose`."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.diagnosis.stack_groups import Place
    from elastic_run.core.failure.root_cause import WorkerEnd

# Kinds of causes.
EXCEPTION = "exception"
END = "end"
OOM_KILL = "oom_kill"
GPU_DEFECT = "gpu_defect"
LOG_DISK_FULL = "log_disk_full"
OTHER_VERSION = "other_version"
EARLY_EXIT = "early_exit"
STUCK = "stuck"
HUNG = "hang"
NODE_EVENT = "node_event"
COLLECTIVE = "collective"
LOST_PEER = "lost_peer"
#: Kind of a rule, not of a cause: the program meets at another address than that of the job's store.
OWN_ADDRESS = "own_address"
#: How far a cause is proved, the surest first.
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"


@dataclass(frozen=True, slots=True)
class Rule:
    """What helps against one kind of failure.

    Args:
        match: A regular expression that is searched for in what the worker said.
        help: What the user can do.
        decision: What follows: one of `restart_policy.RULE_DECISIONS`, or "" for what the flags say.
        cause: The only kind of cause that the rule is for, `OWN_ADDRESS`, or "".
    """

    match: str
    help: str
    decision: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class RecorderFinding:
    """What the dumps of the flight recorder say first.

    Args:
        text: One sentence.
        ranks: The ranks at which the cause lies; empty where no rank is accused.
        is_whole_job: Whether all ranks of the job were asked for their dumps.
    """

    text: str
    ranks: tuple[int, ...] = ()
    is_whole_job: bool = True


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a failed attempt.

    Args:
        root: The worker whose failure came first, or None.
        ends: How the workers of this node ended.
        stuck: Where the ranks of a job of several nodes were that did not stop; None if this node knows only its own.
        recorder: What the flight recorder says, or None.
        node_event: Which nodes the job has lost, or why this one has to go, if that has ended it; or "".
        versions: Which nodes have which version of torch; "" where all have the same.
        is_log_disk_full: Whether nothing more fits on the disk of the root cause's log files.
        rule: The user's rule that fits the failure, or None.
        rules: The rules of elastic-run on what helps against known failures.
        store_port: Port of the workers' store if an agent serves it, so that each rank is a client; or None.
    """

    root: WorkerEnd | None
    ends: tuple[WorkerEnd, ...] = ()
    stuck: Mapping[int, Place] | None = None
    recorder: RecorderFinding | None = None
    node_event: str = ""
    versions: str = ""
    is_log_disk_full: bool = False
    rule: Rule | None = None
    rules: tuple[Rule, ...] = ()
    store_port: int | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a failure.

    Args:
        kind: One of the kinds above.
        ranks: The ranks at which it lies; those with an equal failure are folded.
        confidence: CERTAIN, LIKELY or POSSIBLE.
        why: From which evidence it follows, a clause each.
        help: What the user can do, or "".
    """

    kind: str
    ranks: tuple[int, ...]
    confidence: str
    why: tuple[str, ...]
    help: str = ""
