"""A health check: no NVIDIA GPU of this node waits for a reset, a reboot or a drain.

    elastic-run --health-check="python examples/health/nvml_recovery.py" --health-check-timeout=30 ...

Drivers from release 570 on tell the recovery action of each GPU: None, Reset, Reboot, Drain P2P or Drain and Reset.
An older driver prints an error about the unknown field; then only the answer itself is checked. nvidia-smi hangs where
the driver is stuck: --health-check-timeout ends it, and the check counts as failed.
"""

from __future__ import annotations

import subprocess
import sys

HEALTHY = ("none", "[n/a]", "n/a", "")
QUERY = ["nvidia-smi", "--query-gpu=index,gpu_recovery_action", "--format=csv,noheader"]


def find_actions(output: str) -> list[str]:
    """Return a sentence for each GPU that needs an action, from lines such as `0, Reset`."""
    rows = [line.partition(",") for line in output.splitlines() if line.strip()]
    needs = [(index.strip(), action.strip()) for index, _, action in rows]
    return [f"GPU {index} needs: {action}" for index, action in needs if action.lower() not in HEALTHY]


def main() -> bool:
    """Ask the driver."""
    done = subprocess.run(QUERY, capture_output=True, text=True, check=False)
    if "not a valid field" in done.stdout + done.stderr:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        print(f"this driver tells no recovery action; it answers with code {done.returncode}")
        return done.returncode != 0
    if done.returncode:
        print(f"nvidia-smi ended with code {done.returncode}: {(done.stdout + done.stderr).strip()}")
        return True
    found = find_actions(done.stdout)
    print("\n".join(found) or "no GPU needs a recovery action")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
