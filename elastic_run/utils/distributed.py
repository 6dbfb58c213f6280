"""Free ports on this machine.

On the loopback address itself, not on "localhost": that name would be looked up, and a resolver may be slow or wrong.
"""

from __future__ import annotations

import socket

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["create_c10d_store", "get_free_port", "get_hostname", "get_socket_with_port"]

#: Names that torch's module has from others, and that programs take from there.
__getattr__ = lazy_names(
    __name__,
    {
        "barrier": "elastic_run.utils.store",
        "get_logger": "elastic_run.utils.logging",
    },
    logger="logger",
)

_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> Any:
    """Make torch's own TCPStore, for programs that want one; the launcher doesn't.

    Args:
        is_server: Whether this process serves it.
        server_addr: The serving host.
        server_port: Its port; -1 for a free one, with a world of one.
        world_size: How many processes connect, the server included.
        timeout: Seconds for waiting.
        wait_for_workers: Whether to return only when all have connected.
        retries: How many free ports to try.
        use_libuv: Ignored, as by torch; the environment variable USE_LIBUV decides.

    Returns:
        The store.

    Raises:
        ValueError: There are others to connect, and no port that they could know.
        TimeoutError: Not all have connected in time.
        RuntimeError: The port is taken; torch raises subclasses of it.
    """
    del use_libuv
    if server_port == -1 and world_size > 1:
        message = f"server_port has to be given for a world of {world_size}: the others must know it"
        raise ValueError(message)
    attempts = retries if server_port == -1 else 1
    for attempt in range(1, attempts + 1):
        port = get_free_port() if server_port == -1 else server_port
        try:
            store = _make_torch_store(server_addr, port, world_size, timeout, is_server, wait_for_workers)
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) and "Address already in use" not in str(error):
                raise
            if attempt == attempts:
                message = f"port {port} of {server_addr} is taken"
                raise RuntimeError(message) from error
        else:
            if wait_for_workers:
                _wait_for_all(store, world_size, timeout)
            return store
    message = f"retries must be at least 1, got {retries}"
    raise ValueError(message)


def _make_torch_store(
    host: str,
    port: int,
    world_size: int,
    timeout: float,
    is_server: bool,
    wait_for_workers: bool,
) -> Any:
    import os
    from datetime import timedelta

    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined] # torch has no stub that exports it
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=is_server,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=wait_for_workers,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _wait_for_all(store: Any, world_size: int, timeout: float) -> None:
    from elastic_run.utils import store as torch_store

    try:
        torch_store.barrier(store, world_size, key_prefix="_tcp_store/num_members", barrier_timeout=timeout)
    except torch_store._store_error() as error:  # noqa: SLF001 - ours
        message = f"not all {world_size} members have joined within {timeout} s"
        raise TimeoutError(message) from error


def get_free_port() -> int:
    """Find a port that no program uses at the moment.

    Nothing keeps it free: another process may take it before you do. Prefer to hand on a socket that is bound.

    Returns:
        The port.

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
    failures = []
    for family, address in _LOOPBACK:
        try:
            return _open_listener(family, address)
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
    message = f"no free port on the loopback address ({'; '.join(failures)})"
    raise RuntimeError(message)


def _open_listener(family: int, address: str) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(0)
    except OSError:
        listener.close()
        raise
    return listener


def get_hostname() -> str:
    """Return this machine's own name for it, as the kernel has it; no name server is asked.

    Returns:
        The name, or "localhost" where it has none.
    """
    return socket.gethostname() or "localhost"
