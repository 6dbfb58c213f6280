"""Events of a job's life, written to a logging handler that is chosen by name: torch's names and format.

With the destination "null", the default, nothing is built, imported or written: neither logging nor the event's class.
Ask `is_recorded` before building an event on the way to the first worker.

A handler that raises loses the event that it raised on: that is said once, in the log, and the job goes on. (With torch
it ends the job.)

| module | what it holds |
|---|---|
| `api` | torch's event classes and their JSON |
| `handlers` | the handlers by name: torch's three, and the handlers of plug-ins |
"""

from __future__ import annotations

import os
import sys

from elastic_run import lazy_names
from elastic_run.events.handlers import get_logging_handler, is_recorded, logger_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

    from elastic_run.events.api import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = [
    "Event",
    "EventMetadataValue",
    "EventSource",
    "NodeState",
    "RdzvEvent",
    "construct_and_record_rdzv_event",
    "get_logging_handler",
    "is_recorded",
    "record",
    "record_rdzv_event",
]

_RENDEZVOUS = "dynamic_rendezvous"
_events_loggers: dict[str, logging.Logger] = {}
#: Destinations whose handlers have raised, and of which that was said.
_broken: set[str] = set()


def record(event: Event, destination: str = "null") -> None:
    """Write an event.

    Args:
        event: The event.
        destination: Name of the handler: "console", "null", "dynamic_rendezvous", or a plug-in's.

    Raises:
        ValueError: There is no handler of that name.
    """
    if is_recorded(destination):
        _write(destination, event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Write an event of a rendezvous to the handler "dynamic_rendezvous".

    Args:
        event: The event.
    """
    if is_recorded(_RENDEZVOUS):
        _write(_RENDEZVOUS, event.serialize())


def construct_and_record_rdzv_event(  # noqa: PLR0913, PLR0917 - torch's signature
    run_id: str,
    message: str,
    node_state: NodeState,
    name: str = "",
    hostname: str = "",
    pid: int | None = None,
    master_endpoint: str = "",
    local_id: int | None = None,
    rank: int | None = None,
) -> None:
    """Build an event of a rendezvous and write it. Its name becomes ``<calling file>:<name>``.

    Args:
        run_id: Id of the job.
        message: What happened, for a reader.
        node_state: State of this node; for FAILED the exception being handled is added.
        name: Name of the event; empty for the calling function's.
        hostname: This node's name; empty for the kernel's (torch asks the name server, which may not answer).
        pid: Process id; None for this process.
        master_endpoint: Endpoint of the store, if known.
        local_id: Number of this handler within its process, if known.
        rank: Rank of this node, if known.
    """
    if not is_recorded(_RENDEZVOUS):
        return
    from elastic_run.events.api import NodeState, RdzvEvent
    from elastic_run.utils.distributed import get_hostname

    caller = sys._getframe(1).f_code  # noqa: SLF001 - inspect.stack reads the source of every frame
    record_rdzv_event(
        RdzvEvent(
            name=f"{caller.co_filename.rpartition(os.sep)[2]}:{name or caller.co_name}",
            run_id=run_id,
            message=message,
            hostname=hostname or get_hostname(),
            pid=pid or os.getpid(),
            node_state=node_state,
            master_endpoint=master_endpoint,
            rank=rank,
            local_id=local_id,
            error_trace=_current_traceback() if node_state == NodeState.FAILED else "",
        )
    )


def _current_traceback() -> str:
    import traceback

    return traceback.format_exc()


def _get_or_create_logger(destination: str) -> logging.Logger:
    """Return the destination's logger; it doesn't propagate, so that each event is written once."""
    if destination not in _events_loggers:
        import logging

        logger = logging.getLogger(logger_name(destination))
        logger.setLevel(_read_level(os.environ.get("LOGLEVEL", "")))
        logger.propagate = False
        logger.addHandler(get_logging_handler(destination))
        _events_loggers[destination] = logger
    return _events_loggers[destination]


def _read_level(text: str) -> int:
    """Return the level that LOGLEVEL names, in whatever case; a word of some other program's is INFO."""
    import logging

    level = int(text) if text.isdecimal() else logging.getLevelName(text.upper())
    if isinstance(level, int):
        return level
    if text:
        message = "elastic-run: LOGLEVEL=%r is not a log level: events are written as with INFO"
        logging.getLogger(__name__).warning(message, text)
    return logging.INFO


def _write(destination: str, text: str) -> None:
    logger = _get_or_create_logger(destination)
    try:
        logger.info(text)
    except Exception as error:  # noqa: BLE001 - whatever foreign code raises
        if destination not in _broken:
            _broken.add(destination)
            _say_broken(destination, error)


def _say_broken(destination: str, error: Exception) -> None:
    import logging

    logging.getLogger(__name__).warning(
        "event handler %r raised %s: %s; the job goes on (shown once)",
        destination,
        type(error).__name__,
        error,
    )


#: Their module imports json, and nothing of it is needed without a handler.
__getattr__ = lazy_names(
    __name__, dict.fromkeys(("Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"), "api")
)
