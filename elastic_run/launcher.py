"""The launch itself, under the names of torch 2.13's torch.distributed.launcher.api.

`elastic_launch` and `launch_agent` keep torch's behaviour for programs: they return results and raise failures. The
agent that they run, and `launch_job` for the command line, are in `launch_config`.
"""

from __future__ import annotations

import sys

from elastic_run import lazy_names
from elastic_run.launch_config import LaunchConfig, make_agent, make_agent_context
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any


__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

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
        #: Signals that ask to stop the job, until it has a receiver. A list does without a lock, which a signal handler
        #: of the program might find taken by its own thread.
        self._stops: list[int] = []
        self._receive_stop: Callable[[int], None] | None = None

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job; see `launch_agent`."""
        from elastic_run import events, metrics
        from elastic_run.multiprocessing.api import SignalException
        from elastic_run.multiprocessing.errors import ChildFailedError

        config, entrypoint = self._config, self._entrypoint
        events.is_recorded(config.event_log_handler)  # refuses one that there isn't, before anything is started
        context = make_agent_context(config, entrypoint, list(args), is_whole_process=False)
        agent = make_agent(config, context, health_check_server=self._health_check_server)
        agent.connect_stop = self._connect_stop
        # A stop by signal is no end of the job: other nodes may go on with this rendezvous.
        is_over = True
        try:
            metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
            result = agent.run()
            agent.record_event(agent.get_event_succeeded)
        except Exception as error:
            is_over = not isinstance(error, SignalException)
            agent.record_event(agent.get_event_failed)
            raise
        finally:
            self._connect_stop(None)
            if is_over:
                agent.shut_rendezvous()
        if result.is_failed():
            root = None if agent.job_result is None else agent.job_result.root
            raise ChildFailedError(
                _name_program(entrypoint, args), result.failures, None if root is None else root.rank
            )
        return result.return_values

    def stop(self, number: int = SIGTERM) -> None:
        """Stop the job as if this signal had come; the call that runs it raises SignalException.

        For programs that launch in a thread of their own, where no signal arrives; may be called from any thread. Each
        call counts once: a second SIGINT means that the workers are killed at once.

        Args:
            number: The signal, which the workers get too.
        """
        self._stops.append(number)
        self._pass_on_stops()

    def _connect_stop(self, receive: Callable[[int], None] | None) -> None:
        """Pass all requests on from now on, waiting ones too; with None they wait again."""
        self._receive_stop = receive
        self._pass_on_stops()

    def _pass_on_stops(self) -> None:
        receive = self._receive_stop
        while receive is not None:
            try:
                number = self._stops.pop(0)
            except IndexError:
                return
            receive(number)


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
    return elastic_launch(config, entrypoint, health_check_server)(*args)


def _name_program(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """Return what a failure is called after, as with torch: the function, the script of an interpreter, the command."""
    from elastic_run.multiprocessing.fork_exec import is_run_path_code, own_interpreter

    if not isinstance(entrypoint, str):
        return getattr(entrypoint, "__name__", repr(entrypoint))
    if entrypoint not in {sys.executable, own_interpreter()}:
        return entrypoint
    words = (str(arg) for arg in args)
    return next((word for word in words if word[:1] != "-" and not is_run_path_code(word)), "")
