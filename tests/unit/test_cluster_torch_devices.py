"""Devices that only torch knows: what the child process answers, and what its end means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.cluster import devices
from elastic_run.cluster.torch_devices import TorchUnavailableError, _ask_child

if TYPE_CHECKING:
    from pathlib import Path


def write_child(tmp_path: Path, script: str) -> str:
    """Return a program that stands for a Python with torch."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_last_marked_line_is_the_answer(tmp_path: Path) -> None:
    """Lines that torch's packages print don't matter; an empty answer means that torch doesn't know the name."""
    mark = "elastic-run devices: "
    child = write_child(tmp_path, f"echo hello; echo '{mark}2'; echo '{mark}8'; echo bye")
    assert _ask_child("npu", os.environ, child) == 8
    assert _ask_child("npu", os.environ, write_child(tmp_path, f"echo '{mark}'")) is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo broken >&2; exit 0", "broken"),
        ("echo 'elastic-run devices: 3'; echo 'lost library' >&2; exit 1", "lost library"),
        ("exit 3", "exit code 3"),
    ],
    ids=["no answer", "an answer before a failure", "no word"],
)
def test_a_torch_that_fails_gives_no_number(tmp_path: Path, script: str, reason: str) -> None:
    """Without an answer, or with a failure behind it, the last line of stderr is the reason."""
    with pytest.raises(TorchUnavailableError, match=f"^{reason}$"):
        _ask_child("npu", os.environ, write_child(tmp_path, script))


def test_no_device_of_a_package_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` counts 0 devices if torch knows none, or can't be asked."""
    monkeypatch.setattr(devices, "count_by_torch", lambda *_: None)
    assert devices._count_any_of_package({}, "python") == 0

    def refuse(*_: object) -> int:
        raise TorchUnavailableError

    monkeypatch.setattr(devices, "count_by_torch", refuse)
    assert devices._count_any_of_package({}, "python") == 0
