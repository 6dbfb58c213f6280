"""Running torchrun beside elastic-run, in a mount namespace where names resolve at once.

torch's store looks up the name of every peer, ``::1`` included, and stalls for seconds per connection where the
resolver is silent. A hosts file that knows ``::1`` cures that; it is laid over /etc/hosts in a namespace of the
program's own, so that the machine's stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.support.launch import clean_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: The launcher that we are compared with.
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def write_hosts_file(directory: Path) -> Path:
    """Write a hosts file that knows this host and loopback, IPv4 and IPv6."""
    path = directory / "hosts"
    names = dict.fromkeys(["localhost", socket.gethostname()])
    path.write_text("".join(f"127.0.0.1 {name}\n" for name in names) + "::1 localhost\n", encoding="ascii")
    return path


def with_hosts_file(command: Sequence[str], hosts: Path) -> list[str]:
    """Return the command line that runs a command with a hosts file of its own."""
    unshare = _unshare_command()
    if not unshare:
        return list(command)
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    return [*unshare, "sh", "-c", script, str(hosts), *command]


def _unshare_command() -> list[str]:
    unshare = shutil.which("unshare")
    if unshare is None:
        return []
    command = [unshare, "--mount"] if os.geteuid() == 0 else [unshare, "--mount", "--map-root-user"]
    is_allowed = subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0
    return command if is_allowed else []


# --- one program under torch's modules and under ours ----------------------------------------------------------------
#: What a program sees in front of its own lines: `get` imports a module of torch's launcher, of torch or of ours.
_PROLOGUE = """
import importlib, json, os, sys
SIDE = sys.argv[1]
def get(path):
    if SIDE == "ours":
        from elastic_run.compat.alias import PATHS
        path = PATHS[path]
    return importlib.import_module(path)
def tell(*values):
    print(json.dumps(values), flush=True)
"""


def run_on(side: str, program: str, tmp_path: Path, *, env: dict[str, str] | None = None) -> list[Any]:
    """Run a program that imports torch's launching modules by `get` and prints its findings by `tell`."""
    path = tmp_path / f"program_{side}.py"
    path.write_text(_PROLOGUE + program, encoding="utf-8")
    done = subprocess.run(
        with_hosts_file([sys.executable, str(path), side], write_hosts_file(tmp_path)),
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(env or {}),
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
