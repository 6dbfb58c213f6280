"""A part of a large job's nodes as torch has them: a `DynamicRendezvousHandler` and a TCPStore client in a thread each.

``python -m benchmarks.torch_crowd PORT NODES COUNT``; port 0 lets it serve the store itself, by torch's own
server. It says ``listening PORT`` and ``ready``, begins when it is sent a line, and says
``formed NANOSECONDS CPU_SECONDS`` when all are in a round. It ends with its input.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch doesn't list it
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from benchmarks.crowd import Tally, say

_RUN_ID = "crowd"
_HOST = "127.0.0.1"
_STACK = 1024 * 1024
_TIMEOUT = 600


def _open(port: int, *, is_server: bool = False) -> TCPStore:
    return TCPStore(
        _HOST,
        port,
        is_master=is_server,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=_TIMEOUT),
    )


def main() -> None:
    """Do what the file says."""
    port, nodes, count = map(int, sys.argv[1:4])
    served = None if port else _open(0, is_server=True)
    port = port or served.port  # type: ignore[union-attr] # it serves one then
    say(f"listening {port}")
    threading.stack_size(_STACK)
    tally = Tally(count)

    def join() -> None:
        store = _open(port)
        config = {"join_timeout": _TIMEOUT, "read_timeout": _TIMEOUT}
        params = RendezvousParameters("c10d", f"{_HOST}:{port}", _RUN_ID, nodes, nodes, local_addr=_HOST, **config)
        create_handler(store, C10dRendezvousBackend(store, _RUN_ID), params).next_rendezvous()
        tally.count("formed")

    threads = [threading.Thread(target=join, daemon=True) for _ in range(count)]
    say("ready")
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
