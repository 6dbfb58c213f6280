"""A worker's main function under torch's worker server, which answers debugging requests on a Unix socket.

Source of the name and of the variable: torch 2.13, torch.distributed.elastic.control_plane.
"""

from __future__ import annotations

import os
from contextlib import contextmanager

from elastic_run import lazy_names
from elastic_run.multiprocessing.errors import get_error_handler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["worker_main"]

TORCH_WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "record": "elastic_run.multiprocessing.errors",
    },
)


@contextmanager
def worker_main() -> Iterator[None]:
    """Record an exception that leaves the block, and serve torch's debugging requests meanwhile; also a decorator.

    The server is torch's, and is started only where TORCH_WORKER_SERVER_SOCKET names a path for its socket.
    """
    handler = get_error_handler()
    handler.initialize()
    path = os.environ.get(TORCH_WORKER_SERVER_SOCKET)
    server = _start_server(path) if path else None
    try:
        yield
    except Exception as error:
        handler.record_exception(error)
        raise
    finally:
        if server is not None:
            server.shutdown()


def _start_server(path: str):  # type: ignore[no-untyped-def] # noqa: ANN202 - torch's own class, which has no types
    from torch._C._distributed_c10d import _WorkerServer

    return _WorkerServer(path)
