"""Write numbered lines to stdout and stderr, as many bytes as asked for, in blocks that cut lines anywhere.

Arguments: bytes for each of the two streams, a directory where to leave the time of the first byte and the CPU ticks
that the launcher has used by then, and milliseconds to pause after each thousand lines.
"""

import os
import sys
import time
from pathlib import Path

#: What a buffered stdout of Python writes at once.
BLOCK = 8192
#: Lines made at once.
BATCH = 1000


def write(fd: int, data: bytes) -> None:
    """Write all of it."""
    while data:
        data = data[os.write(fd, data) :]


rank = int(os.environ["RANK"])
size = int(sys.argv[1])
pause = int(sys.argv[3]) / 1000
padding = b"." * 83
rests = {1: b"", 2: b""}
names = {1: b"o", 2: b"e"}
sent = number = 0
launcher = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
ticks = int(launcher[11]) + int(launcher[12])
Path(sys.argv[2], str(rank)).write_text(f"{time.monotonic_ns()} {ticks}", encoding="ascii")
while sent < size:
    for fd, name in names.items():
        text = rests[fd] + b"".join(
            [b"%s%d %09d %s\n" % (name, rank, line, padding) for line in range(number, number + BATCH)]
        )
        end = len(text) - len(text) % BLOCK
        for start in range(0, end, BLOCK):
            write(fd, text[start : start + BLOCK])
        rests[fd] = text[end:]
    if pause:
        time.sleep(pause)
    number += BATCH
    sent += BATCH * (len(padding) + 14)
for fd, rest in rests.items():
    write(fd, rest)
