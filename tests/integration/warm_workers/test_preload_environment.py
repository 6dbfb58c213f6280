"""Warm workers (`--preload`): what reads the environment at Python's own start, or when modules are imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.launch import ELASTIC_RUN
from tests.support.warm import SAYS_HOW

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched
    from tests.support.warm import Module

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

_ROOT = Path(__file__).parents[3]
_START_FILE = _ROOT / "elastic_run/compat/elastic-run-compat.pth"
_READ = "import builtins, os\nbuiltins.SEEN = os.environ.get('RANK')\n"
#: Says what Python's own start has seen, and the truth.
_SAYS_SEEN = "import builtins\nsay(builtins.SEEN == str(rank), 'json.tool' in sys.modules)\nsys.exit(attempt == 0)"
_READS = "it reads RANK, whose value differs from worker to worker"


@pytest.fixture
def interpreter(tmp_path: Path) -> tuple[Path, Path]:
    """Make an environment of Python that has elastic-run; return its interpreter and its directory of packages."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    shutil.copy(_START_FILE, packages)
    (packages / "_root.pth").write_text(f"{_ROOT}\n", encoding="utf-8")
    return home / "bin" / "python", packages


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"sitecustomize.py": _READ}, "sitecustomize"),
        ({"sitecustomize.py": "import cluster", "cluster.py": _READ}, "cluster"),
        ({"zz.pth": _READ.replace("\n", "; ")}, "zz.pth"),
    ],
    ids=["sitecustomize", "its module", "a later .pth"],
)
def test_a_rank_that_python_s_own_start_reads_is_right(
    files: dict[str, str], place: str, launch: Launch, worker: Worker, interpreter: tuple[Path, Path]
) -> None:
    """RANK that sitecustomize or a later .pth file has read is right in each worker and round; one line says why."""
    python, packages = interpreter
    # Debian's Python has a sitecustomize of its own, which comes before the one of an environment.
    first = packages.parent / "first"
    first.mkdir()
    for name, text in files.items():
        ((packages if name.endswith(".pth") else first) / name).write_text(text, encoding="utf-8")
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--min-uptime=0", "--preload=json.tool")
    job = launch(*flags, worker(_SAYS_SEEN), program=(str(python), *ELASTIC_RUN[1:]), env={"PYTHONPATH": str(first)})
    assert job.wait_exit() == 0, job.stderr
    assert set(job.stdout.splitlines()) == {"True False"}
    told = f"Python's own start can't be preloaded (sitecustomize, a .pth file): {_READS} (in {place})"
    assert [line for line in job.stderr.splitlines() if "--preload" in line] == [
        f"elastic-run: --preload: {told}: workers start cold"
    ]


def test_a_users_start_that_reads_nothing_of_the_workers_is_preloaded(
    launch: Launch, worker: Worker, interpreter: tuple[Path, Path]
) -> None:
    """Hooks that read other variables, before and after elastic-run's own, leave workers warm."""
    python, packages = interpreter
    (packages / "aa.pth").write_text("import os; os.environ.get('HOME'); print('once')\n", encoding="utf-8")
    body = "import os, subprocess\nsubprocess.run(['true'], env={**os.environ, 'LC_ALL': 'C'}, check=True)\n"
    (packages / "sitecustomize.py").write_text(body, encoding="utf-8")
    job = launch(
        "--preload=json.tool", worker(SAYS_HOW.replace("heavy", "json.tool")), program=(str(python), *ELASTIC_RUN[1:])
    )
    assert job.wait_exit() == 0, job.stderr
    assert [line for line in job.stdout.splitlines() if line != "once"] == ["warm 0 0"]
    assert "start cold" not in job.stderr


def test_what_python_s_own_start_leaves_open_is_told(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A connection that sitecustomize keeps isn't shared by all workers: the user is told, and they start cold."""
    (tmp_path / "sitecustomize.py").write_text("import socket\nkept = socket.socket()\n", encoding="utf-8")
    env = {"PYTHONPATH": f"{tmp_path}:{_ROOT}"}
    job = launch("--preload=json.tool", worker("say('json.tool' in sys.modules)"), env=env)
    assert job.wait_exit() == 0
    assert job.stdout == "False\n"
    assert "Python's own start can't be preloaded (sitecustomize, a .pth file): it leaves a socket open" in job.stderr


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"])
@pytest.mark.parametrize("read", ["os.environ.get({!r})", "{!r} in os.environ", "os.environb.get({!r}.encode())"])
def test_each_variable_of_a_worker_s_own_is_watched(
    name: str, read: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """A module that reads at import what only a worker has is named."""
    job = launch("--preload=heavy", worker(SAYS_HOW), env=module(f"import os\nvalue = {read.format(name)}"))
    assert job.wait_exit() == 0
    assert job.stdout == "cold 0 0\n"
    assert (
        f"heavy can't be preloaded: it reads {name}, whose value differs from worker to worker (in heavy)" in job.stderr
    )


@pytest.mark.parametrize(("flags", "how"), [((), "warm"), (("--virtual-local-rank",), "cold")])
def test_devices_are_a_worker_s_own_with_virtual_local_ranks(
    flags: tuple[str, ...], how: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """CUDA_VISIBLE_DEVICES may be read at import, unless each worker has its own."""
    env = module("import os\ndevices = os.environ.get('CUDA_VISIBLE_DEVICES')")
    job = launch("--preload=heavy", *flags, worker(SAYS_HOW), env=env)
    assert job.wait_exit() == 0
    assert job.stdout == f"{how} 0 0\n"
    assert ("it reads CUDA_VISIBLE_DEVICES, whose value differs from worker to worker" in job.stderr) == (how == "cold")


@pytest.mark.parametrize(
    "body",
    [
        "import subprocess\nsubprocess.run(['true'], env={**os.environ, 'LC_ALL': 'C'}, check=True)",
        "proxies = {name: value for name, value in os.environ.items() if name.endswith('_proxy')}",
        "os.environ['NEW'] = 'value'\ndel os.environ['NEW']",
        pytest.param("import torch, numpy, torch.utils.data, torch.distributed.fsdp, networkx", marks=pytest.mark.long),
    ],
)
def test_other_reads_of_the_environment_are_no_hazard(
    body: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """What goes through the environment at import, for a child of its own or for a few names, is preloaded."""
    job = launch("--preload=heavy", worker(SAYS_HOW), env=module(f"import os\n{body}"))
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "warm 0 0\n", job.stderr


def test_the_environment_is_itself_again_in_a_worker(launch: Launch, worker: Worker, module: Module) -> None:
    """Nothing watches a worker's own reads, and its copies are whole."""
    path = worker("say(os.environ.encodekey.__module__, dict(os.environ)['RANK'], *sorted(os.environ))")
    cold, warm = (launch(*flags, path, env=module("")) for flags in ((), ("--preload=heavy",)))
    assert [cold.wait_exit(), warm.wait_exit()] == [0, 0]
    assert warm.stdout == cold.stdout
    assert cold.stdout.startswith("os 0 ")
