"""Small things that torch's users import from ``torch.distributed.elastic.utils``.

| module | what it holds |
|---|---|
| `api` | the macros in a worker's arguments |
| `data` | data loading for elastic jobs |
| `distributed` | free ports on this machine |
| `exceptions` | an exception in one line |
| `log_level` | the log level of the launcher's own loggers |
| `logging` | loggers whose level comes from LOGLEVEL |
| `process_state` | the state of a process as the kernel shows it |
| `store` | barriers and exchanges through a `torch.distributed.Store` |
"""

from __future__ import annotations

from elastic_run import lazy_names
from elastic_run.utils.api import get_env_variable_or_raise, macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.utils.distributed import get_free_port, get_socket_with_port

__all__ = ["get_env_variable_or_raise", "get_free_port", "get_socket_with_port", "macros"]

#: These import socket.
__getattr__ = lazy_names(__name__, {"get_free_port": "distributed", "get_socket_with_port": "distributed"})
