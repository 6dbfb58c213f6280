"""Where events go, by name. torch has these three names and no plug-ins for more.

A handler is built when it is first asked for, since that imports logging. Both NullHandlers are known to be silent
without being built. A program may put a handler of its own into `_log_handlers`, as into torch's.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

__all__ = ["get_logging_handler", "is_recorded"]

_SILENT = ("dynamic_rendezvous", "null")
_NAMES = ("console", *_SILENT)
_LOGGER_PREFIX = "torchelastic-events-"

_log_handlers: dict[str, logging.Handler] = {}


def get_logging_handler(destination: str = "null") -> logging.Handler:
    """Return the handler of that name, always the same one.

    Args:
        destination: "console" (the standard error of the moment when it is first asked for), "null" or
            "dynamic_rendezvous" (both drop everything).

    Returns:
        The handler.

    Raises:
        ValueError: There is no handler of that name (torch: KeyError).
    """
    if destination not in _log_handlers:
        _check_name(destination)
        import logging  # noqa: PLC0415 - slow to import, and most jobs record no events

        _log_handlers[destination] = logging.NullHandler() if destination in _SILENT else logging.StreamHandler()
    return _log_handlers[destination]


def is_recorded(destination: str = "null") -> bool:
    """Tell whether anybody hears an event that is recorded there; ask it before you build one.

    Args:
        destination: Name of the handler.

    Returns:
        False where everything is dropped and nobody has added another handler to the destination's logger.

    Raises:
        ValueError: There is no handler of that name.
    """
    if destination not in _log_handlers:
        _check_name(destination)
    logging = sys.modules.get("logging")
    if logging is None:
        return destination not in _SILENT
    handlers = [get_logging_handler(destination), *logging.getLogger(logger_name(destination)).handlers]
    return any(not isinstance(handler, logging.NullHandler) for handler in handlers)


def logger_name(destination: str) -> str:
    """Return the name of the logger to which a destination's handler belongs; it is torch's."""
    return _LOGGER_PREFIX + destination


def _check_name(destination: str) -> None:
    if destination not in _NAMES:
        known = ", ".join(sorted({*_NAMES, *_log_handlers}))
        message = f"unknown event handler {destination!r}; known: {known}"
        raise ValueError(message)
