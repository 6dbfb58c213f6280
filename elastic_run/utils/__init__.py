"""Small things that torch's users import from ``torch.distributed.elastic.utils``, and that the launcher needs itself.

The rest of torch's package is for code that has imported torch anyway: its modules `distributed`, `log_level`,
`logging`, `process_state` and `store` can be had from here, and are torch's own, and so is what `data` has.

`socket`, `logging` and torch are imported by the functions that need them: this is on the way to the first worker.
"""

from __future__ import annotations

import os
import sys

from elastic_run import alias_modules

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging as logging_module
    import socket
    from collections.abc import Mapping
    from typing import Any

    from torch.distributed.elastic.utils import distributed as distributed
    from torch.distributed.elastic.utils import log_level as log_level
    from torch.distributed.elastic.utils import logging as logging
    from torch.distributed.elastic.utils import process_state as process_state
    from torch.distributed.elastic.utils import store as store

__all__ = ["get_env_variable_or_raise", "get_free_port", "get_socket_with_port", "macros"]

alias_modules(
    __name__,
    {
        "api": (__name__,),
        **{
            name: (f"torch.distributed.elastic.utils.{name}",)
            for name in ("distributed", "log_level", "logging", "process_state", "store")
        },
    },
)


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
    """Replace ``$name`` and ``${name}``, and ``$$`` by ``$``; leave alone what has no value or is no placeholder."""
    text = template
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    if "$" not in text and "$" not in "".join(values.values()):
        return text
    from string import Template  # imports the module `re`, which would delay a worker's first line by milliseconds

    return Template(template).safe_substitute(values)


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

    problem = ""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            # By address: "localhost" would be looked up, and a resolver may be slow or wrong.
            return socket.create_server((address, 0), family=family, backlog=0)
        except OSError as error:
            problem += f"; {address}: {error.strerror or error}"
    message = f"no free port on the loopback address ({problem.removeprefix('; ')})"
    raise RuntimeError(message)


def listen_everywhere(port: int) -> socket.socket:
    """Open a listening socket at all addresses of this machine; port 0 is any. OSError: the port is taken."""
    import socket

    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # a machine without IPv6
        return socket.create_server(("", port))


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
