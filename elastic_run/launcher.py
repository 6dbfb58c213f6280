"""The launch itself, under the names of torch 2.13's torch.distributed.launcher.api.

`elastic_launch` and `launch_agent` keep torch's behaviour for programs: they return results and raise failures.
`launch_job` is for the command line: it reports on the console and returns the exit code. The agent that they run comes
from `launch_config`.
"""

from __future__ import annotations

import sys

from elastic_run import lazy_names, signals
from elastic_run.agent.driver.worker_launch import start_early
from elastic_run.launch_config import LaunchConfig, make_agent, make_agent_context, name_flag
from elastic_run.multiprocessing.process.process_table import list_foreign_handled
from elastic_run.notices import UsageError
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


__all__ = ["LaunchConfig", "elastic_launch", "launch_agent", "launch_job"]

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "ChildFailedError": "elastic_run.multiprocessing.errors",
        "DefaultLogsSpecs": "elastic_run.multiprocessing",
        "HealthCheckServer": "elastic_run.agent.health_check_server",
        "LocalElasticAgent": "elastic_run.agent",
        "LogsSpecs": "elastic_run.multiprocessing",
        "NumaOptions": "elastic_run.cluster.numa",
        "RendezvousParameters": "elastic_run.rendezvous",
        "SignalException": "elastic_run.multiprocessing",
        "TORCHELASTIC_HEALTH_CHECK_PORT": "elastic_run.agent.local_elastic_agent",
        "WorkerSpec": "elastic_run.agent",
        "create_healthcheck_server": "elastic_run.agent.health_check_server",
        "events": "elastic_run.events:",
        "get_logger": "elastic_run.utils",
        "metrics": "elastic_run.metrics:",
        "parse_rendezvous_endpoint": "elastic_run.rendezvous",
        "rdzv_registry": "elastic_run.rendezvous.registry:",
    },
    logger="logger",
)


class PluginHungError(Exception):
    """The job has ended while a call of a plug-in still runs. A normal exit of Python might wait for it for ever."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class StopRequests:
    """Signals that ask to stop a job. Any thread may send one, also before the job has a receiver.

    Each request reaches the receiver once, whichever thread passes it on: a second SIGINT means that the workers are
    killed at once. A list does without a lock, which a signal handler of the program might find taken by its own
    thread.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._receiver: Callable[[int], None] | None = None

    def put(self, number: int) -> None:
        """Request a stop as if this signal had come."""
        self._waiting.append(number)
        self._pass_on()

    def connect(self, receiver: Callable[[int], None] | None) -> None:
        """Pass all requests to a receiver from now on, waiting ones too; with None they wait again."""
        self._receiver = receiver
        self._pass_on()

    def _pass_on(self) -> None:
        receiver = self._receiver
        while receiver is not None:
            try:
                number = self._waiting.pop(0)
            except IndexError:
                return
            receiver(number)


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
        health_check_server: Any = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server
        self._stop_requests = StopRequests()

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job; see `launch_agent`."""
        try:
            return _run_agent(
                self._config, self._entrypoint, list(args), self._health_check_server, self._stop_requests.connect
            )
        finally:
            self._stop_requests.connect(None)

    def stop(self, number: int = SIGTERM) -> None:
        """Stop the job as if this signal had come; the call that runs it raises SignalException.

        For programs that launch in a thread of their own, where no signal arrives; may be called from any thread.

        Args:
            number: The signal, which the workers get too.
        """
        self._stop_requests.put(number)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
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
        Exception: The function or an argument can't be sent to a worker: what pickle raises.
    """
    return _run_agent(config, entrypoint, args, health_check_server)


def _run_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any,
    connect_stop: Callable[[Callable[[int], None]], None] = lambda _: None,
) -> dict[int, Any]:
    from elastic_run import events, metrics
    from elastic_run.multiprocessing.api import SignalException
    from elastic_run.multiprocessing.errors import ChildFailedError

    events.is_recorded(config.event_log_handler)  # refuses one that there isn't, before anything is started
    context = make_agent_context(config, entrypoint, args, is_whole_process=False)
    agent = make_agent(config, context, health_check_server=health_check_server)
    agent.connect_stop = connect_stop
    # A stop by signal is no end of the job: other nodes may go on with this rendezvous.
    is_over = True
    try:
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        result = agent.run()
        agent.record_event(agent.get_event_succeeded)
    except SignalException:
        is_over = False
        agent.record_event(agent.get_event_failed)
        raise
    except Exception:
        agent.record_event(agent.get_event_failed)
        raise
    finally:
        if is_over:
            agent.shut_rendezvous()
    if result.is_failed():
        root = None if agent.job_result is None else agent.job_result.root
        raise ChildFailedError(_name_program(entrypoint, args), result.failures, None if root is None else root.rank)
    return result.return_values


def _name_program(entrypoint: Callable[..., Any] | str | None, args: list[Any]) -> str:
    """Return what a failure is called after, as with torch: the function, the script of an interpreter, the command."""
    from elastic_run.multiprocessing.process.fork_exec import is_run_path_code, own_interpreter

    if not isinstance(entrypoint, str):
        return getattr(entrypoint, "__name__", repr(entrypoint))
    if entrypoint not in {sys.executable, own_interpreter()}:
        return entrypoint
    words = (str(arg) for arg in args)
    return next((word for word in words if word[:1] != "-" and not is_run_path_code(word)), "")


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
            raise UsageError(name_flag(str(error))) from None
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
