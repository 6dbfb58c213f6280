"""Memory of a launcher that restarts its worker thousands of times: python -m tests.benchmarks.growth [RESTARTS].

The benchmark compares the number of Python objects, and the bytes of malloc that are in use. The number of pages says
less, since a launcher still touches pages for the first time that its heap has had from the start. glibc's caches of
freed blocks are off, since malloc counts them as in use.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.support.launch import launch

#: Restarts after which every buffer and history has its full length.
_WARM_UP = 0.2
_LOOKS = 20
#: Fails at once, each time with another exit code than the last.
_WORKER = "exit $((TORCHELASTIC_RESTART_COUNT % 2 + 1))\n"
#: A launcher that says what it has in use when it begins some of its rounds; its first argument says which.
_COUNTING = """
import ctypes, gc, os, runpy, sys
from elastic_run.agent.driver.round import Round
class Heap(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]
read_heap, begin, step = ctypes.CDLL(None).mallinfo2, Round.__init__, int(sys.argv[1])
read_heap.restype = Heap
def count(self, *arguments, **options):
    if options["number"] % step == 0:
        gc.collect()
        os.write(1, b"%d %d %d\\n" % (options["number"], sys.getallocatedblocks(), read_heap().field7))
    begin(self, *arguments, **options)
Round.__init__ = count
sys.argv = ["elastic_run", *sys.argv[2:]]
runpy.run_module("elastic_run", run_name="__main__")
"""


@dataclass(frozen=True)
class InUse:
    """What the launcher has in use.

    Args:
        restart: At which restart.
        objects: Blocks of Python's allocator.
        heap: Bytes that malloc has given out.
        pages: Bytes that the process shares with nobody.
    """

    restart: int
    objects: int
    heap: int
    pages: int


def main(restarts: int) -> None:
    """Let a worker fail so many times, and print what the launcher has in use, and what grew after a fifth of them."""
    step = restarts // _LOOKS
    seen = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "worker.sh")
        path.write_text(_WORKER, encoding="ascii")
        flags = ("--standalone", f"--max-restarts={restarts}", "--max-backoff=0", "--no-python", "sh", path)
        program = (sys.executable, "-c", _COUNTING, str(step))
        with launch(*flags, program=program, env={"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}) as job:
            for look in range(1, _LOOKS):
                found = job.wait_line(rf"^{look * step} (\d+) (\d+)$", deadline=3600)
                seen.append(InUse(look * step, int(found[1]), int(found[2]), _own_memory(job.pid)))
                sys.stdout.write(f"{seen[-1]}\n")
            job.wait_exit(deadline=60)
    warm = [each for each in seen if each.restart >= restarts * _WARM_UP]
    half = len(warm) // 2
    for name in ("objects", "heap", "pages"):
        before, after = (median(getattr(each, name) for each in part) for part in (warm[:half], warm[-half:]))
        sys.stdout.write(f"{name}: {after - before:+.0f} in {warm[-half].restart - warm[0].restart} restarts\n")


def _own_memory(pid: int) -> int:
    """Return the bytes that a process shares with nobody."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(found) * 1024 for found in re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
