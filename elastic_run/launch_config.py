"""`LaunchConfig`: how a job is launched. Programs import it from `elastic_run` or `elastic_run.launcher`.

Source of torch's fields and defaults: torch 2.13, torch.distributed.launcher.api.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.values import MOST_WORKERS, count, duration, job_id, short_name
from elastic_run.core.agent.config import AgentConfig
from elastic_run.core.job.config import JobConfig, NodeConfig, Window
from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs
from elastic_run.records import dataclass, field, fields, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.multiprocessing.output.logs import LogsSpecs

_DEFAULT_RENDEZVOUS_TIMEOUT = 900


@dataclass
class LaunchConfig:
    """How a job is launched.

    The fields down to `shutdown_timeout` are torch's, in torch's order; those after it are ours.

    Args:
        min_nodes: Fewest nodes that the job runs on.
        max_nodes: Most nodes that the job runs on.
        nproc_per_node: Workers on each node.
        logs_specs: Where output goes.
        run_id: Name of the job, the same on all its nodes.
        role: Name of the workers' role.
        rdzv_endpoint: HOST:PORT of the rendezvous.
        rdzv_backend: Name of the rendezvous backend.
        rdzv_configs: Keys and values for the backend.
        rdzv_timeout: Former way to give `rdzv_configs["timeout"]`, in seconds.
        max_restarts: Restarts of the job before it fails.
        monitor_interval: Seconds between two looks at the workers, where an agent has to look.
        start_method: How function workers are started.
        log_line_prefix_template: Prefix of tee'd lines.
        metrics_cfg: Configuration of metrics.
        local_addr: Address of this node, or None.
        event_log_handler: Name of the handler of events.
        numa_options: How workers are bound to CPUs, or None.
        signals_to_handle: Signals that stop the job, by name, separated by commas.
        duplicate_stdout_filters: Copy tee'd stdout lines that hold one of these into one file.
        duplicate_stderr_filters: The same for stderr.
        virtual_local_rank: Every worker sees its device as device 0, and itself as local rank 0.
        shutdown_timeout: Seconds that workers get to stop; None takes TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30.
        forward_signals: Signals that are passed on to the workers, by name, separated by commas.
        job_config: The settings on which all nodes of a job have to agree. `min_nodes`, `max_nodes` and
            `max_restarts` are those above.
        node_config: The settings of this node in a job of several.
        agent_config: The other settings of this node.

    Raises:
        ValueError: `shutdown_timeout` is negative, a signal is one that no process can handle, a setting has a value
            that its flag would not take, a name is too long, or there are too many workers.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    signals_to_handle: str = contract.DEFAULT_SIGNALS_TO_HANDLE
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    forward_signals: str = ""
    job_config: JobConfig = field(default_factory=JobConfig)
    node_config: NodeConfig = field(default_factory=NodeConfig)
    agent_config: AgentConfig = field(default_factory=AgentConfig)

    def __post_init__(self) -> None:
        # A program may pass on flags that its user has left out: None means the same as "", as with torch.
        self.run_id, self.rdzv_endpoint = self.run_id or "", self.rdzv_endpoint or ""
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", _DEFAULT_RENDEZVOUS_TIMEOUT)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            text = os.environ.get(contract.ENV_SHUTDOWN_TIMEOUT) or str(contract.DEFAULT_SHUTDOWN_TIMEOUT)
            self.shutdown_timeout = int(text)
        if self.node_config.exit_barrier_timeout is None:
            text = os.environ.get(contract.ENV_EXIT_BARRIER_TIMEOUT) or str(contract.DEFAULT_EXIT_BARRIER_TIMEOUT)
            _check_field(contract.ENV_EXIT_BARRIER_TIMEOUT, text, duration)
            self.node_config = replace(self.node_config, exit_barrier_timeout=duration(text))
        if self.nproc_per_node > MOST_WORKERS:
            message = f"nproc_per_node is above the limit of {MOST_WORKERS} workers on a node"
            raise ValueError(message)
        _check_field("run_id", self.run_id, job_id)
        _check_field("role", self.role, short_name)
        _refuse_unhandleable(self.signals_to_handle, self.forward_signals)
        _check_field("max_restarts", str(self.max_restarts), count)
        _check_field("preferred_rank", str(self.node_config.preferred_rank or 0), count)
        for settings in (self.job_config, self.node_config, self.agent_config):
            _check_settings(settings)
        if not self.shutdown_timeout >= 0:  # nor nan
            message = f"shutdown_timeout must be 0 or more seconds, got {self.shutdown_timeout}"
            raise ValueError(message)


def _refuse_unhandleable(*lists: str) -> None:
    for name in ("SIGKILL", "SIGSTOP"):
        if any(name in names for names in lists):
            message = f"no process can handle {name}"
            raise ValueError(message)


def _check_settings(settings: JobConfig | NodeConfig | AgentConfig) -> None:
    """Check the settings as the flags of the same names check theirs."""
    flags = {flag.dest: flag for flag in FLAGS if not flag.is_switch}
    for one in fields(settings):
        value = getattr(settings, one.name)
        if value is not one.default and one.name in flags and (text := _show_for_flag(one.name, value)) is not None:
            _check_field(one.name, text, flags[one.name].parse)


def _show_for_flag(name: str, value: object) -> str | None:
    """Return a setting as its flag takes it; None for what no flag can say, such as no value at all."""
    if name == "hang_timeout" and value == 0:
        return "auto"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or None
    if isinstance(value, Window):
        is_for_flag = name != "membership_window" or value.count  # the membership may change 0 times
        return f"{value.count}/{value.seconds or 1}" if is_for_flag else None
    return str(value) if isinstance(value, int | float | str) else None


def _check_field(name: str, text: str, check: Callable[[str], object]) -> None:
    try:
        check(text)
    except ValueError as error:
        message = f"{name}: {text!r} {error}"
        raise ValueError(message) from None
