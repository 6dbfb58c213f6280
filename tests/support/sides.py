"""One program under torch's modules and under ours, so that a test can compare what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.support.launch import clean_environment
from tests.support.torchrun import with_hosts_file, write_hosts_file

if TYPE_CHECKING:
    from pathlib import Path

#: What a program sees in front of its own lines: `get` imports a module of torch's launcher, of torch or of ours.
_PROLOGUE = """
import importlib, json, os, sys
SIDE = sys.argv[1]
def get(path):
    if SIDE == "ours":
        from elastic_run.compat.paths import PATHS
        path = PATHS[path]
    return importlib.import_module(path)
def tell(*values):
    print(json.dumps(values), flush=True)
"""


def run_on(side: str, program: str, tmp_path: Path, *, env: dict[str, str] | None = None) -> list[Any]:
    """Run a program that imports torch's launching modules by `get` and prints its findings by `tell`.

    Args:
        side: `torch` or `ours`.
        program: Python lines; workers that import the file must find their functions below no `main` guard.
        tmp_path: Where the program file is put.
        env: Variables on top of a clean environment.

    Returns:
        What it told, a list of values for each call.
    """
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
