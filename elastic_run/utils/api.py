"""The macros in a worker's arguments, and a look at the environment: names of torch's.

`macros.substitute` does what string.Template.safe_substitute does, without its import (string and re) on the way to
the first worker.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from elastic_run.utils.distributed import get_socket_with_port

__all__ = ["get_env_variable_or_raise", "get_socket_with_port", "macros", "safe_substitute"]

_NAME_START = frozenset("_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NAME = _NAME_START | frozenset("0123456789")


def get_env_variable_or_raise(env_name: str) -> str:
    """Return an environment variable that has to be there.

    Args:
        env_name: Its name.

    Returns:
        Its value, which may be empty.

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
    """Replace ``$name`` and ``${name}``; leave alone what has no value or is no placeholder.

    Args:
        template: The text.
        values: Value of each name; names are case-sensitive.

    Returns:
        The text with values; ``$$`` has become ``$``.
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


def __getattr__(name: str) -> object:
    if name == "get_socket_with_port":
        from elastic_run.utils import distributed

        return distributed.get_socket_with_port
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
