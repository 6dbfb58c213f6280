"""The configuration of a job: what its nodes must agree on, and what its first node decides for all.

- A setting is defined here, with its default, and nowhere else; the flag of the same name (`cli.flags`) explains it to
  users. The launcher makes one `JobConfig`, the rendezvous adds what --rdzv-conf and the endpoint say, and each node
  sends it whole.
- Settings that two nodes can't reconcile (`_AGREED`) keep a node out: how many nodes there are, when the job is
  restarted, and what each node applies by itself, as the lease. The answer names the flag and both values.
- Durations that only the coordinator applies (`_DECIDED_BY_FIRST`) are those of the job's first node. A node with other
  values is taken in, and one line tells its user.
- A setting that each node may have for itself belongs into `NodeConfig`.
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
_DECIDED_BY_FIRST = {
    "min_uptime": "--min-uptime",
    "max_backoff": "--max-backoff",
    "join_timeout": "join_timeout",
    "last_call_timeout": "last_call_timeout",
    "scale_up_delay": "--scale-up-delay",
    "scale_up_grace": "--scale-up-grace",
}

#: Fields that are numbers or times.
_NUMBERS = (
    *("min_nodes", "max_nodes", "max_restarts", "min_uptime", "max_backoff", "join_timeout", "last_call_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "scale_up_delay", "scale_up_grace"),
)
#: Seconds between two signs of life, at least: no node could keep a shorter interval.
SHORTEST_INTERVAL = 0.001


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
    """The configuration of a job as a node was given it; times in seconds.

    Args:
        min_nodes: With fewer nodes no round is formed.
        max_nodes: More nodes wait as spares.
        max_restarts: Restarts of the whole job. With a window and 0 here only the window counts.
        restart_window: Most restarts in a period, or None.
        min_uptime: Time that a round has to live to count as healthy, or None for the built-in rule.
        no_restart_exit_codes: Exit codes (128+n for signals) that end the job without a restart, in ascending order.
        max_backoff: Longest pause before a restart; 0 for none.
        join_timeout: Time that fewer nodes than `min_nodes` wait for more.
        last_call_timeout: Time that a first formation waits for more than `min_nodes`; 0 to begin with those.
        keep_alive_interval: Time between two signs of life on a connection that is silent.
        keep_alive_max_attempt: Number of missing signs of life after which a node is lost.
        scale_up_delay: Time from a node's arrival at a running round until the round makes way for it.
        scale_up_grace: Time from the warning of the workers until they are stopped for it; 0 for no warning.
        membership_window: Most changes of the membership in a period, or None for any number.
        has_successors: Whether the store moves on to another node when its host is gone.
        on_split: What the survivor of two nodes does then: `stop` or `continue`.
        exclude_after: Failures in a period that exclude the machine on which they begin, or None.
        exclude_exit_codes: Exit codes of a worker that exclude its machine, in ascending order.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 0
    restart_window: Window | None = None
    min_uptime: float | None = None
    no_restart_exit_codes: tuple[int, ...] = ()
    max_backoff: float = 30.0
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    keep_alive_interval: float = 2.0
    keep_alive_max_attempt: int = 3
    scale_up_delay: float = 2.0
    scale_up_grace: float = 30.0
    membership_window: Window | None = Window(100, 3600.0)
    has_successors: bool = False
    on_split: str = "stop"
    exclude_after: Window | None = None
    exclude_exit_codes: tuple[int, ...] = ()

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
            if value is not None and not value <= LARGEST_NUMBER:
                message = f"JobConfig: {name} is {value}, and {LARGEST_NUMBER} is the most"
                raise ValueError(message)
            if value is not None and value < 0:
                message = f"JobConfig: {name} is {value}, and 0 is the least"
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


def describe_settled(job: JobConfig, node: JobConfig) -> str:
    """Return a sentence with the values of a node that the job's first node has decided otherwise; "" for none."""
    clauses = [
        f"{flag} is {_show_seconds(getattr(job, name))}, not {_show_seconds(getattr(node, name))}"
        for name, flag in _DECIDED_BY_FIRST.items()
        if getattr(job, name) != getattr(node, name)
    ]
    return f"the values of the job's first node apply, not those of this node: {'; '.join(clauses)}" if clauses else ""


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


def _show_seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:g} s"


@dataclass(frozen=True, slots=True)
class JoinCommand:
    """This node's command line as it took effect, in the parts that the command for other nodes is made of.

    Args:
        command: The words of the command itself, such as `elastic-run`.
        flags: The values that somebody gave, by flag, variable or file, each as one word such as `--nnodes=2`.
        program: The program of the workers, and its arguments.
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    program: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of one node; times in seconds.

    Args:
        preferred_rank: The group rank that the node asks for, or None.
        fence_after: When a node that can't reach its job stops its workers: `lease` or `never`.
        scale_up_signal: Signal by name that tells the workers that they will be stopped for new nodes, or "".
        exit_barrier_timeout: Time that the node stays at the end, at most, for the others; None for
            TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT, or 300.
        token: The secret that the nodes of the job share: they sign all they say with it. None for none, except for a
            job without an endpoint: it gets a new one, which the line that tells others how to join shows. Empty for
            none at all.
        join_command: The command as given, to show how others join, or None.
        notice: A line for the user that the node with rank 0 shows when the first round is formed, or "".
        location: Its place in the network, "" if not known. Nodes without a preferred rank get ranks in the order of
            these texts, so that nodes of one switch are neighbours.
        end_time: When the scheduler ends this node's job, in seconds since 1970; 0 if not known.
        stops_in_time: Whether the launcher stops the workers before that time, so that the job can be run again.
        health_check: The command that must succeed before the node takes part in a round, or "".
        health_check_timeout: Time that this command may take.
    """

    preferred_rank: int | None = None
    fence_after: str = "never"
    scale_up_signal: str = ""
    exit_barrier_timeout: float | None = None
    token: bytes | None = None
    join_command: JoinCommand | None = None
    notice: str = ""
    location: str = ""
    end_time: float = 0.0
    stops_in_time: bool = False
    health_check: str = ""
    health_check_timeout: float = 60.0
