"""A worker that is denied a file: the report names the part of the path that denies it."""

from __future__ import annotations

import getpass
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.launch import UNPRIVILEGED, clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_directory_that_denies_is_named(worker: Callable[[str], Path], tmp_path: Path) -> None:
    """The path in the exception is long, and the directory that may not be entered is not its last one."""
    denying = tmp_path / "data"
    (denying / "checkpoints").mkdir(parents=True)
    path = worker(f"open({str(denying / 'checkpoints' / 'model.pt')!r})")
    denying.chmod(0)
    try:
        command = [*UNPRIVILEGED, sys.executable, "-m", "elastic_run", str(path)]
        ended = subprocess.run(
            command, check=False, capture_output=True, text=True, env=clean_environment(), timeout=60
        )
    finally:
        denying.chmod(0o700)
    assert ended.returncode == 1
    told = f"a directory (d--------- {getpass.getuser()}) may not be entered: '{denying}'"
    assert told in " ".join(ended.stderr.split()), ended.stderr
