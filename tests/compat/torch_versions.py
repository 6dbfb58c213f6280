"""Hold our store's server against other releases of torch.

Run by a person, once per release of ours:

    python -m venv /tmp/torch-2.6 && /tmp/torch-2.6/bin/pip install torch==2.6.0 numpy
    python -m tests.compat.torch_versions /tmp/torch-2.6/bin/python [another python…]

For each interpreter, its torch's own client performs every operation that it knows (`store_operations`) on torch's own
server and on ours, and two workers form ten process groups (`gloo_cycles`) over ours, with a prefix each. The lines
that differ are printed, and the exit code is 1 if there are any. `test_store_client` does it with the installed torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.support.store import LOOPBACK, ServedStore

_HERE = Path(__file__).parent
OPERATIONS = _HERE / "store_operations.py"
GLOO_CYCLES = _HERE / "gloo_cycles.py"
CYCLES = 10
_WORLD = 2
_DEADLINE = 120.0
_TORCH_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def perform_operations(python: str, port: int) -> list[str]:
    """Let a torch's client perform its operations."""
    done = subprocess.run(
        [python, str(OPERATIONS), str(port)], capture_output=True, text=True, timeout=_DEADLINE, check=False
    )
    if done.returncode != 0:
        message = f"{python} {OPERATIONS.name}: exit {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
        raise RuntimeError(message)
    return done.stdout.splitlines()


def perform_operations_on_torchs_server(python: str) -> list[str]:
    """Do the same on torch's own server, in a process of its own."""
    # Its server looks up every peer's name; this makes the resolver give up at once.
    env = {**os.environ, "RES_OPTIONS": "attempts:0"}
    with subprocess.Popen(
        [python, "-c", _TORCH_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    ) as server:
        assert server.stdout is not None
        try:
            return perform_operations(python, int(server.stdout.readline()))
        finally:
            server.kill()


def perform_gloo_cycles(
    python: str, port: int, *, prefix: str = "", cycles: int = CYCLES, use_agent_store: bool = True
) -> list[list[str]]:
    """Let two workers form process groups within one life."""
    env = {
        **os.environ,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(_WORLD),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(use_agent_store),
        "RES_OPTIONS": "attempts:0",
    }
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    [python, str(GLOO_CYCLES), str(cycles), prefix],
                    env={**env, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(_WORLD)
        ]
        try:
            outputs = [worker.communicate(timeout=_DEADLINE) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if any(worker.returncode for worker in workers):
        message = "\n".join(errors[-2000:] for _, errors in outputs)
        raise RuntimeError(message)
    return [output.splitlines() for output, _ in outputs]


def expected_sums(cycles: int = CYCLES) -> list[list[str]]:
    """Return what `perform_gloo_cycles` must give."""
    return [[str(1 + 2 * cycle) for cycle in range(cycles)]] * _WORLD


def check(python: str) -> bool:
    """Check one torch against our server and print what was found; returns whether all is well."""
    with ServedStore() as store:
        ours = perform_operations(python, store.port)
        unknown = store.unknown
    theirs = perform_operations_on_torchs_server(python)
    with ServedStore() as store:
        sums = perform_gloo_cycles(python, store.port, prefix="/worker/attempt_")
    differences = [
        f"  ours:    {our}\n  torch's: {their}" for our, their in zip(ours, theirs, strict=False) if our != their
    ]
    is_well = not differences and not unknown and len(ours) == len(theirs) and sums == expected_sums()
    print(f"{ours[0]}: {len(ours) - 1} operations, {len(differences)} differ, unknown {unknown}, gloo {len(sums[0])}")  # noqa: T201
    for difference in differences:
        print(difference)  # noqa: T201
    return is_well


if __name__ == "__main__":
    results = [check(python) for python in sys.argv[1:]]
    sys.exit(0 if all(results) else 1)
