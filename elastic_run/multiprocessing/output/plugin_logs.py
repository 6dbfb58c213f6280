"""What a plug-in of --logs-specs returns, checked before workers are started with it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from elastic_run.multiprocessing.output.logs import LogsSpecs

#: What each worker needs; without the other fields of `LogsDest` it does.
_NEEDED = ("stdouts", "stderrs")


class LogsPluginError(RuntimeError):
    """A plug-in has left out paths that the workers need: one line that names its class."""


def check_logs(specs: LogsSpecs, logs: object, local_ranks: Collection[int]) -> None:
    """Refuse paths without which the workers can't be started.

    Args:
        specs: The plug-in's object.
        logs: What its `reify` has returned: a `LogsDest`, torch's or ours.
        local_ranks: The workers.

    Raises:
        LogsPluginError: Workers have no path for stdout or stderr.
    """
    method = f"{type(specs).__module__}.{type(specs).__qualname__}.reify has returned"
    if not all(hasattr(logs, name) for name in _NEEDED):
        message = f"{method} {logs!r:.200}, which is no LogsDest"
        raise LogsPluginError(message)
    left_out = {name: [rank for rank in local_ranks if rank not in getattr(logs, name)] for name in _NEEDED}
    missing = [f"no {name} for {_name_ranks(ranks)}" for name, ranks in left_out.items() if ranks]
    if missing:
        message = f'{method} {" and ".join(missing)}; "" is the console'
        raise LogsPluginError(message)


def _name_ranks(ranks: Collection[int]) -> str:
    return f"local rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
