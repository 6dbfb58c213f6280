"""Interpreters in which torch's module paths may mean ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import elastic_run
from tests.support.launch import clean_environment

#: The file by which the variable acts; the wheel puts it beside the package.
PTH = Path(elastic_run.__file__).parent / "compat" / "elastic-run-compat.pth"
VARIABLE = "ELASTIC_RUN_COMPAT"
INSTALL = "import elastic_run.compat as compat; compat.install()\n"


def run(
    python: Path, *words: str, env: dict[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with these arguments, and wait for its end."""
    return subprocess.run(
        [str(python), *words],
        check=False,
        capture_output=True,
        text=True,
        env=clean_environment({VARIABLE: None} | (env or {})),
        cwd=cwd,
        timeout=100,
    )


def check(code: str) -> str:
    """Run code that must succeed with warnings as errors, and return what it printed."""
    done = run(Path(sys.executable), "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout
