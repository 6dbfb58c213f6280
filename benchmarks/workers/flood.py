"""Write numbered lines to stdout and stderr, as many as asked for, in blocks that cut lines anywhere.

Arguments: lines for each of the two streams; a directory where to leave the time of the first byte and the CPU ticks
that the launcher has used by then, with a FIFO `go` in it at which the two workers meet; and milliseconds to pause
after each thousand lines or so. The lines are made before the clock starts: to number them takes longer than to write
them, and the workers are not what is measured.
"""

import os
import sys
import time
from pathlib import Path

#: What a buffered stdout of Python writes at once.
BLOCK = 8192
#: Bytes after which it is the other stream's turn.
TURN = 12 * BLOCK


def write(fd: int, data: memoryview) -> None:
    """Write all of it, block by block."""
    while data:
        data = data[os.write(fd, data[:BLOCK]) :]


rank = int(os.environ["RANK"])
directory = Path(sys.argv[2])
pause = int(sys.argv[3]) / 1000
padding = b"." * 83
texts = {
    fd: memoryview(b"".join([b"%s%d %09d %s\n" % (name, rank, line, padding) for line in range(int(sys.argv[1]))]))
    for fd, name in ((1, b"o"), (2, b"e"))
}
with (directory / "go").open("rb" if rank else "wb"):
    pass  # each opens its end when the other one has come
launcher = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
ticks = int(launcher[11]) + int(launcher[12])
(directory / str(rank)).write_text(f"{time.monotonic_ns()} {ticks}", encoding="ascii")
for start in range(0, len(texts[1]), TURN):
    for fd, text in texts.items():
        write(fd, text[start : start + TURN])
    if pause:
        time.sleep(pause)
