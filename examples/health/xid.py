"""A health check: no fatal Xid error of an NVIDIA GPU in the kernel log of the last hour.

    elastic-run --health-check="python examples/health/xid.py" ...

The NVIDIA driver writes a line `NVRM: Xid (PCI:0000:3b:00): 79, ...` into the kernel log when a GPU fails. The codes
below mean that the GPU, its memory or its link is damaged; others (13, 31, 43) are mostly errors of the program.
https://docs.nvidia.com/deploy/xid-errors/

Reading the kernel log takes root or CAP_SYSLOG in most systems. Give a file to read a recorded log instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

#: Double-bit errors, failed repairs, NVLink errors, a GPU that fell off the bus, memory errors, no answer of its GSP.
FATAL = {48, 63, 64, 74, 79, 94, 95, 110, 119, 120, 140}
SECONDS = 3600.0
_LINE = re.compile(r"^\[\s*(?P<at>[\d.]+)\].*NVRM: Xid \((?P<gpu>[^)]*)\): (?P<code>\d+)")


def find_fatal(lines: list[str], now: float) -> list[str]:
    """Return a sentence for each fatal error of the last hour; `now` is in seconds since the machine has booted."""
    found = []
    for line in lines:
        match = _LINE.match(line)
        if match and int(match["code"]) in FATAL and now - float(match["at"]) <= SECONDS:
            found.append(f"Xid {match['code']} of GPU {match['gpu']}, {now - float(match['at']):.0f} s ago")
    return found


def main(paths: list[str]) -> bool:
    """Read the kernel log, or a file; a log that can't be read is no error of the GPUs."""
    if paths:
        text = Path(paths[0]).read_text(encoding="utf-8", errors="replace")
        now = max((float(at) for at in re.findall(r"^\[\s*([\d.]+)\]", text, re.MULTILINE)), default=0.0)
    else:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            print(f"the kernel log can't be read: {done.stderr.strip()}")
        text, now = done.stdout, time.clock_gettime(time.CLOCK_BOOTTIME)
    found = find_fatal(text.splitlines(), now)
    print("\n".join(found) or "no fatal Xid")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
