"""`--nproc-per-node` with the device of a package that torch loads by itself, under both launchers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import write_plugin

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch


#: A package such as torch_npu: its entry point names the device, and says how many there are.
_BACKEND = """
import os, types
import torch

def register():
    print("a package that talks while it is imported")
    if os.environ.get("SITE_BACKEND") == "broken":
        raise OSError("libnpu.so: cannot open shared object file")
    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("torch.npu")
    count = int(os.environ.get("SITE_DEVICES", "3"))
    module.is_available = lambda: count > 0
    module.device_count = lambda: count
    module.current_device = lambda: 0
    torch._register_device_module("npu", module)
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Install the package, and give the environment in which it is found."""
    write_plugin(tmp_path / "site", "site_npu", "torch.backends", {"site_npu": "site_npu:register"}, _BACKEND)
    return {"PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.long
def test_a_renamed_backend_s_devices_are_counted(site: dict[str, str], launch: Launch, launch_torchrun: Launch) -> None:
    """`npu` starts one worker for each device that the package tells of."""
    for start in (launch_torchrun, launch):
        job = start("--nproc-per-node=npu", "--no-python", "sh", "-c", "echo $WORLD_SIZE", env=site)
        assert job.wait_exit(deadline=60) == 0, job.stderr
        assert [line for line in job.stdout.splitlines() if line.isdigit()] == ["3"] * 3


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SITE_DEVICES": "0"}, "'npu', but no npu is available here; 'auto' counts CPUs instead"),
        pytest.param(
            {"SITE_BACKEND": "broken"},
            "'npu', but torch can't say how many there are: RuntimeError: Failed",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "'npu' is not a number from 1 up, nor auto, cpu, gpu or xpu, ",
            marks=pytest.mark.long,
        ),
    ],
    ids=["none", "broken", "off"],
)
def test_a_device_that_is_not_there_is_one_line(
    environment: dict[str, str], expected: str, site: dict[str, str], launch: Launch
) -> None:
    """A package without devices, with an error, or that torch doesn't load, is refused before anything is started."""
    job = launch("--nproc-per-node=npu", "--no-python", "true", env=site | environment)
    assert job.wait_exit(deadline=60) == 2
    (line,) = job.stderr.splitlines()
    assert line.startswith(f"elastic-run: error: --nproc-per-node: {expected}")


@pytest.mark.long
def test_auto_counts_them_where_there_is_no_gpu(site: dict[str, str], launch: Launch) -> None:
    """`auto` takes the package's devices before the CPUs, as torch's accelerator does."""
    job = launch(
        "--nproc-per-node=auto", "--no-python", "sh", "-c", "echo $WORLD_SIZE", env=site | {"SITE_DEVICES": "5"}
    )
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout.split() == ["5"] * 5


@pytest.mark.long
def test_a_program_that_has_renamed_it_is_asked_itself(site: dict[str, str], tmp_path: Path, launch: Launch) -> None:
    """Where the program has torch loaded, its own torch is asked, though no package is installed."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {site['PYTHONPATH']!r})\n"
        "import site_npu; site_npu.register()\n"
        "from elastic_run.run import determine_local_world_size\n"
        "print(determine_local_world_size('npu'))\n",
        encoding="utf-8",
    )
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "SITE_DEVICES": "2"}
    job = launch(str(program), program=(sys.executable,), env=env)
    assert job.wait_exit(deadline=60) == 0, job.stderr
    assert job.stdout.splitlines()[-1] == "2"
