"""Devices that only torch knows: what the child process answers, and what its end means."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elastic_run.cluster import devices, torch_devices
from elastic_run.cluster.torch_devices import (
    TorchUnavailableError,
    _ask_child,
    addresses_by_torch,
    count_by_torch,
    count_devices,
    has_backend_package,
    list_addresses,
)

if TYPE_CHECKING:
    from pathlib import Path


def write_child(tmp_path: Path, script: str) -> str:
    """Return a program that stands for a Python with torch."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_last_marked_line_is_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that torch's packages print don't matter; an empty answer means that torch doesn't know the name."""
    mark = "elastic-run devices: "
    child = write_child(tmp_path, f"echo hello; echo '{mark}2'; echo '{mark}8'; echo bye")
    assert _ask_child("npu", os.environ, child) == "8"
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(torch_devices, "has_backend_package", lambda *_: True)
    assert count_by_torch("npu", os.environ, write_child(tmp_path, f"echo '{mark}'"), []) is None
    child = write_child(tmp_path, f'echo "{mark}0000:0$#:00.0 ?"')
    assert addresses_by_torch(os.environ, child, []) == ["0000:02:00.0", "?"]


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


def test_the_devices_of_a_package_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no package has given, and a device that is not here, are refused in two sentences."""
    answers = {"npu": 8, "maia": 0, "gaudi": None}
    monkeypatch.setattr(devices, "count_by_torch", lambda word, *_: answers[word])
    assert devices.device_count("npu", {}) == 8
    with pytest.raises(devices.DeviceError, match="no maia is available here"):
        devices.device_count("maia", {})
    with pytest.raises(devices.UnknownDeviceError, match="'gaudi' is not a device"):
        devices.device_count("gaudi", {})


def test_a_package_with_a_backend_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """The user may turn such packages off."""
    for name, group in (("other", "console_scripts"), ("torch_npu", "torch.backends")):
        metadata = tmp_path / name / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:load\n")
    with_backend, without = str(tmp_path / "torch_npu"), [str(tmp_path / "other"), str(tmp_path / "none")]
    assert has_backend_package({}, [*without, with_backend])
    assert not has_backend_package({}, without)
    assert not has_backend_package({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, [with_backend])


class _Counter:
    """A module of torch's that counts devices."""

    def __init__(self, count: int) -> None:
        self._count = count

    def is_available(self) -> bool:
        """Whether there are some."""
        return self._count > 0

    def device_count(self) -> int:
        """Return how many there are; torch has no answer without one."""
        assert self._count
        return self._count


@pytest.mark.parametrize("count", [4, 0])
def test_torch_counts_the_devices_of_its_package(count: int) -> None:
    """`auto` means the accelerator, or the package's device in a torch before 2.6; other names are not known."""
    private = SimpleNamespace(_get_privateuse1_backend_name=lambda: "npu")
    torch = SimpleNamespace(_C=private, npu=_Counter(count), accelerator=_Counter(count and 2))
    assert count_devices(torch, "auto") == (count and 2)
    assert count_devices(torch, "npu") == count
    assert count_devices(torch, "gaudi") is None
    assert count_devices(SimpleNamespace(_C=private, npu=_Counter(count)), "auto") == count


def test_torch_tells_the_places_of_its_accelerator() -> None:
    """As torch's own binding reads them; a device that has none is told as such."""
    places = [SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=2), SimpleNamespace()]
    module = SimpleNamespace(get_device_properties=places.__getitem__)
    accelerator = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, current_accelerator=lambda: "npu")
    torch = SimpleNamespace(accelerator=accelerator, get_device_module={"npu": module}.__getitem__)
    assert list_addresses(torch) == ["0001:dc:02.0", "?"]
    assert list_addresses(SimpleNamespace()) == []
