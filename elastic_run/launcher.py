"""LaunchConfig and the launch itself: the one place that wires the parts together.

`elastic_launch` and `launch_agent` keep torch's behaviour for programs: results returned, failures raised.
`launch_job` is the same for the command line: it tells the story on the console and returns the exit code.
Source of the names, fields and defaults: torch 2.13, torch.distributed.launcher.api. The file is longer than others
because torch has the configuration and the launch in one module, and a third of it describes the fields.
"""

from __future__ import annotations

import os

from elastic_run import contract, signals
from elastic_run.agent.api import WorkerGroup, WorkerSpec
from elastic_run.agent.driver.context import AgentContext, AgentOptions, parse_signals
from elastic_run.agent.driver.early_start import start_early
from elastic_run.cli.values import duration, one_signal, preloaded
from elastic_run.core.agent.config import AgentConfig
from elastic_run.core.job.config import JobConfig
from elastic_run.core.node.config import NodeConfig
from elastic_run.errors import UsageError
from elastic_run.lazy import lazy_names
from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs
from elastic_run.records import dataclass, field, replace
from elastic_run.rendezvous.api import RendezvousParameters
from elastic_run.rendezvous.backend_table import BACKENDS
from elastic_run.rendezvous.registry import get_rendezvous_handler
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.health_port import HealthPort
    from elastic_run.agent.local_elastic_agent import LocalElasticAgent
    from elastic_run.agent.metrics_port import MetricsPort
    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.core.agent.faults import Fault
    from elastic_run.multiprocessing.output.console import Console
    from elastic_run.multiprocessing.output.logs import LogsSpecs
    from elastic_run.report import JobResult
__all__ = ["LaunchConfig", "elastic_launch", "launch_agent", "launch_job", "preview_environments"]

_DEFAULT_RENDEZVOUS_TIMEOUT = 900

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "ChildFailedError": "elastic_run.multiprocessing.errors",
        "HealthCheckServer": "elastic_run.agent.health_check_server",
        "LocalElasticAgent": "elastic_run.agent",
        "LogsSpecs": "elastic_run.multiprocessing",
        "NumaOptions": "elastic_run.cluster.numa",
        "SignalException": "elastic_run.multiprocessing",
        "TORCHELASTIC_HEALTH_CHECK_PORT": "elastic_run.agent.local_elastic_agent",
        "create_healthcheck_server": "elastic_run.agent.health_check_server",
        "events": "elastic_run.events:",
        "get_logger": "elastic_run.utils.logging",
        "metrics": "elastic_run.metrics:",
        "parse_rendezvous_endpoint": "elastic_run.rendezvous",
        "rdzv_registry": "elastic_run.rendezvous.registry:",
    },
    logger="logger",
)


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
        ValueError: `shutdown_timeout` is negative, a signal is one that no process can handle, `scale_up_signal` is
            more than one, or `preload` is no list of modules.
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
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", _DEFAULT_RENDEZVOUS_TIMEOUT)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = int(
                os.environ.get(contract.ENV_SHUTDOWN_TIMEOUT, contract.DEFAULT_SHUTDOWN_TIMEOUT)
            )
        if self.node_config.exit_barrier_timeout is None:
            text = os.environ.get(contract.ENV_EXIT_BARRIER_TIMEOUT) or str(contract.DEFAULT_EXIT_BARRIER_TIMEOUT)
            _check_field(contract.ENV_EXIT_BARRIER_TIMEOUT, text, duration)
            self.node_config = replace(self.node_config, exit_barrier_timeout=duration(text))
        _refuse_unhandleable(self.signals_to_handle, self.forward_signals)
        _check_field("preload", self.agent_config.preload, preloaded)
        _check_field("inject_fault", self.agent_config.inject_fault, _read_faults)
        _check_field("scale_up_signal", self.node_config.scale_up_signal, one_signal)
        if not self.shutdown_timeout >= 0:  # nor nan
            message = f"shutdown_timeout must be 0 or more seconds, got {self.shutdown_timeout}"
            raise ValueError(message)


def _refuse_unhandleable(*lists: str) -> None:
    for name in ("SIGKILL", "SIGSTOP"):
        if any(name in names for names in lists):
            message = f"{name} can't be handled by any process"
            raise ValueError(message)


def _check_field(name: str, text: str, check: Callable[[str], object]) -> None:
    try:
        check(text)
    except ValueError as error:
        message = f"{name}: {text!r} {error}"
        raise ValueError(message) from None


class elastic_launch:  # noqa: N801 - torch's name
    """Launches a job from a program.

    Args:
        config: How.
        entrypoint: A function, or a command, to run as each worker.
        health_check_server: Kept for torch's signature.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,  # noqa: ANN401 - torch's argument
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server
        self._agent: LocalElasticAgent | None = None
        self._stop_signal = 0

    def __call__(self, *args: Any) -> dict[int, Any]:  # noqa: ANN401 - the workers' arguments
        """Run the job; see `launch_agent`."""
        return _run_agent(self._config, self._entrypoint, list(args), self._health_check_server, self._take_agent)

    def _take_agent(self, agent: LocalElasticAgent) -> None:
        self._agent = agent
        if self._stop_signal:
            agent.request_stop(self._stop_signal)

    def stop(self, number: int = SIGTERM) -> None:
        """Stop the job as if this signal had come; the call that runs it raises SignalException.

        For programs that launch in a thread of their own, where no signal arrives; may be called from any thread.

        Args:
            number: The signal, which the workers get too.
        """
        self._stop_signal = number
        if self._agent is not None:
            self._agent.request_stop(number)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,  # noqa: ANN401 - torch's argument
) -> dict[int, Any]:
    """Run this node's part of a job.

    Args:
        config: How.
        entrypoint: A function, or a command, to run as each worker.
        args: Its arguments; `${local_rank}` stands for the worker's number on this node.
        health_check_server: Kept for torch's signature.

    Returns:
        What the function returned, by global rank of this node's workers; None for each of a command.

    Raises:
        ChildFailedError: A worker failed and restarts are used up.
        SignalException: The launcher was stopped by a signal.
        RendezvousError: The nodes could not come together.
        AssertionError: There is no entrypoint, or no worker (torch's exception).
        Exception: The function or an argument can't be sent to a worker: what pickle raises, with the name of it.
    """
    return _run_agent(config, entrypoint, args, health_check_server, lambda _: None)


def _run_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any,  # noqa: ANN401 - torch's argument
    on_agent: Callable[[LocalElasticAgent], None],
) -> dict[int, Any]:
    from elastic_run import events, metrics  # noqa: PLC0415 - the command line needs neither by default
    from elastic_run.multiprocessing.api import SignalException  # noqa: PLC0415
    from elastic_run.multiprocessing.errors import ChildFailedError  # noqa: PLC0415

    events.is_recorded(config.event_log_handler)  # refuses one that there isn't, before anything is started
    context = make_agent_context(config, entrypoint, args, is_whole_process=False)
    agent = make_agent(config, context, health_check_server=health_check_server)
    handler = agent.get_worker_group().spec.rdzv_handler
    on_agent(agent)
    # A stop by signal is no end of the job: other nodes may go on with this rendezvous.
    is_over = True
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
    except SignalException:
        is_over = False
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except Exception:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        if is_over:
            handler.shutdown()
    if result.is_failed():
        root = None if agent.job_result is None else agent.job_result.root
        name = agent.get_worker_group().spec.get_entrypoint_name()
        raise ChildFailedError(name, result.failures, None if root is None else root.rank)
    return result.return_values


def launch_job(config: LaunchConfig, entrypoint: str, args: list[str]) -> int:
    """Run this node's part of a job for the command line: report on the console, answer with an exit code.

    Args:
        config: How.
        entrypoint: The command to run as each worker.
        args: Its arguments.

    Returns:
        The exit code; `contract.EXIT_CODES` lists them.

    Raises:
        UsageError: The rendezvous can't work with what the user said.
        RendezvousError: The backend is not in this release.
    """
    if signals.is_ignored(signals.SIGCHLD):
        # Inherited so, it makes the kernel throw exit codes away, those of the first workers too.
        signals.default_signal(signals.SIGCHLD)
    # Until the agent can say where they came from; they would end this process without a word.
    mask = signals.block_signals(signals.OFFERED)
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
        context.guardian.alarm()
        raise
    with supervisor:
        job_result = supervisor.run()
        agent.record_job_result(job_result)
        if job_result.verdict != "success":
            _tell_ending(job_result, supervisor.console)
        elif job_result.log_dir and getattr(context.logs_specs, "is_unnamed", False):
            supervisor.console.say(f"the log files are in {job_result.log_dir} (--log-dir names another place)")
    if job_result.signal is None:
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    return job_result.exit_code


def preview_environments(config: LaunchConfig, entrypoint: str, args: list[str]) -> dict[int, dict[str, str]]:
    """Return the variables that the workers of this node would get, and start nothing.

    What a start refuses is refused here as well. The handler of a plug-in is not made, since it may start anything.

    Args:
        config: How.
        entrypoint: The command to run as each worker.
        args: Its arguments.

    Returns:
        Names and values by local rank, without `contract.ENV_OF_ROUND` where other nodes decide about these.

    Raises:
        UsageError: The rendezvous can't work with what the user said.
    """
    from elastic_run.agent.driver.environment import worker_environments  # noqa: PLC0415 - only for --explain
    from elastic_run.agent.driver.rank_assignment import assign_ranks  # noqa: PLC0415 - ditto
    from elastic_run.store.tcpstore.worker_store import LOOPBACK, choose_worker_store  # noqa: PLC0415 - ditto

    parameters = _make_parameters(config)
    handler = None
    try:
        if config.rdzv_backend in BACKENDS:
            handler = get_rendezvous_handler(parameters)
        spec = _make_spec(config, parameters, entrypoint, args, handler)
    except ValueError as error:
        raise UsageError(_name_flag(str(error))) from None
    group, size = WorkerGroup(spec), config.nproc_per_node
    options = _options(config, is_whole_process=True)
    is_alone = getattr(handler, "is_immediate", False)
    assign_ranks(
        group, group_rank=0, group_world_size=1, base_rank=0, world_size=size, role_rank=0, role_world_size=size
    )
    group.master_addr, group.master_port = LOOPBACK, spec.master_port
    environments = worker_environments(
        group,
        os.environ,
        run_id=config.run_id,
        restart_count=0,
        max_restarts=config.max_restarts,
        use_agent_store=choose_worker_store(options.agent_config.worker_store, size, os.environ) != "rank0",
        signals=options.signals,
        more=options.worker_variables,
    )
    decided_later = contract.ENV_OF_ROUND if not is_alone else () if spec.master_port else (contract.ENV_MASTER_PORT,)
    return {
        rank: {name: value for name, value in variables.items() if name not in decided_later}
        for rank, variables in environments.items()
    }


def _name_flag(message: str) -> str:
    """Put the flag in front: the rendezvous knows settings and endpoints, but not how the user gave them."""
    flags = {
        "rendezvous setting": "--rdzv-conf",
        "rendezvous endpoint": "--rdzv-endpoint",
        "health port": "--health-port",
        "metrics port": "--metrics-port",
    }
    return next((f"{flag}: {message}" for subject, flag in flags.items() if message.startswith(subject)), message)


def _tell_ending(job_result: JobResult, console: Console) -> None:
    """Print the report, and leave it in the log directory and in the parent launcher's error file."""
    if job_result.verdict == "usage":
        console.say(f"error: {job_result.detail}")
        return
    from elastic_run.multiprocessing.errors import write_parent_error_file  # noqa: PLC0415 - only after a failure
    from elastic_run.report import render, write_failure_file  # noqa: PLC0415

    if job_result.log_dir:
        job_result.failure_file = write_failure_file(job_result, job_result.log_dir, console.say)
    lines = render(job_result, width=console.columns, color=_is_terminal(2))
    from elastic_run.report.annotations import find_annotation  # noqa: PLC0415 - only after a failure

    if annotation := find_annotation(job_result, os.environ):
        lines.append(annotation)
    console.write(2, ("\n".join(lines) + "\n").encode(errors="replace"))
    if job_result.verdict in ("unhealthy", "excluded"):
        from elastic_run.cluster.machine import describe_drain  # noqa: PLC0415 - rarely

        if drain := describe_drain(os.environ, job_result.detail):
            console.say(drain)
    if job_result.root is not None:
        write_parent_error_file(job_result.root, os.environ)


def _is_terminal(fd: int) -> bool:
    return os.isatty(fd) and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def make_agent_context(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    *,
    is_whole_process: bool,
    mask: frozenset[int] | None = None,
) -> AgentContext:
    """Bring together what an agent works with: workers, rendezvous, output, and what the user asked for.

    Args:
        config: How the job is launched. Without a run id it gets a random one, as with torch.
        entrypoint: The command to run as each worker.
        args: Its arguments.
        is_whole_process: Whether the launcher is all that runs in this process.
        mask: Signals that were blocked before this process has blocked others, or None if it hasn't.

    Returns:
        What the rounds of the agent share.

    Raises:
        RendezvousError: The backend is not in this release.
        ValueError: The backend is unknown.
    """
    if not config.run_id:
        config.run_id = str(int.from_bytes(os.urandom(16), "big"))
    parameters = _make_parameters(config)
    spec = _make_spec(config, parameters, entrypoint, args, get_rendezvous_handler(parameters))
    logs_specs = config.logs_specs or DefaultLogsSpecs()
    if isinstance(logs_specs, DefaultLogsSpecs) and hasattr(spec.rdzv_handler, "open_session"):
        logs_specs.host = os.uname().nodename  # other nodes may have the same directory
    context = AgentContext(
        WorkerGroup(spec),
        logs_specs,
        _options(config, is_whole_process=is_whole_process),
    )
    context.mask = mask
    settings = config.agent_config
    if settings.health_port is not None:
        context.health_port = _open_health_port(settings.health_port)
    if settings.metrics_port is not None:
        context.metrics_port = _open_metrics_port(settings.metrics_port)
    if settings.preload:
        from elastic_run.agent.driver.preload import start_preload  # noqa: PLC0415 - only when asked for

        if obstacle := start_preload(context, settings.preload):
            from elastic_run.notices import say  # noqa: PLC0415 - only after a warning

            say(obstacle)
    return context


def _open_health_port(port: int) -> HealthPort:
    from elastic_run.agent.health_port import HealthPort  # noqa: PLC0415 - only when asked for

    try:
        server = HealthPort(port)
    except OSError as error:
        message = f"health port {port} can't be opened: {error.strerror}"
        raise ValueError(message) from error
    if not port:
        from elastic_run.notices import say  # noqa: PLC0415

        say(f"health checks are answered at port {server.port}")
    return server


def _open_metrics_port(port: int) -> MetricsPort:
    from importlib.util import find_spec  # noqa: PLC0415 - only when asked for

    from elastic_run.agent.metrics_port import MetricsPort  # noqa: PLC0415 - ditto

    if find_spec("prometheus_client") is None:
        message = "metrics port needs prometheus-client: pip install 'elastic-run[metrics]'"
        raise ValueError(message)
    try:
        server = MetricsPort(port)
    except OSError as error:
        message = f"metrics port {port} can't be opened: {error.strerror}"
        raise ValueError(message) from error
    if not port:
        from elastic_run.notices import say  # noqa: PLC0415

        say(f"metrics are at port {server.port}")
    return server


def make_agent(
    config: LaunchConfig,
    context: AgentContext,
    *,
    health_check_server: Any = None,  # noqa: ANN401 - torch's argument
) -> LocalElasticAgent:
    """Make this node's agent.

    Args:
        config: How the job is launched.
        context: From `make_agent_context`.
        health_check_server: Kept for torch's signature.

    Returns:
        The agent, not yet running.
    """
    from elastic_run.agent.local_elastic_agent import LocalElasticAgent  # noqa: PLC0415 - while the workers start

    return LocalElasticAgent(
        context.group.spec,
        context.logs_specs,
        config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout or 0,
        health_check_server=health_check_server,
        context=context,
    )


def _make_parameters(config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )


def _make_spec(
    config: LaunchConfig,
    parameters: RendezvousParameters,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    handler: Any,  # noqa: ANN401 - of a plug-in as well
) -> WorkerSpec:
    master_addr, master_port = _master(parameters)
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


def _master(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """Return the workers' store's address where the user fixed it, as `static` does."""
    if parameters.backend != "static":
        return None, None
    from elastic_run.rendezvous.utils import parse_rendezvous_endpoint  # noqa: PLC0415 - it imports socket

    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    if port == -1:
        message = f"--rdzv-endpoint {parameters.endpoint!r} has no port: give --master-port or HOST:PORT"
        raise ValueError(message)
    return host, port


def _make_job_config(config: LaunchConfig) -> JobConfig:
    """Return the job's configuration with torch's fields in it."""
    return replace(
        config.job_config,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
    )


def _options(config: LaunchConfig, *, is_whole_process: bool) -> AgentOptions:
    affinities = {}
    if config.numa_options is not None:
        from elastic_run.cluster.numa import worker_affinities  # noqa: PLC0415 - only with --numa-binding

        affinities = worker_affinities(config.numa_options, config.nproc_per_node)
    named = parse_signals(f"{config.signals_to_handle},{config.forward_signals}")
    return AgentOptions(
        job_config=_make_job_config(config),
        node_config=config.node_config,
        agent_config=config.agent_config,
        faults=_read_faults(config.agent_config.inject_fault),
        shutdown_timeout=float(min(config.shutdown_timeout or 0, contract.LONGEST_TIME)),
        signals=parse_signals(config.signals_to_handle),
        forwarded=parse_signals(config.forward_signals) if config.forward_signals else (),
        unnamed_signals=tuple(number for number in signals.ENDING if number not in named and is_whole_process),
        offered=tuple(number for number in signals.OFFERED if number not in named and is_whole_process),
        prefix_template=config.log_line_prefix_template or contract.DEFAULT_PREFIX_TEMPLATE,
        affinities=affinities,
        is_whole_process=is_whole_process,
        start_method=config.start_method,
        stuck_timeout=float(os.environ.get(contract.ENV_UNINTERRUPTIBLE_STATE_TIMEOUT) or 0),
    )


def _read_faults(text: str) -> tuple[Fault, ...]:
    if not text:
        return ()
    from elastic_run.cli.faults import read_faults  # noqa: PLC0415 - only when asked for

    return read_faults(text)
