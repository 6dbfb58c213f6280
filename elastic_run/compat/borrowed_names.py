"""Public names that torch's modules have only since they import them from others, and that programs take from there.

``from torch.distributed.run import elastic_launch, LaunchConfig`` is one that is in use. They are no part of torch's
promise, nor of ours: an alias has them, our own modules don't. A test holds the table against torch 2.13.
"""

from __future__ import annotations

_AGENT = "torch.distributed.elastic.agent.server"
_ELASTIC = "torch.distributed.elastic"

#: Torch's path -> where to get them -> their names.
BORROWED_NAMES: dict[str, dict[str, str]] = {
    "torch.distributed.run": {
        "argparse": "REMAINDER",
        "elastic_run.launcher": "LaunchConfig elastic_launch",
        "elastic_run.multiprocessing": "DefaultLogsSpecs LogsSpecs Std",
        "elastic_run.multiprocessing.errors": "record",
        "elastic_run.utils": "macros",
        "elastic_run.utils.logging": "get_logger",
        "torch.distributed.argparse_util": "check_env env",
    },
    "torch.distributed.launch": {"elastic_run.run": "get_args_parser"},
    "torch.distributed.launcher.api": {
        "elastic_run.agent": "LocalElasticAgent",
        "elastic_run.agent.health_check_server": "HealthCheckServer create_healthcheck_server",
        "elastic_run.agent.local_elastic_agent": "TORCHELASTIC_HEALTH_CHECK_PORT",
        "elastic_run.multiprocessing": "LogsSpecs SignalException",
        "elastic_run.multiprocessing.errors": "ChildFailedError",
        "elastic_run.rendezvous": "parse_rendezvous_endpoint",
        "elastic_run.utils.logging": "get_logger",
    },
    _AGENT: {"elastic_run.agent.local_elastic_agent": "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE"},
    f"{_AGENT}.api": {
        "elastic_run.events": "Event EventSource record",
        "elastic_run.metrics": "prof put_metric",
        "elastic_run.multiprocessing": "SignalException",
        "elastic_run.multiprocessing.errors": "ProcessFailure",
        "elastic_run.rendezvous": "RendezvousGracefulExitError",
        "elastic_run.utils.logging": "get_logger",
    },
    f"{_AGENT}.local_elastic_agent": {
        "elastic_run.agent": "WorkerGroup WorkerSpec",
        "elastic_run.agent.health_check_server": "HealthCheckServer create_healthcheck_server",
        "elastic_run.metrics": "prof",
        "elastic_run.multiprocessing": "LogsSpecs PContext start_processes",
        "elastic_run.utils.logging": "get_logger",
        "elastic_run.utils.process_state": "is_uninterruptible_state read_proc_state",
    },
    f"{_AGENT}.health_check_server": {"elastic_run.utils.logging": "get_logger"},
    f"{_ELASTIC}.control_plane": {"elastic_run.multiprocessing.errors": "record"},
    f"{_ELASTIC}.multiprocessing": {"elastic_run.utils.logging": "get_logger"},
    f"{_ELASTIC}.multiprocessing.api": {
        "elastic_run.multiprocessing.errors": "record",
        f"{_ELASTIC}.multiprocessing.redirects": "IS_MACOS IS_WINDOWS",
        f"{_ELASTIC}.multiprocessing.subprocess_handler": "SubprocessHandler get_subprocess_handler",
        f"{_ELASTIC}.multiprocessing.tail_log": "TailLog",
    },
    f"{_ELASTIC}.multiprocessing.errors": {"elastic_run.utils.logging": "get_logger"},
    f"{_ELASTIC}.rendezvous.api": {"elastic_run.utils": "get_free_port", "torch.distributed": "Store"},
    f"{_ELASTIC}.rendezvous.registry": {
        "elastic_run.rendezvous": "RendezvousHandler RendezvousParameters",
        f"{_ELASTIC}.rendezvous.dynamic_rendezvous": "create_handler",
    },
    f"{_ELASTIC}.timer.debug_info_logging": {"elastic_run.utils.logging": "get_logger"},
    f"{_ELASTIC}.timer.file_based_local_timer": {
        "elastic_run.timer": "TimerRequest",
        "elastic_run.utils.logging": "get_logger",
    },
    f"{_ELASTIC}.utils.distributed": {
        "elastic_run.utils.logging": "get_logger",
        "elastic_run.utils.store": "barrier",
    },
}


def find_home(path: str, name: str) -> str | None:
    """Find from where a module of torch's borrows a name.

    Args:
        path: Torch's module.
        name: What is asked for there.

    Returns:
        The module to import it from, or None if the name isn't borrowed.
    """
    homes = BORROWED_NAMES.get(path, {})
    return next((home for home, names in homes.items() if name in names.split()), None)
