"""How a job is launched, and from there to this node's agent: the one place that wires the parts together.

- Programs import `LaunchConfig` from `elastic_run`. Source of torch's fields and defaults: torch 2.13,
  torch.distributed.launcher.api.
- `launch_job` is for the command line; torch's names for programs are in `launcher`.
- `make_agent_context` makes what the first worker needs; `make_agent` makes the rest while that worker starts.
- `preview_environments` is for `--explain`: it makes the same parts and starts nothing.
"""

from __future__ import annotations

import errno
import os

from elastic_run import contract, signals
from elastic_run.agent.api import WorkerGroup, WorkerSpec
from elastic_run.agent.context import AgentOptions, parse_signals
from elastic_run.agent.driver import AgentParts
from elastic_run.agent.worker_launch import start_early
from elastic_run.cli.values import MOST_WORKERS, count, duration, job_id, preloaded, short_name, whole_seconds
from elastic_run.core.config import AgentConfig, JobConfig, NodeConfig
from elastic_run.multiprocessing.fork_exec import has_child, list_foreign_handled
from elastic_run.multiprocessing.logs import DefaultLogsSpecs
from elastic_run.notices import UsageError, say
from elastic_run.records import dataclass, field, replace
from elastic_run.rendezvous.api import BACKENDS, RendezvousParameters
from elastic_run.rendezvous.registry import get_rendezvous_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from elastic_run.agent.http_server import HttpPort, MetricsPort
    from elastic_run.agent.kept_memory import KeptMemories
    from elastic_run.agent.local_elastic_agent import LocalElasticAgent
    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.core.agent.faults import Fault
    from elastic_run.multiprocessing.logs import LogsSpecs

    Port = TypeVar("Port", HttpPort, MetricsPort)
    Value = TypeVar("Value")

__all__ = ["LaunchConfig", "PluginHungError", "launch_job", "make_agent", "make_agent_context", "preview_environments"]

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
        ValueError: `shutdown_timeout` is negative, a signal is one that no process can handle, a name is too long, or
            there are too many workers.
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
            self.shutdown_timeout = _read(contract.ENV_SHUTDOWN_TIMEOUT, text, whole_seconds)
        if self.node_config.exit_barrier_timeout is None:
            text = os.environ.get(contract.ENV_EXIT_BARRIER_TIMEOUT) or str(contract.DEFAULT_EXIT_BARRIER_TIMEOUT)
            seconds = _read(contract.ENV_EXIT_BARRIER_TIMEOUT, text, duration)
            self.node_config = replace(self.node_config, exit_barrier_timeout=seconds)
        _read("run_id", self.run_id, job_id)
        _read("role", self.role, short_name)
        _read("preload", self.agent_config.preload, preloaded)
        _read("max_restarts", str(self.max_restarts), count)
        _read("preferred_rank", str(self.node_config.preferred_rank or 0), count)
        message = ""
        if self.nproc_per_node > MOST_WORKERS:
            message = f"nproc_per_node is above the limit of {MOST_WORKERS} workers on a node"
        elif any(name in f"{self.signals_to_handle},{self.forward_signals}" for name in ("SIGKILL", "SIGSTOP")):
            message = "no process can handle SIGKILL or SIGSTOP"
        elif not self.shutdown_timeout >= 0:  # nor nan
            message = f"shutdown_timeout must be 0 or more seconds, got {self.shutdown_timeout}"
        if message:
            raise ValueError(message)


def _read(name: str, text: str, read: Callable[[str], Value]) -> Value:
    try:
        return read(text)
    except ValueError as error:
        message = f"{name}: {text!r} {error}"
        raise UsageError(message) from None


class PluginHungError(Exception):
    """The job has ended while a call of a plug-in still runs. A normal exit of Python might wait for it for ever."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def import_ahead() -> None:
    """Import what a job of several nodes needs while this launcher has to wait: 35 ms of processor time, measured."""
    import hmac  # noqa: F401

    from elastic_run.agent import local_elastic_agent  # noqa: F401
    from elastic_run.rendezvous import handler  # noqa: F401


def launch_job(config: LaunchConfig, entrypoint: str, args: list[str]) -> int:
    """Run this node's part of a job for the command line: report on the console, and return the exit code.

    It raises a UsageError if the rendezvous can't work with what the user said.
    """
    if signals.is_ignored(signals.SIGCHLD):
        # Inherited so, it makes the kernel throw exit codes away, those of the first workers too.
        signals.default_signal(signals.SIGCHLD)
    # Until the agent can say where they came from; they would end this process without a word.
    mask = signals.block_signals(() if list_foreign_handled() else signals.OFFERED)
    try:
        context = make_agent_context(config, entrypoint, args, is_whole_process=True, mask=mask)
    except Exception as error:
        signals.restore_signals(mask)  # nothing was started yet
        if isinstance(error, ValueError):  # what only the rendezvous can know of its settings
            raise UsageError(_name_flag(str(error))) from None
        raise
    try:
        early_start = start_early(context)
        agent = make_agent(config, context)
        supervisor = agent.supervise(early_start)
    except BaseException:
        # A defect, and the workers run already: the guardian ends them.
        context.guardian.let_go(is_over=False)
        raise
    with supervisor:
        job_result = supervisor.run()
        agent.record_job_result(job_result)
        if job_result.signal is None:
            agent.shut_rendezvous()
    if supervisor.plugin_calls.is_given_up:
        raise PluginHungError(job_result.exit_code)
    return job_result.exit_code


def make_agent_context(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    *,
    is_whole_process: bool,
    mask: frozenset[int] | None = None,
) -> AgentParts:
    """Bring together what the rounds of an agent share: workers, rendezvous, output, and what the user asked for.

    Without a run id the job gets a random one, as with torch. `mask` are the signals that were blocked before this
    process has blocked others, or None if it hasn't.
    """
    # Before a plug-in starts one: an orphan that comes to this process is a worker's only if it began without children.
    adopts_orphans = is_whole_process and os.getpid() != 1 and not has_child()
    if not config.run_id:
        config.run_id = str(int.from_bytes(os.urandom(16), "big"))
    spec = _make_spec(config, entrypoint, args)
    logs_specs = config.logs_specs or DefaultLogsSpecs()
    if isinstance(logs_specs, DefaultLogsSpecs) and hasattr(spec.rdzv_handler, "open_session"):
        logs_specs.host = os.uname().nodename  # other nodes may have the same directory
    context = AgentParts(
        WorkerGroup(spec),
        logs_specs,
        _options(config, entrypoint, is_whole_process=is_whole_process, adopts_orphans=adopts_orphans),
    )
    context.mask = mask
    settings = config.agent_config
    if settings.keep_state:
        context.kept = _keep_state(settings, config)
    if settings.health_port is not None:
        from elastic_run.agent.http_server import HttpPort

        context.health_port = _open_port(HttpPort, settings.health_port, "health")
    if settings.metrics_port is not None:
        from importlib.util import find_spec

        from elastic_run.agent.http_server import MetricsPort

        if find_spec("prometheus_client") is None:
            message = "--metrics-port: metrics port needs prometheus-client: pip install 'elastic-run[metrics]'"
            raise ValueError(message)
        context.metrics_port = _open_port(MetricsPort, settings.metrics_port, "metrics")
    if settings.preload:
        from elastic_run.agent.driver.round_waits import start_preload

        if obstacle := start_preload(context, settings.preload):
            say(obstacle)
    return context


def _keep_state(settings: AgentConfig, config: LaunchConfig) -> KeptMemories:
    from elastic_run.agent.kept_memory import KeptMemories, choose_size
    from elastic_run.core.kept_generations import read_size

    workers, is_served = config.nproc_per_node, config.max_nodes > 1
    copies = settings.keep_state_copies if is_served else 0
    size = choose_size(settings.keep_state, workers * (1 + copies))
    bandwidth = read_size(settings.keep_state_bandwidth or "auto")
    try:
        return KeptMemories(size, workers, copies, bandwidth=bandwidth, is_served=is_served)
    except OSError as error:  # EFBIG with a limit of ulimit -f
        message = f"keep state gets no {size / 1e6:,.0f} MB of memory from the system: {error.strerror}"
        raise ValueError(message) from error


def _open_port(kind: Callable[[int], Port], port: int, name: str) -> Port:
    """Open a port of the agent's; the user is told of one that the system has chosen."""
    try:
        server = kind(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            from elastic_run.store.worker_store import PortTakenError

            message = f"--{name}-port: {name} {PortTakenError(port)}"
        else:
            message = f"--{name}-port: {name} port {port} can't be opened: {error.strerror}"
        raise ValueError(message) from error
    if not port:
        say(f"{'health checks are answered' if name == 'health' else 'metrics are'} at port {server.port}")
    return server


def make_agent(config: LaunchConfig, context: AgentParts, *, health_check_server: Any = None) -> LocalElasticAgent:
    """Make this node's agent, not yet running."""
    from elastic_run.agent.local_elastic_agent import LocalElasticAgent

    return LocalElasticAgent(
        context.group.spec,
        context.logs_specs,
        context.options.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout or 0,
        health_check_server=health_check_server,
        context=context,
    )


def _make_spec(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any], *, has_handler: bool = True
) -> WorkerSpec:
    parameters = RendezvousParameters(
        config.rdzv_backend,
        config.rdzv_endpoint,
        config.run_id,
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        **config.rdzv_configs,
    )
    handler: Any = get_rendezvous_handler(parameters) if has_handler else None
    # The address of the workers' store is fixed by the user in a static job.
    master_addr: str | None = None
    master_port: int | None = None
    if parameters.backend == "static":
        from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

        master_addr, master_port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
        if master_port == -1:
            message = f"--rdzv-endpoint {parameters.endpoint!r} has no port: give --master-port or HOST:PORT"
            raise ValueError(message)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _options(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    *,
    is_whole_process: bool,
    adopts_orphans: bool = False,
) -> AgentOptions:
    start_method = config.start_method
    if callable(entrypoint) and start_method == "spawn":  # which can't start a function of a notebook's cell
        from elastic_run.multiprocessing.functions.worker import choose_start_method

        start_method = choose_start_method(entrypoint)
    faults: tuple[Fault, ...] = ()
    if config.agent_config.inject_fault:
        from elastic_run.cli.faults import read_faults

        faults = read_faults(config.agent_config.inject_fault)
    affinities = {}
    if config.numa_options is not None:
        from elastic_run.cluster.numa import worker_affinities
        from elastic_run.multiprocessing.fork_exec import own_interpreter

        affinities = worker_affinities(config.numa_options, config.nproc_per_node, python=own_interpreter())
    named = parse_signals(f"{config.signals_to_handle},{config.forward_signals}")
    foreign = list_foreign_handled() if is_whole_process else frozenset[int]()
    kept = {*named, *foreign}
    return AgentOptions(
        job_config=replace(
            config.job_config,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            max_restarts=config.max_restarts,
        ),
        node_config=config.node_config,
        agent_config=config.agent_config,
        faults=faults,
        shutdown_timeout=float(min(config.shutdown_timeout or 0, contract.LONGEST_TIME)),
        signals=parse_signals(config.signals_to_handle),
        forwarded=parse_signals(config.forward_signals) if config.forward_signals else (),
        unnamed_signals=tuple(number for number in signals.ENDING if is_whole_process and number not in kept),
        offered=tuple(number for number in signals.OFFERED if is_whole_process and number not in kept),
        prefix_template=config.log_line_prefix_template or contract.DEFAULT_PREFIX_TEMPLATE,
        affinities=affinities,
        is_whole_process=is_whole_process,
        is_wrapped=bool(foreign),
        adopts_orphans=adopts_orphans,
        start_method=start_method,
        stuck_timeout=float(os.environ.get(contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT) or 0),
    )


def preview_environments(config: LaunchConfig, entrypoint: str, args: list[str]) -> dict[int, dict[str, str]]:
    """Return by local rank the variables that the workers of this node would get, and start nothing.

    `contract.ENV_OF_ROUND` are left out where other nodes decide about these. A value that a start would refuse
    raises a UsageError here as well. The handler of a plug-in is not made, since it may start anything.
    """
    from elastic_run.agent.worker_launch import assign_ranks, worker_environments
    from elastic_run.store.worker_store import choose_loopback, is_served_by_agent

    try:
        spec = _make_spec(config, entrypoint, args, has_handler=config.rdzv_backend in BACKENDS)
    except ValueError as error:
        raise UsageError(_name_flag(str(error))) from None
    group, size = WorkerGroup(spec), config.nproc_per_node
    options = _options(config, entrypoint, is_whole_process=True)
    is_alone = getattr(spec.rdzv_handler, "is_immediate", False)
    assign_ranks(group, 0, 1, (0, size, 0, size))
    group.master_addr = choose_loopback()[0]
    group.master_port = spec.master_port
    environments = worker_environments(
        group,
        os.environ,
        run_id=config.run_id,
        restart_count=0,
        use_agent_store=is_served_by_agent(options.agent_config.worker_store, os.environ),
        signals=options.signals,
        more=options.worker_variables,
    )
    decided_later = contract.ENV_OF_ROUND if not is_alone else () if spec.master_port else (contract.ENV_MASTER_PORT,)
    return {
        rank: {name: value for name, value in variables.items() if name not in decided_later}
        for rank, variables in environments.items()
    }


def _name_flag(message: str) -> str:
    """Put the flag in front of a message of the rendezvous, which knows settings and endpoints, but not the flags."""
    flags = {
        "rendezvous backend": "--rdzv-backend",
        "rendezvous setting": "--rdzv-conf",
        "rendezvous endpoint": "--rdzv-endpoint",
        "keep state": "--keep-state",
    }
    return next((f"{flag}: {message}" for subject, flag in flags.items() if message.startswith(subject)), message)
