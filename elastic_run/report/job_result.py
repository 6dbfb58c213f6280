"""How a job ended: the record that the report, failure.json and the parent's error file are made of."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.diagnosis.stacks import Place
    from elastic_run.core.failure.diagnose import Cause, RecorderFinding, Rule
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.core.protocol.decisions import EqualErrors


#: Verdicts whose detail says which nodes are lost, or why this node has to go.
_OF_NODES = frozenset(("nodes_lost", "excluded", "unhealthy"))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failure that was tried again.

    Args:
        restart_count: Number of the attempt, the first is 0.
        root: The worker that failed first, or None.
        started_at: Wall clock, seconds since the epoch.
        uptime: Seconds until the first failure.
    """

    restart_count: int
    root: WorkerEnd | None
    started_at: float
    uptime: float


@dataclass(slots=True)
class JobResult:
    """The end of a job.

    Args:
        verdict: A name from `contract.EXIT_CODES`.
        exit_code: The launcher's exit code.
        entrypoint: The workers' program, such as `train.py`.
        role: Name of the workers' role.
        run_id: The job's id.
        root: The worker that failed first in the last attempt, or None.
        ends: The ends of the last attempt's workers.
        stuck: Where the ranks of a job of several nodes were that did not stop; None if this node knows only its own.
        equal_errors: Which workers of a job of several nodes had the error of `root`, or None.
        attempts: The failures before it, oldest first.
        restarts_used: Restarts that were made.
        max_restarts: Restarts that were allowed.
        log_dir: Directory of this run's logs, or "".
        detail: One sentence on a verdict of the launcher, or "".
        recorder: The finding from the flight recorder's dumps, such as a rank that did not join a collective, or None.
        versions: The nodes of each version of torch; "" if all have the same.
        rule: The user's own rule on the failure of `root`, or None.
        store_port: Port of the workers' store in the last attempt if an agent serves it, or None.
        signal: The signal that stopped the launcher, or None.
        world_size: Workers in the job.
        nnodes: Nodes in the job.
        survivors: Pid and kernel wait channel of each process that SIGKILL could not end.
        ended_at: Wall clock, seconds since the epoch.
        failure_file: Path of the failure.json that was written, or "".
        is_log_disk_full: Whether the disk of the logs is full.
        is_brief: Whether this node shows one line in place of the whole report, which the host of `root` shows.
    """

    verdict: str
    exit_code: int
    entrypoint: str = ""
    role: str = "default"
    run_id: str = ""
    root: WorkerEnd | None = None
    ends: tuple[WorkerEnd, ...] = ()
    stuck: Mapping[int, Place] | None = None
    equal_errors: EqualErrors | None = None
    attempts: tuple[Attempt, ...] = ()
    restarts_used: int = 0
    max_restarts: int = 0
    log_dir: str = ""
    detail: str = ""
    recorder: RecorderFinding | None = None
    versions: str = ""
    rule: Rule | None = None
    store_port: int | None = None
    signal: int | None = None
    world_size: int = 1
    nnodes: int = 1
    survivors: tuple[tuple[int, str], ...] = ()
    ended_at: float = 0.0
    failure_file: str = ""
    is_log_disk_full: bool = False
    is_brief: bool = False

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the failure, the likeliest first."""
        from elastic_run.core.failure.diagnose import Evidence, diagnose
        from elastic_run.report.failure_rules import built_in_rules

        return diagnose(
            Evidence(
                root=self.root,
                ends=self.ends,
                stuck=self.stuck,
                recorder=self.recorder,
                node_event=self.detail if self.verdict in _OF_NODES else "",
                versions=self.versions,
                is_log_disk_full=self.is_log_disk_full,
                rule=self.rule,
                rules=built_in_rules(),
                store_port=self.store_port,
            )
        )
