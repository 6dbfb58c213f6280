"""What pip gets from this repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import elastic_run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(directory),
        str(ROOT),
    ]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(directory.glob("*.whl")))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Every module is in the wheel, typed, and neither tests nor tools are."""
    names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "elastic_run").rglob("*.py")}
    assert modules <= names
    assert "elastic_run/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {
        "elastic_run",
        "elastic-run-compat.pth",
        f"elastic_run-{elastic_run.__version__}.dist-info",
    }
    # Only beside the package does Python read it.
    assert not [name for name in names if name.endswith("/elastic-run-compat.pth")]


def test_the_wheel_has_the_console_script_and_the_licence(wheel: zipfile.ZipFile) -> None:
    """`elastic-run` is installed as a command, and the licence travels along."""
    metadata = f"elastic_run-{elastic_run.__version__}.dist-info"
    assert "elastic-run = elastic_run.__main__:main" in wheel.read(f"{metadata}/entry_points.txt").decode()
    assert "BSD 3-Clause" in wheel.read(f"{metadata}/licenses/LICENSE").decode()


def test_the_console_script_and_the_module_are_one() -> None:
    """`elastic-run --version` and `python -m elastic_run --version` say the same."""
    script = Path(sys.executable).with_name("elastic-run")
    answers = {
        subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
        for command in ([str(script)], [sys.executable, "-m", "elastic_run"])
    }
    assert len(answers) == 1
    assert elastic_run.__version__ in answers.pop()
