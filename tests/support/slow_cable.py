"""A cable between a virtual host and the switch on which every frame takes its time.

Run in the host's network namespace with the pid of a process in the switch's: a program, since a kernel without netem
can't delay. Each end is a TAP device, and frames go from one to the other after a while. Ends with its standard input.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from pathlib import Path

_SET_INTERFACE = 0x400454CA
_TAP, _BARE = 0x0002, 0x1000
_FRAME = 65536


def open_card(name: str) -> int:
    """Make a network card in the namespace of this process, and return a descriptor of what goes through it."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _BARE))
    return descriptor


def enter_network(pid: int) -> None:
    """Go to the network namespace of a process."""
    with Path(f"/proc/{pid}/ns/net").open("rb") as target:
        if ctypes.CDLL(None, use_errno=True).setns(target.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def carry(ends: tuple[int, int], seconds: float) -> None:
    """Carry frames between two cards until the standard input ends."""
    travelling: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        left = max(0.0, travelling[0][0] - time.monotonic()) if travelling else None
        ready, _, _ = select.select([*ends, 0], [], [], left)
        if 0 in ready and not os.read(0, 1):
            return
        for end in set(ready) & set(ends):
            try:
                frame = os.read(end, _FRAME)
            except OSError:
                continue  # the card is not up yet, or gone
            count += 1
            other = ends[1] if end == ends[0] else ends[0]
            heapq.heappush(travelling, (time.monotonic() + seconds, count, other, frame))
        while travelling and travelling[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(travelling)
            try:
                os.write(end, frame)
            except OSError:
                continue  # as a cable does


def main() -> None:
    """Lay the cable, say `up`, and carry."""
    pid, port, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    host = open_card("eth0")
    enter_network(pid)
    switch = open_card(port)
    print("up", flush=True)  # noqa: T201 - a command prints
    carry((host, switch), seconds)


if __name__ == "__main__":
    main()
