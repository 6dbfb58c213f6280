"""Where events go, by name: torch's three names, and those that installed packages bring.

A handler is built when it is first asked for, since that imports logging. Both NullHandlers are known to be silent
without being built. A program may put a handler of its own into `_log_handlers`, as into torch's. A package offers one
as an entry point of the group `elastic_run.event_handlers`: a function or class that returns a `logging.Handler`.
"""

from __future__ import annotations

import sys

from elastic_run.contract import EVENT_HANDLERS_ENTRY_POINTS
from elastic_run.utils.exceptions import describe_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from importlib.metadata import EntryPoint

__all__ = ["get_logging_handler", "is_recorded"]

_SILENT = ("dynamic_rendezvous", "null")
_NAMES = ("console", *_SILENT)
_LOGGER_PREFIX = "torchelastic-events-"

_log_handlers: dict[str, logging.Handler] = {}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of that name, always the same one.

    Args:
        destination: "console" (the standard error of the moment when it is first asked for), "null" or
            "dynamic_rendezvous" (both drop everything), or the name of a plug-in.

    Returns:
        The handler.

    Raises:
        ValueError: There is no handler of that name (torch: KeyError), or the plug-in is broken.
    """
    if destination not in _log_handlers:
        _log_handlers[destination] = _make(destination) if destination in _NAMES else _find_plugin(destination)
    return _log_handlers[destination]


def is_recorded(destination: str = "null") -> bool:
    """Tell whether anybody hears an event that is recorded there; ask it before you build one.

    Args:
        destination: Name of the handler.

    Returns:
        False if everything is dropped and no program has added another handler to the destination's logger.

    Raises:
        ValueError: There is no handler of that name, or the plug-in is broken.
    """
    if destination not in _NAMES:
        get_logging_handler(destination)
    logging = sys.modules.get("logging")
    if logging is None:
        return destination not in _SILENT
    handlers = [get_logging_handler(destination), *logging.getLogger(logger_name(destination)).handlers]
    return any(not isinstance(handler, logging.NullHandler) for handler in handlers)


def logger_name(destination: str) -> str:
    """Return the name of the logger to which a destination's handler belongs; it is torch's."""
    return _LOGGER_PREFIX + destination


def _make(destination: str) -> logging.Handler:
    import logging

    return logging.NullHandler() if destination in _SILENT else logging.StreamHandler()


def _find_plugin(destination: str) -> logging.Handler:
    """Load the installed plug-in of that name, and no other."""
    from importlib.metadata import entry_points

    plugins = entry_points(group=EVENT_HANDLERS_ENTRY_POINTS)
    for plugin in plugins:
        if plugin.name == destination:
            return _load(plugin)
    known = ", ".join(sorted({*_NAMES, *_log_handlers, *plugins.names}))
    message = f"unknown event handler {destination!r}; known: {known}"
    raise ValueError(message)


def _load(plugin: EntryPoint) -> logging.Handler:
    import logging

    try:
        handler = plugin.load()()
    except Exception as error:  # whatever foreign code raises is told to the user as its package's
        raise ValueError(_broken(plugin, f"can't be loaded: {describe_exception(error)}")) from error
    if not isinstance(handler, logging.Handler):
        raise ValueError(_broken(plugin, f"returned {handler!r}, not a logging.Handler"))  # noqa: TRY004 - the plug-in's mistake
    return handler


def _broken(plugin: EntryPoint, what: str) -> str:
    package = f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "of an unknown package"
    return " ".join(f"event handler {plugin.name!r}: plug-in {package} ({plugin.value}) {what}".split())
