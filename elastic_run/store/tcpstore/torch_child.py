"""The child process of `torch_server`: serves torch's TCPStore on a listening socket that it inherits. Run as a script.

Descriptor 0 is a pipe that the agent alone could write to, and whose end means that the agent is gone; 3 is the socket.
Nothing of elastic-run is imported: this runs under the workers' interpreter, which needn't have it.
"""

from __future__ import annotations

import os
import select
import sys

_LISTENER = 3
#: Bytes that the store may take beside torch itself. Torch's server has no bound, and copies a value for each time that
#: a reply names it: better that this process ends than that the machine's memory does.
_STORE_LIMIT = 4 * 1024**3


def main() -> None:
    """Serve until the agent is gone."""
    # This file's directory has names (client, server, memory) that some library may want of others. Under -P or
    # PYTHONSAFEPATH it isn't there.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    end_with_agent()
    # Takes a second, and the agent may be gone by then.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        "127.0.0.1",
        int(sys.argv[1]),
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=_LISTENER,
    )
    limit_memory()
    while os.read(0, 1):
        pass
    # Without the interpreter's farewell: torch's threads make it slow, and there is nothing to put in order.
    del store
    os._exit(0)


def limit_memory() -> None:
    """Bound what this process may take from now on; where the system can't say what it has, nothing is bounded."""
    import resource

    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            has = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
        limit = has + _STORE_LIMIT
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    except (OSError, StopIteration, ValueError):
        pass


def end_with_agent() -> None:
    """Let the kernel end this process when the pipe's other end closes, whatever it is doing then.

    A thread that reads the pipe would have to wait for the interpreter's lock, which loading a library of hundreds of
    megabytes holds for long.
    """
    import fcntl

    if hasattr(os, "O_ASYNC"):
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    # It may have closed before; from here on SIGIO tells.
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if poll.poll(0):
        sys.exit(0)


if __name__ == "__main__":
    main()
