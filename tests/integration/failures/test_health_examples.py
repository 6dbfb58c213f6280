"""The health checks of examples/health: what they make of a recorded kernel log, and of nvidia-smi's answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "health"
#: As dmesg shows it: an error of a program, an old fatal one, and a fresh fatal one.
LOG = """\
[    0.000000] Linux version 6.8.0
[  100.250000] NVRM: Xid (PCI:0000:5e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 9000.125000] NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault
[ 9100.500000] NVRM: Xid (PCI:0000:86:00): 48, pid=4242, name=python, An uncorrectable double bit error (DBE)
[ 9160.500000] eth0: link is up
"""


def check(name: str, *words: str | Path, path: str = "") -> tuple[int, str]:
    """Run a check; return its exit code and what it wrote."""
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *words], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_a_fatal_xid_of_the_last_hour_is_found(tmp_path: Path) -> None:
    """Only the fresh and fatal one counts, with its code, its GPU and its age."""
    log = tmp_path / "dmesg"
    log.write_text(LOG)
    assert check("xid.py", log) == (1, "Xid 48 of GPU PCI:0000:86:00, 60 s ago\n")
    log.write_text("".join(line for line in LOG.splitlines(keepends=True) if ": 48," not in line))
    assert check("xid.py", log) == (0, "no fatal Xid\n")


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("echo '0, None'; echo '1, None'", 0, "no GPU needs a recovery action\n"),
        ("echo '0, None'; echo '1, Reset'; echo '2, Reboot'", 1, "GPU 1 needs: Reset\nGPU 2 needs: Reboot\n"),
        ("echo 'No devices were found'; exit 6", 1, "nvidia-smi ended with code 6: No devices were found\n"),
        (
            "test $1 = -L && exit 0; echo 'Field \"gpu_recovery_action\" is not a valid field to query.'; exit 2",
            0,
            "this driver tells no recovery action; it answers with code 0\n",
        ),
    ],
    ids=["well", "sick", "no devices", "old driver"],
)
def test_a_gpu_that_needs_a_recovery_action_is_found(body: str, code: int, told: str, tmp_path: Path) -> None:
    """Each GPU that the driver wants to have reset is named; an older driver is only asked whether it answers."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    assert check("nvml_recovery.py", path=str(tmp_path)) == (code, told)
