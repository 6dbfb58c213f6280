"""The configuration of an agent: settings of its node that concern no rendezvous, so also of a job of one node.

A setting is defined here, with its default, and nowhere else; the flag of the same name (`cli.flags`) explains it to
users. torch's own settings stay fields of torch's classes, `LaunchConfig` and `WorkerSpec`.
"""

from __future__ import annotations

from elastic_run.records import dataclass

#: Most nodes of a job in which every node may ask all others, and prints the whole report of a failure. In a larger job
#: a few nodes do it for all.
FEW_NODES = 16


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The configuration of an agent.

    Args:
        worker_store: Server of the workers' store: `auto`, `agent`, `rank0` or `torch`.
        capture: Whether the workers' stderr passes through the agent, so that the report can show its end.
        preload: Modules, separated by commas, that a template process imports once for all workers; `auto` for the
            large modules that the script imports, "" for none.
        kill_background_processes: Whether processes that workers left in the background are ended after a success too.
        health_port: Port at which this node answers health checks; 0 for a free port, None for no health checks.
        metrics_port: Port at which this node answers Prometheus; 0 for a free port, None for no metrics.
        events_file: File to which this node's events are appended, beside the file in the log directory, or "".
        failure_rules: File with the user's rules on what helps against failures, or "".
        flight_recorder: Whether torch's flight recorder is on in the workers, and its dumps explain a failure.
        hang_timeout: Seconds without progress of any rank that are a hang; 0 for a time that follows from the job's
            rhythm, None for no detection.
        hang_action: The reaction to a hang: `report`, `restart` or `fail`.
        keep_state: Memory in which the workers keep their state beyond their end, such as `64GB`; `auto` for half of
            what is left, "" for none.
        keep_state_copies: Copies of each worker's state on another node, 0 or 1.
        keep_state_dir: Directory to which the kept state of a job that fails or is stopped is written, or "".
        inject_fault: Faults that the agent injects into the workers, as `--inject-fault` has them, or "".
    """

    worker_store: str = "auto"
    capture: bool = True
    preload: str = ""
    kill_background_processes: bool = False
    health_port: int | None = None
    metrics_port: int | None = None
    events_file: str = ""
    failure_rules: str = ""
    flight_recorder: bool = False
    hang_timeout: float | None = None
    hang_action: str = "report"
    keep_state: str = ""
    keep_state_copies: int = 0
    keep_state_dir: str = ""
    inject_fault: str = ""
