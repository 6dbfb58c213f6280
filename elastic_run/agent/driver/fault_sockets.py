"""The sockets on which Python workers take requests for faults of --inject-fault (`diagnosis.fault_thread`)."""

from __future__ import annotations

import os

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def open_to_faults(envs: Mapping[int, dict[str, str]], restart_count: int) -> None:
    """Let Python workers take requests for faults.

    Args:
        envs: The workers' environments by local rank.
        restart_count: Restarts so far.
    """
    for local_rank, env in envs.items():
        env[contract.ENV_FAULTS] = name_socket(restart_count, local_rank)


def name_socket(restart_count: int, local_rank: int) -> str:
    """Return the name of a worker's abstract Unix socket."""
    return f"elastic-run-faults-{os.getpid()}-{restart_count}-{local_rank}"
