"""Small things that torch's users import from ``torch.distributed.elastic.utils``."""

from __future__ import annotations

from elastic_run.utils.api import get_env_variable_or_raise, macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.utils.distributed import get_free_port, get_socket_with_port

__all__ = ["get_env_variable_or_raise", "get_free_port", "get_socket_with_port", "macros"]


def __getattr__(name: str) -> object:
    if name not in ("get_free_port", "get_socket_with_port"):
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from elastic_run.utils import distributed  # noqa: PLC0415 - it imports socket

    return getattr(distributed, name)
