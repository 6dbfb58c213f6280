"""Small things that torch's users import from ``torch.distributed.elastic.utils``."""

from __future__ import annotations

from elastic_run.lazy import lazy_names
from elastic_run.utils.api import get_env_variable_or_raise, macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.utils.distributed import get_free_port, get_socket_with_port

__all__ = ["get_env_variable_or_raise", "get_free_port", "get_socket_with_port", "macros"]

#: These import socket.
__getattr__ = lazy_names(__name__, {"get_free_port": "distributed", "get_socket_with_port": "distributed"})
