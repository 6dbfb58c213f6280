"""Events of a job's life, written to a logging handler that is chosen by name: torch's names and format.

With the destination "null", the default, nothing is built, imported or written: neither logging nor the event's class
(`api`). Ask `is_recorded` before building an event on the way to the first worker.

Torch's three handlers are "console", "null" and "dynamic_rendezvous". A program may put a handler of its own into
`_log_handlers`, as into torch's. A package offers one as an entry point of the group `elastic_run.event_handlers`: a
function or class that returns a `logging.Handler`. A handler that raises loses the event that it raised on: that is
said once, in the log, and the job goes on. (With torch it ends the job.)
"""

from __future__ import annotations

import os
import sys

from elastic_run import alias_modules, lazy_names
from elastic_run.contract import EVENT_HANDLERS_ENTRY_POINTS
from elastic_run.utils import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from importlib.metadata import EntryPoint

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

#: Their module imports json, and nothing of it is needed without a handler.
__getattr__ = lazy_names(
    __name__, dict.fromkeys(("Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"), "api")
)
alias_modules(__name__, {"handlers": (__name__,)})

_RENDEZVOUS = "dynamic_rendezvous"
_SILENT = (_RENDEZVOUS, "null")
_NAMES = ("console", *_SILENT)
_LOGGER_PREFIX = "torchelastic-events-"
_log_handlers: dict[str, logging.Handler] = {}
_events_loggers: dict[str, logging.Logger] = {}
#: Destinations whose handlers have raised, and of which that was said.
_broken: set[str] = set()


def record(event: Event, destination: str = "null") -> None:
    """Write an event to the handler of a name; ValueError if there is none."""
    if is_recorded(destination):
        _write(destination, event.serialize())


def record_rdzv_event(event: RdzvEvent) -> None:
    """Write an event of a rendezvous to the handler "dynamic_rendezvous"."""
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
    """Build an event of a rendezvous and write it; for the fields see `RdzvEvent`.

    Args:
        run_id: Id of the job.
        message: What happened, for a reader.
        node_state: State of this node; for FAILED the exception being handled is added.
        name: Behind the calling file's name in the event's; empty for the calling function's name.
        hostname: This node's name; empty for the kernel's (torch asks the name server, which may not answer).
        pid: Process id; None for this process.
        master_endpoint: As in the event, and so are `local_id` and `rank`.
        local_id: See above.
        rank: See above.
    """
    if not is_recorded(_RENDEZVOUS):
        return
    import traceback

    from elastic_run.events.api import NodeState, RdzvEvent
    from elastic_run.utils import get_hostname

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
            error_trace=traceback.format_exc() if node_state == NodeState.FAILED else "",
        )
    )


def is_recorded(destination: str = "null") -> bool:
    """Tell whether an event that is recorded there has a reader; ask it before you build one.

    It has none if its handler drops everything and no program has added another to the destination's logger.

    Raises:
        ValueError: There is no handler of that name, or the plug-in is broken.
    """
    if destination not in _NAMES:
        get_logging_handler(destination)
    logging = sys.modules.get("logging")
    if logging is None:
        return destination not in _SILENT
    handlers = [get_logging_handler(destination), *logging.getLogger(_LOGGER_PREFIX + destination).handlers]
    return any(not isinstance(handler, logging.NullHandler) for handler in handlers)


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of that name, always the same one.

    Args:
        destination: "console" (the standard error of the moment when it is first asked for), "null" or
            "dynamic_rendezvous" (both drop everything), or the name of a plug-in.

    Raises:
        ValueError: There is no handler of that name (torch: KeyError), or the plug-in is broken.
    """
    if destination not in _log_handlers:
        import logging

        if destination in _SILENT:
            _log_handlers[destination] = logging.NullHandler()
        elif destination in _NAMES:
            _log_handlers[destination] = logging.StreamHandler()
        else:
            _log_handlers[destination] = _load_plugin(destination)
    return _log_handlers[destination]


def _load_plugin(destination: str) -> logging.Handler:
    """Load the installed plug-in of that name, and no other."""
    import logging
    from importlib.metadata import entry_points

    plugins = entry_points(group=EVENT_HANDLERS_ENTRY_POINTS)
    plugin = next((plugin for plugin in plugins if plugin.name == destination), None)
    if plugin is None:
        known = ", ".join(sorted({*_NAMES, *_log_handlers, *plugins.names}))
        message = f"unknown event handler {destination!r}; known: {known}"
        raise ValueError(message)
    try:
        handler = plugin.load()()
    except Exception as error:  # whatever foreign code raises is told to the user as its package's
        raise ValueError(_describe(plugin, f"can't be loaded: {describe_exception(error)}")) from error
    if not isinstance(handler, logging.Handler):
        raise ValueError(_describe(plugin, f"returned {handler!r}, not a logging.Handler"))  # noqa: TRY004 - the plug-in's mistake
    return handler


def _describe(plugin: EntryPoint, problem: str) -> str:
    package = f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "of an unknown package"
    return " ".join(f"event handler {plugin.name!r}: plug-in {package} ({plugin.value}) {problem}".split())


def _write(destination: str, text: str) -> None:
    logger = _get_or_create_logger(destination)
    try:
        logger.info(text)
    except Exception as error:  # noqa: BLE001 - whatever foreign code raises
        if destination not in _broken:
            import logging

            _broken.add(destination)
            message = "event handler %r raised %s: %s; the job goes on (shown once)"
            logging.getLogger(__name__).warning(message, destination, type(error).__name__, error)


def _get_or_create_logger(destination: str) -> logging.Logger:
    """Return the destination's logger; it doesn't propagate, so that each event is written once."""
    if destination not in _events_loggers:
        import logging

        logger = logging.getLogger(_LOGGER_PREFIX + destination)
        level = logging.getLevelName(os.environ.get("LOGLEVEL", "").upper())
        logger.setLevel(level if isinstance(level, int) else logging.INFO)  # another program's word is no level
        logger.propagate = False
        logger.addHandler(get_logging_handler(destination))
        _events_loggers[destination] = logger
    return _events_loggers[destination]
