"""Devices on machines that this one isn't: NVIDIA, AMD, Intel, and those that only torch knows."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
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


UUIDS = [f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "abcd"]


def add_nvidia(root: Path, count: int, *, files: list[int] | None = None) -> str:
    """Write what the driver shows of GPUs, whose minor numbers run against their addresses."""
    for index in range(count):
        directory = root / f"proc/driver/nvidia/gpus/0000:{0x10 + index:02X}:00.0"
        directory.mkdir(parents=True)
        facts = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {UUIDS[index]}\nDevice Minor: \t {count - 1 - index}\n"
        (directory / "information").write_text(facts, encoding="ascii")
    (root / "dev").mkdir()
    for minor in range(count) if files is None else files:
        (root / f"dev/nvidia{minor}").touch()
    (root / "dev/nvidiactl").touch()
    return str(root)


MASKS = [
    (None, [0, 1, 2, 3]),
    ("", []),
    ("2,0", [2, 0]),
    (" 1 , 3 ", [1, 3]),
    ("-1", []),
    ("1,-1,2", [1]),
    ("0,9,1", [0]),
    ("NoDevFiles", []),
    ("1,1", []),
    ("GPU-bbbb,GPU-aaaa", [1, 0]),
    (UUIDS[3], [3]),
    ("GPU-", []),
    ("GPU-ffff", []),
    ("MIG-12345,MIG-6789", [None]),
    (f"MIG-{UUIDS[2]}/1/0", [2]),
]


@pytest.mark.parametrize(("mask", "expected"), MASKS)
def test_cuda_visible_devices_is_read_as_cuda_does(
    mask: str | None, expected: list[int | None], tmp_path: Path
) -> None:
    """Indices and beginnings of UUIDs count up to the first wrong one; a repeated one leaves none."""
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    found = devices.visible_gpus(environ, root=add_nvidia(tmp_path, 4))
    wanted = ["" if index is None else f"0000:{0x10 + index:02x}:00.0" for index in expected]
    assert [device.pci_address for device in found] == wanted


def test_in_a_container_the_device_files_count(tmp_path: Path) -> None:
    """Where the driver shows more GPUs than there are device files, those with a file are seen."""
    found = devices.find_nvidia(root=add_nvidia(tmp_path, 4, files=[3, 1]))
    assert [device.uuid for device in found] == [UUIDS[0], UUIDS[2]]


@pytest.mark.parametrize("allowed", [["nvidia2"], []])
def test_gpus_that_a_control_group_denies_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: list[str]
) -> None:
    """Slurm shows all files to a step without GPUs, and its control group denies them: the step has none."""
    root = add_nvidia(tmp_path, 4)
    monkeypatch.setattr("os.access", lambda path, _: path.rpartition("/")[2] in allowed)
    assert len(devices.find_nvidia(root=root)) == len(allowed)


def test_gpus_without_any_device_file_count(tmp_path: Path) -> None:
    """Before a program has used the GPUs there is no device file at all, and all of them count."""
    assert len(devices.find_nvidia(root=add_nvidia(tmp_path, 2, files=[]))) == 2


def test_device_files_without_a_driver_directory_count(tmp_path: Path) -> None:
    """Where only the device files are to be seen, each is a GPU whose place isn't known."""
    found = devices.find_nvidia(root=add_nvidia(tmp_path, 0, files=[0, 1, 2]))
    assert [device.pci_address for device in found] == ["", "", ""]


def test_the_list_of_nvidia_smi_is_read() -> None:
    """GPUs count, their MIG devices don't."""
    text = (
        f"GPU 0: NVIDIA A100 (UUID: {UUIDS[0]})\n"
        "  MIG 1g.5gb      Device  0: (UUID: MIG-1)\n"
        f"GPU 1: NVIDIA A100 (UUID: {UUIDS[1]})\n"
    )
    assert [device.uuid for device in devices.parse_nvidia_smi(text)] == UUIDS[:2]


def test_nvidia_smi_is_asked_where_no_file_lists_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under WSL; without the program, or if it fails, there is no GPU."""
    monkeypatch.setattr(devices, "_NVIDIA_SMI", ("nvidia-smi",))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices._ask_nvidia_smi() == []
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$*" = -L ] && echo "GPU 0: NVIDIA A100 (UUID: {UUIDS[0]})"\n')
    program.chmod(0o755)
    assert [device.uuid for device in devices._ask_nvidia_smi()] == UUIDS[:1]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert devices._ask_nvidia_smi() == []


def add_amd(root: Path, *, minors: list[int]) -> str:
    """Write a topology with one CPU and three GPUs."""
    rows = {0: (0, 0, 0), 1: (304, 128, 0x1100), 2: (304, 129, 0x2E03), 10: (304, 130, 0x0508)}
    for node, (simds, minor, location) in rows.items():
        directory = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        directory.mkdir(parents=True)
        facts = f"simd_count {simds}\ndrm_render_minor {minor}\nlocation_id {location}\ndomain 1\n"
        (directory / "properties").write_text(facts, encoding="ascii")
    (root / "dev/dri").mkdir(parents=True)
    for minor in minors:
        (root / f"dev/dri/renderD{minor}").touch()
    return str(root)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["0001:11:00.0", "0001:2e:00.3", "0001:05:01.0"]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["0001:05:01.0", "0001:11:00.0"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["0001:2e:00.3"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["0001:05:01.0"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "2,3,0"}, ["0001:05:01.0"]),
    ],
)
def test_amd_gpus_come_from_the_topology(environ: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    """Nodes with SIMD units and a device file are GPUs; both masks apply, the runtime's first."""
    root = add_amd(tmp_path, minors=[128, 129, 130])
    assert [device.pci_address for device in devices.visible_gpus(environ, root=root)] == expected


def test_an_amd_gpu_without_device_file_is_not_seen(tmp_path: Path) -> None:
    """A container sees the whole topology, and only its own device files."""
    assert len(devices.find_amd(root=add_amd(tmp_path, minors=[129]))) == 1


def add_intel(root: Path) -> str:
    """Write one integrated GPU, one card with two tiles, one with none, and somebody else's."""
    rows = {128: ("0000:00:02.0", "0x8086", 0), 129: ("0000:3a:00.0", "0x8086", 2), 130: ("0000:4d:00.0", "0x8086", 0)}
    for minor, (address, vendor, tiles) in (rows | {131: ("0000:5d:00.0", "0x10de", 0)}).items():
        device = root / f"sys/devices/pci/{address}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n", encoding="ascii")
        for tile in range(tiles):
            (device / f"tile{tile}").mkdir()
        (device / "tile_count").touch()
        card = root / f"sys/class/drm/renderD{minor}"
        card.mkdir(parents=True)
        (card / "device").symlink_to(device)
    return str(root)


@pytest.mark.parametrize(("mask", "expected"), [(None, 3), ("0,2", 2), ("", 0)])
def test_intel_tiles_are_devices(mask: str | None, expected: int, tmp_path: Path) -> None:
    """Each tile of a discrete card is a device, the GPU inside the processor is none."""
    environ = {} if mask is None else {"ZE_AFFINITY_MASK": mask}
    assert len(devices.visible_xpus(environ, root=add_intel(tmp_path))) == expected


BUILDS = [
    ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", {"cuda"}),
    ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\nxpu: Optional[str] = None\n", {"hip"}),
    ("cuda = None\nhip = None\nxpu = '20250'\n", {"xpu"}),
    ("cuda = None\nhip = None\n", set()),
]


@pytest.mark.parametrize(("text", "expected"), BUILDS)
def test_the_build_of_torch_is_read_from_its_version_file(text: str, expected: set[str], tmp_path: Path) -> None:
    """What torch was built for is known without importing it."""
    (tmp_path / "version.py").write_text(text, encoding="utf-8")
    assert devices.torch_build({}, str(tmp_path)) == frozenset(expected)


def test_the_build_of_another_interpreters_torch_is_not_known(tmp_path: Path) -> None:
    """With PYTHON_EXEC, or without a torch, nothing is known of it."""
    assert devices.torch_build({"PYTHON_EXEC": "/usr/bin/python3"}) is None
    assert devices.torch_build({}, str(tmp_path)) is None


@pytest.mark.parametrize("spec", [None, ModuleSpec("torch", None)], ids=["none", "a directory of that name"])
def test_without_a_torch_nothing_is_known_of_its_build(
    monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None
) -> None:
    """Nor where Python takes a directory for the package."""
    monkeypatch.setattr(PathFinder, "find_spec", lambda _: spec)
    assert devices.torch_build({}) is None


OTHER = {"PYTHON_EXEC": "/usr/bin/python3"}  # so that the torch installed here doesn't count


def test_gpus_are_counted_as_workers(tmp_path: Path) -> None:
    """Both gpu and auto mean one worker per visible GPU."""
    root = add_nvidia(tmp_path, 4)
    assert devices.device_count("gpu", OTHER, root=root) == 4
    assert devices.device_count("auto", OTHER | {"CUDA_VISIBLE_DEVICES": "1,2"}, root=root) == 2


def test_without_a_device_auto_takes_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both auto and cpu mean one worker per CPU where there is no device."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert devices.device_count("auto", OTHER, root=str(tmp_path)) == 3
    assert devices.device_count("cpu", OTHER, root=str(tmp_path)) == 3


@pytest.mark.parametrize(
    ("word", "environ", "why"),
    [
        ("gpu", {}, "no gpu is visible here; 'auto' counts CPUs instead"),
        ("gpu", {"CUDA_VISIBLE_DEVICES": ""}, "no gpu is visible here (CUDA_VISIBLE_DEVICES='')"),
        ("xpu", {}, "no xpu is visible here"),
    ],
)
def test_a_missing_device_is_refused(word: str, environ: dict[str, str], why: str, tmp_path: Path) -> None:
    """The line says that there is none, which variable may hide it, and that auto works."""
    with pytest.raises(devices.DeviceError) as raised:
        devices.device_count(word, OTHER | environ, root=str(tmp_path))
    assert str(raised.value).startswith(why)


def test_a_torch_without_cuda_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch built for CPUs only, a GPU of the machine doesn't count, as under torchrun."""
    root = add_nvidia(tmp_path, 4)
    monkeypatch.setattr(devices, "torch_build", lambda _: frozenset())
    with pytest.raises(devices.DeviceError, match="the installed torch is built without cuda and hip"):
        devices.device_count("gpu", {}, root=root)


@pytest.mark.parametrize(("build", "count"), [({"cuda"}, None), ({"xpu"}, 3)])
def test_only_a_torch_for_xpus_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: set[str], count: int | None
) -> None:
    """With another one `auto` takes the CPUs."""
    root = add_intel(tmp_path)
    monkeypatch.setattr(devices, "torch_build", lambda _: frozenset(build))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert devices.device_count("auto", {}, root=root) == (count or 2)
    if count is None:
        with pytest.raises(devices.DeviceError, match="the installed torch is built without xpu"):
            devices.device_count("xpu", {}, root=root)
    else:
        assert devices.device_count("xpu", {}, root=root) == count


# --- devices that only torch knows ------------------------------------------------------------------------------------
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
