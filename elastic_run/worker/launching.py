"""A script that starts its own workers: ``python train.py`` is enough, and under a launcher nothing changes.

This is the one module of the package that starts the launcher, and it imports it when it does so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from elastic_run.worker.place import find_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.launcher import LaunchConfig

__all__ = ["launch_subprocesses"]

_T = TypeVar("_T")


def launch_subprocesses(fn: Callable[..., _T], config: LaunchConfig | int, *args: object) -> dict[int, _T]:
    """Run a function on several workers, however this script was started.

    In plain python it starts the workers with elastic-run and waits for them. In a process that is a worker already
    (under elastic-run, torchrun or srun) it calls the function there, so that the same script works in both ways. The
    workers import the script again: call this under ``if __name__ == "__main__":``.

    Args:
        fn: The training: a function of a module or of the script itself.
        config: How they are launched, or just their number, for this node alone and without restarts.
        args: For `fn`, the same in each worker.

    Returns:
        What `fn` returned, by global rank: of all this node's workers, or in a worker only its own.

    Raises:
        ValueError: The number of workers is less than 1.
        TypeError: It is neither a number nor a configuration.
        PlaceError: The environment doesn't say which worker this is.
        ChildFailedError: A worker failed, and restarts are used up.
    """
    place = find_place()
    if place.launcher != "none":
        return {place.rank: fn(*args)}
    from elastic_run.launcher import elastic_launch

    results: dict[int, _T] = elastic_launch(_configuration(config), fn)(*args)
    return results


# `object`: the caller's annotation is a promise, and a number from the command line is often a text still.
def _configuration(config: object) -> LaunchConfig:
    from elastic_run.launcher import LaunchConfig

    if isinstance(config, LaunchConfig):
        return config
    if isinstance(config, bool) or not isinstance(config, int):
        message = f"config={config!r}: it is a number of workers, or a LaunchConfig"
        raise TypeError(message)
    if config < 1:
        message = f"config={config}: at least 1 worker"
        raise ValueError(message)
    return LaunchConfig(1, 1, nproc_per_node=config, run_id="none", rdzv_backend="local", max_restarts=0)
