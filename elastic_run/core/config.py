"""The configuration of a job: what its nodes must agree on, what its first node decides for all, and each node's own.

- A setting is defined here, with its default, and nowhere else; the flag of the same name (`cli.flags`) explains it to
  users. The rendezvous adds what --rdzv-conf and the endpoint say, and each node sends its `JobConfig` whole.
- Settings that two nodes can't reconcile (`_AGREED`) keep a node out: how many nodes there are, when the job is
  restarted, and what each node applies by itself, as the lease. The answer names the flag and both values.
- Durations that only the coordinator applies are those of the job's first node. A node with other values is taken in.
- A setting that each node may have for itself belongs into `NodeConfig` or `AgentConfig`. torch's own settings stay
  fields of torch's classes, `LaunchConfig` and `WorkerSpec`.
"""

from __future__ import annotations

from elastic_run.contract import LARGEST_NUMBER
from elastic_run.records import dataclass

#: Fields of `JobConfig` and their names for users; the two numbers of nodes are one flag.
_AGREED = {
    "max_restarts": "--max-restarts",
    "restart_window": "--restart-window",
    "membership_window": "--membership-window",
    "no_restart_exit_codes": "--no-restart-exit-codes",
    "exclude_after": "--exclude-after",
    "exclude_exit_codes": "--exclude-exit-codes",
    "keep_alive_interval": "keep_alive_interval",
    "keep_alive_max_attempt": "keep_alive_max_attempt",
    "has_successors": "successors of the endpoint",
    "on_split": "--on-split",
}

#: Fields that are numbers or times.
_NUMBERS = (
    *("min_nodes", "max_nodes", "max_restarts", "min_uptime", "max_backoff", "join_timeout", "last_call_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "scale_up_delay", "scale_up_grace"),
)
#: Seconds between two signs of life, at least: no node could keep a shorter interval.
SHORTEST_INTERVAL = 0.001
#: Most nodes of a job in which every node may ask all others, and prints the whole report of a failure. In a larger job
#: a few nodes do it for all.
FEW_NODES = 16


@dataclass(frozen=True, slots=True)
class Window:
    """So many times in any period of so many seconds; None for the whole job."""

    count: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.count < 0 or not (self.seconds is None or self.seconds > 0):  # nor nan
            message = f"Window: {self} has a negative number, or no time"
            raise ValueError(message)

    def __str__(self) -> str:
        return f"{self.count} per {'job' if self.seconds is None else f'{self.seconds:g} s'}"


@dataclass(frozen=True, slots=True)
class JobConfig:
    """The configuration of a job as a node was given it; times in seconds."""

    min_nodes: int = 1  # With fewer nodes no round is formed
    max_nodes: int = 1  # More nodes wait as spares
    #: Restarts of the whole job. With a window and 0 here only the window counts.
    max_restarts: int = 0
    restart_window: Window | None = None  # Most restarts in a period, or None
    min_uptime: float | None = None  # Time that a round has to live to count as healthy, or None for the built-in rule
    #: Exit codes (128+n for signals) that end the job without a restart, in ascending order
    no_restart_exit_codes: tuple[int, ...] = ()
    max_backoff: float = 30.0  # Longest pause before a restart; 0 for none
    join_timeout: float = 600.0  # Time that fewer nodes than `min_nodes` wait for more
    #: Time that a first formation waits for more than `min_nodes`; 0 to begin with those
    last_call_timeout: float = 30.0
    keep_alive_interval: float = 2.0  # Time between two signs of life on a connection that is silent
    keep_alive_max_attempt: int = 3  # Number of missing signs of life after which a node is lost
    scale_up_delay: float = 2.0  # Time from a node's arrival at a running round until the round makes way for it
    scale_up_grace: float = 30.0  # Time from the warning of the workers until they are stopped for it; 0 for no warning
    #: Most changes of the membership in a period, or None for any number
    membership_window: Window | None = Window(100, 3600.0)
    has_successors: bool = False  # Whether the store moves on to another node when its host is gone
    on_split: str = "stop"  # What the survivor of two nodes does then: `stop` or `continue`
    exclude_after: Window | None = None  # Failures in a period that exclude the machine on which they begin, or None
    exclude_exit_codes: tuple[int, ...] = ()  # Exit codes of a worker that exclude its machine, in ascending order

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            message = f"JobConfig: {self.min_nodes}:{self.max_nodes} nodes make no sense"
            raise ValueError(message)
        if self.keep_alive_interval < SHORTEST_INTERVAL or self.keep_alive_max_attempt < 1:
            message = (
                f"JobConfig: the lease must be longer than 0 s, and a keep-alive takes {SHORTEST_INTERVAL:g} s or more"
            )
            raise ValueError(message)
        # Larger numbers, and nan, can't be told to the other nodes.
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= LARGEST_NUMBER:
                message = f"JobConfig: {name} is {value}, and must be from 0 to {LARGEST_NUMBER}"
                raise ValueError(message)

    @property
    def lease(self) -> float:
        """Seconds without a sign of life after which a node is lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt


def describe_difference(job: JobConfig, node: JobConfig, *, here: str = "here") -> str:
    """Return a clause with both values for each setting that keeps a node out of its job; "" if there is none.

    `here` names the node's place for the reader, who may be another node's user.
    """
    if job == node:
        return ""
    clauses = []
    if (job.min_nodes, job.max_nodes) != (node.min_nodes, node.max_nodes):
        clauses.append(f"--nnodes is {_show_nodes(node)} {here} and {_show_nodes(job)} in the job")
    clauses += [
        f"{flag} is {_show(getattr(node, name))} {here} and {_show(getattr(job, name))} in the job"
        for name, flag in _AGREED.items()
        if getattr(job, name) != getattr(node, name)
    ]
    return "; ".join(clauses)


def _show_nodes(config: JobConfig) -> str:
    return f"{config.min_nodes}:{config.max_nodes}"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """This node's command line as it took effect, in the parts that the command for other nodes is made of."""

    command: tuple[str, ...]  # The words of the command itself, such as `elastic-run`
    #: The values that somebody gave, by flag, variable or file, each as one word such as `--nnodes=2`
    flags: tuple[str, ...]
    program: tuple[str, ...]  # The program of the workers, and its arguments


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of one node; times in seconds."""

    preferred_rank: int | None = None  # The group rank that the node asks for, or None
    fence_after: str = "never"  # When a node that can't reach its job stops its workers: `lease` or `never`
    scale_up_signal: str = ""  # Signal by name that tells the workers that they will be stopped for new nodes, or ""
    #: Time that the node stays at the end, at most, for the others; None for TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT, or 300
    exit_barrier_timeout: float | None = None
    #: The secret that the nodes of the job share: they sign all they say with it. None for none, except for a job
    #: without an endpoint: it gets a new one, which the line that tells others how to join shows. Empty for none at
    #: all.
    token: bytes | None = None
    join_command: JoinCommand | None = None  # The command as given, to show how others join, or None
    notice: str = ""  # A line for the user that the node with rank 0 shows when the first round is formed, or ""
    #: Its place in the network, "" if not known. Nodes without a preferred rank get ranks in the order of these texts,
    #: so that nodes of one switch are neighbours.
    location: str = ""
    end_time: float = 0.0  # When the scheduler ends this node's job, in seconds since 1970; 0 if not known
    #: Whether the launcher stops the workers before that time, so that the job can be run again
    stops_in_time: bool = False
    health_check: str = ""  # The command that must succeed before the node takes part in a round, or ""
    health_check_timeout: float = 60.0  # Time that this command may take


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Settings of this node that concern no rendezvous, so also of a job of one node."""

    worker_store: str = "auto"  # Server of the workers' store: `auto`, `agent`, `rank0` or `torch`
    capture: bool = True  # Whether the workers' stderr passes through the agent, so that the report can show its end
    folds: bool = True  # Whether lines of stderr that several workers write are shown once
    #: Modules, separated by commas, that a template process imports once for all workers; `auto` for the large modules
    #: that the script imports, "" for none
    preload: str = ""
    #: Whether processes that workers left in the background are ended after a success too
    kill_background_processes: bool = False
    #: Port at which this node answers health checks; 0 for a free port, None for no health checks
    health_port: int | None = None
    #: Port at which this node answers Prometheus; 0 for a free port, None for no metrics
    metrics_port: int | None = None
    events_file: str = ""  # File to which this node's events are appended, beside the file in the log directory, or ""
    failure_rules: str = ""  # File with the user's rules on what helps against failures, or ""
    #: Whether torch's flight recorder is on in the workers, and its dumps explain a failure
    flight_recorder: bool = False
    #: Seconds without progress of any rank that are a hang; 0 for a time that follows from the job's rhythm, None for
    #: no detection
    hang_timeout: float | None = None
    hang_action: str = "report"  # The reaction to a hang: `report`, `restart` or `fail`
    #: Memory in which the workers keep their state beyond their end, such as `64GB`; `auto` for half of what is left,
    #: "" for none
    keep_state: str = ""
    keep_state_copies: int = 0  # Copies of each worker's state on another node, 0 or 1
    keep_state_bandwidth: str = ""  # The most bytes a second at which copies come to a node, such as 500MB, or ""
    keep_state_dir: str = ""  # Directory to which the kept state of a job that fails or is stopped is written, or ""
    inject_fault: str = ""  # Faults that the agent injects into the workers, as `--inject-fault` has them, or ""
