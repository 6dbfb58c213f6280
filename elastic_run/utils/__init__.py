"""Small things that torch's users import from ``torch.distributed.elastic.utils``, and that the launcher needs itself.

The rest of torch's package is for code that has imported torch anyway: its modules `distributed`, `log_level`,
`logging`, `process_state` and `store` can be had from here, and are torch's own, and so is what `data` has.

`socket`, `logging` and torch are imported by the functions that need them: this is on the way to the first worker.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging as logging_module
    import socket
    from collections.abc import Mapping
    from typing import Any

__all__ = ["get_env_variable_or_raise", "get_free_port", "get_socket_with_port", "macros"]

_OF_TORCH = ("distributed", "log_level", "logging", "process_state", "store")
_NAME_START = frozenset("_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NAME = _NAME_START | frozenset("0123456789")
#: By address: "localhost" would be looked up, and a resolver may be slow or wrong.
_LOOPBACK = ("127.0.0.1", "::1")


def __getattr__(name: str) -> object:
    if name not in _OF_TORCH:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    import importlib

    return importlib.import_module(f"torch.distributed.elastic.utils.{name}")


def get_env_variable_or_raise(env_name: str) -> str:
    """Return an environment variable that has to be there, empty or not.

    Raises:
        ValueError: It is not set.
    """
    value = os.environ.get(env_name)
    if value is None:
        message = f"environment variable {env_name} is not set"
        raise ValueError(message)
    return value


class macros:  # noqa: N801 - torch's name
    """The macros that may stand in a worker's arguments."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: list[Any], local_rank: str) -> list[str]:
        """Put the local rank in place of ``${local_rank}``; ``$$`` is a plain dollar, as in string.Template.

        Args:
            args: Arguments; those that are no strings are left alone.
            local_rank: The worker's local rank.

        Returns:
            New arguments.
        """
        values = {"local_rank": local_rank}
        return [safe_substitute(arg, values) if isinstance(arg, str) else arg for arg in args]


def safe_substitute(template: str, values: Mapping[str, str]) -> str:
    """Replace ``$name`` and ``${name}``, and ``$$`` by ``$``; leave alone what has no value or is no placeholder.

    It is string.Template.safe_substitute without its imports (string and re).
    """
    if "$" not in template:
        return template
    first, *rest = template.split("$")
    done = [first]
    is_escaped = False
    for index, piece in enumerate(rest):
        if is_escaped:
            is_escaped = False
            done.append(piece)
        elif not piece and index + 1 < len(rest):
            is_escaped = True
            done.append("$")
        else:
            done.append(_placeholder(piece, values))
    return "".join(done)


def _placeholder(piece: str, values: Mapping[str, str]) -> str:
    """Return what a dollar and the text behind it become."""
    start = 1 if piece.startswith("{") else 0
    end = start
    while end < len(piece) and piece[end] in (_NAME if end > start else _NAME_START):
        end += 1
    name = piece[start:end]
    is_closed = not start or piece[end : end + 1] == "}"
    if not name or not is_closed or name not in values:
        return "$" + piece
    return values[name] + piece[end + start :]


def get_free_port() -> int:
    """Return a port that no program uses at the moment.

    Another process may take the port before the caller does. A socket that is bound already has no such gap.

    Raises:
        RuntimeError: There is none.
    """
    with get_socket_with_port() as reserved:
        port: int = reserved.getsockname()[1]
        return port


def get_socket_with_port() -> socket.socket:
    """Open a listening socket on a free port of the loopback address.

    Returns:
        The socket; the port is its own as long as it is open. The caller closes it.

    Raises:
        RuntimeError: No address family of this machine gives one.
    """
    import socket

    failures = []
    for address in _LOOPBACK:
        try:
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
            continue
        try:
            listener.bind((address, 0))
            listener.listen(0)
        except OSError as error:
            listener.close()
            failures.append(f"{address}: {error.strerror or error}")
        else:
            return listener
    message = f"no free port on the loopback address ({'; '.join(failures)})"
    raise RuntimeError(message)


def get_hostname() -> str:
    """Return this machine's own name for it, as the kernel has it; no name server is asked."""
    return os.uname().nodename or "localhost"


def get_logger(name: str | None = None) -> logging_module.Logger:
    """Return a logger with the level of the environment variable LOGLEVEL, or WARNING.

    Args:
        name: Its name; None for the name of the module that calls.

    Raises:
        ValueError: LOGLEVEL is not the name of a level.
    """
    import logging

    logger = logging.getLogger(name or sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001 - as logging does
    logger.setLevel(os.environ.get("LOGLEVEL", "WARNING"))
    return logger


def describe_exception(error: BaseException) -> str:
    """Return the class and the message of an exception in one line; the class alone if it gives no message."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    except Exception:  # noqa: BLE001 - of its own __str__
        return type(error).__name__
