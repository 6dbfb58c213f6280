"""Memory of a launcher that restarts its worker thousands of times: python -m tests.benchmarks.growth [RESTARTS]."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.support.launch import launch

#: Restarts after which every buffer and history has its full length.
_WARM_UP = 0.2
_LOOKS = 20
#: Fails at once, each time with another exit code than the last.
_WORKER = "exit $((TORCHELASTIC_RESTART_COUNT % 2 + 1))\n"


def main(restarts: int) -> None:
    """Let a worker fail so many times, and print what the launcher's own memory grew by after a fifth of them."""
    seen: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "worker.sh")
        path.write_text(_WORKER, encoding="ascii")
        flags = ("--standalone", f"--max-restarts={restarts}", "--max-backoff=0", "--no-python", "sh", path)
        with launch(*flags) as job:
            for look in range(1, _LOOKS + 1):
                number = restarts * look // _LOOKS
                job.wait_line(f"restart {number} of {restarts}", deadline=3600)
                if look < _LOOKS:
                    seen.append((number, _own_memory(job.pid)))
            job.wait_exit(deadline=60)
    warm = [each for each in seen if each[0] >= restarts * _WARM_UP]
    (first, before), (last, after) = warm[0], warm[-1]
    sys.stdout.write(
        f"{after - before} bytes from restart {first} to {last}: {(after - before) / (last - first):.1f} a restart\n"
    )


def _own_memory(pid: int) -> int:
    """Return the bytes that a process shares with nobody."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(found) * 1024 for found in re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
