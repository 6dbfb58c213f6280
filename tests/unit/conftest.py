"""Settings of the property tests, and what several files of unit tests begin with."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.programs import no_timer_client, sleeper

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["no_timer_client", "place", "sleeper"]

# Machines are shared: how long an example takes to make or to run says nothing about the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory with some scripts, and in a clean environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_"))]:
        monkeypatch.delenv(name)
    for name in ("PYTHON_EXEC", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    (tmp_path / "shm.py").touch()
    (tmp_path / "tool").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "plain").write_text("", encoding="utf-8")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").touch()
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    (tmp_path / "application").mkdir()
    (tmp_path / "application/__main__.py").write_text("", encoding="utf-8")
    return tmp_path
