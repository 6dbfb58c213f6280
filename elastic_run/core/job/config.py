"""The rules of a job: which of them all nodes must agree on, and which the first node settles for all.

- Rules that two nodes can't reconcile (`_AGREED`) keep a node out: how many nodes there are, when the job is restarted,
  and what each node applies by itself, as the lease. The answer names the flag and both values.
- Durations that only the coordinator applies (`_SETTLED`) are those of the job's first node. A node that was told other
  values is taken in, and one line tells its user.
- `exit_barrier_timeout` is each node's own.
"""

from __future__ import annotations

from elastic_run.core.agent.restart_policy import RestartPolicy
from elastic_run.core.protocol.codec import MessageError, register
from elastic_run.records import dataclass

#: Fields of `Rules` and what the user knows them by; those that are absent are the other half of one.
_AGREED = {
    "max_restarts": "--max-restarts",
    "no_restart_exit_codes": "--no-restart-exit-codes",
    "keep_alive_interval": "keep_alive_interval",
    "keep_alive_max_attempt": "keep_alive_max_attempt",
    "has_successors": "successors of the endpoint",
    "split": "--on-split",
}
_SETTLED = {
    "min_uptime": "--min-uptime",
    "max_backoff": "--max-backoff",
    "join_timeout": "join_timeout",
    "last_call_timeout": "last_call_timeout",
    "scale_up_delay": "--scale-up-delay",
    "scale_up_grace": "--scale-up-grace",
}
_PAIRS = {
    "--nnodes": ("min_nodes", "max_nodes", ":"),
    "--restart-window": ("window_count", "window_seconds", " per "),
    "--membership-window": ("membership_count", "membership_seconds", " per "),
}


@register
@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a job, as a node was told them; times in seconds.

    Args:
        min_nodes: With fewer nodes no round is formed.
        max_nodes: More nodes wait as spares.
        max_restarts: See `core.agent.restart_policy.RestartPolicy`, as the next five.
        window_count: Restarts per window, or None.
        window_seconds: Length of that window, or None.
        min_uptime: What a round has to live to count as healthy, or None.
        no_restart_exit_codes: Exit codes that end the job at once.
        max_backoff: Longest pause before a restart.
        join_timeout: How long fewer than `min_nodes` are waited with.
        last_call_timeout: How long a first formation waits for more than `min_nodes`; 0 to begin with those.
        keep_alive_interval: Between two beats of a node.
        keep_alive_max_attempt: So many missing beats make a node lost.
        scale_up_delay: From a node's arrival at a running round until the round makes way for it.
        scale_up_grace: From the warning of the workers until they are stopped for it; 0 for no warning.
        membership_count: Membership changes per window, or None for any number.
        membership_seconds: Length of that window, or None for the whole job.
        exit_barrier_timeout: How long agents linger after the end, for the others to read the verdict.
        has_successors: Whether the store moves on to another node when its host is gone.
        split: What the survivor of two nodes does then: `stop` or `continue`.
    """

    min_nodes: int
    max_nodes: int
    max_restarts: int = 0
    window_count: int | None = None
    window_seconds: float | None = None
    min_uptime: float | None = None
    no_restart_exit_codes: tuple[int, ...] = ()
    max_backoff: float = 30.0
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    keep_alive_interval: float = 2.0
    keep_alive_max_attempt: int = 3
    scale_up_delay: float = 0.0
    scale_up_grace: float = 0.0
    membership_count: int | None = None
    membership_seconds: float | None = None
    exit_barrier_timeout: float = 300.0
    has_successors: bool = False
    split: str = "stop"

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            message = f"Rules: {self.min_nodes}:{self.max_nodes} nodes make no sense"
            raise MessageError(message)
        if self.keep_alive_interval <= 0 or self.keep_alive_max_attempt < 1:
            message = "Rules: the lease must be longer than 0 s"
            raise MessageError(message)

    @property
    def lease(self) -> float:
        """Seconds without a beat after which a node is lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    @property
    def policy(self) -> RestartPolicy:
        """The rules about restarts."""
        return RestartPolicy(
            self.max_restarts,
            window_count=self.window_count,
            window_seconds=self.window_seconds,
            min_uptime=self.min_uptime,
            no_restart_exit_codes=frozenset(self.no_restart_exit_codes),
            max_backoff=self.max_backoff,
        )


def describe_difference(job: Rules, node: Rules) -> str:
    """Tell in what a node disagrees with its job so that it can't be taken in.

    Args:
        job: What the job goes by.
        node: What a node was told.

    Returns:
        A clause for the node's user with both values, or "" where they agree.
    """
    if job == node:
        return ""
    clauses = [
        f"{flag} is {_pair(node, first, second, sign)} here and {_pair(job, first, second, sign)} in the job"
        for flag, (first, second, sign) in _PAIRS.items()
        if _pair(job, first, second, sign) != _pair(node, first, second, sign)
    ]
    clauses += [
        f"{flag} is {_show(getattr(node, name))} here and {_show(getattr(job, name))} in the job"
        for name, flag in _AGREED.items()
        if getattr(job, name) != getattr(node, name)
    ]
    return "; ".join(clauses)


def describe_settled(job: Rules, node: Rules) -> str:
    """Tell which values of a node have no effect, since the job's first node has settled them.

    Args:
        job: What the job goes by.
        node: What a node was told.

    Returns:
        A sentence for the node's user with both values, or "" where there are none.
    """
    clauses = [
        f"{flag} is {_show_seconds(getattr(job, name))}, not {_show_seconds(getattr(node, name))}"
        for name, flag in _SETTLED.items()
        if getattr(job, name) != getattr(node, name)
    ]
    return f"the values of the job's first node hold, not those given here: {'; '.join(clauses)}" if clauses else ""


def _pair(rules: Rules, first: str, second: str, sign: str) -> str:
    return f"{_show(getattr(rules, first))}{sign}{_show(getattr(rules, second))}"


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
