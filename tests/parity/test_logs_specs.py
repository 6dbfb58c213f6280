"""`--logs-specs` with torch's own entry point and with plug-ins derived from torch's classes, under both launchers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.programs import write_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

_PLUGIN = """
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std


class Derived(DefaultLogsSpecs):
    "Replaces the hook, as plug-ins of sites do."

    def _make_log_dir(self, log_dir, rdzv_run_id):
        return super()._make_log_dir(os.path.join(log_dir, "site"), "run")


class Own(LogsSpecs):
    "Decides everything by itself, and by the classes that it knows."

    def reify(self, envs):
        os.makedirs(self.root_log_dir, exist_ok=True)
        tee = self._tee if isinstance(self._tee, Std) else "a map"
        with open(os.path.join(self.root_log_dir, "seen"), "a") as file:
            file.write(f"{tee!r} {sorted(map(repr, self._redirects.items()))} {self._local_ranks_filter}\\n")
        attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        paths = {rank: os.path.join(self.root_log_dir, f"{attempt}-{rank}.log") for rank in envs}
        none = dict.fromkeys(envs, "")
        return LogsDest(paths, none, paths, {}, none)

    @property
    def root_log_dir(self):
        return os.path.join(self._root_log_dir, "own")
"""

_FLAGS = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install a package with plug-ins that are derived from torch's classes."""
    names = {"derived": "site_logs:Derived", "own": "site_logs:Own"}
    write_plugin(tmp_path / "site", "site_logs", "torchrun.logs_specs", names, _PLUGIN)
    return tmp_path / "site"


def _files(directory: Path) -> dict[str, str]:
    """Return the files below a log directory with what they hold, names without their random parts."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = re.sub(r"[^/]+/attempt", "RUN/attempt", str(path.relative_to(directory)))
        # The report for programs is ours.
        if path.is_file() and path.name not in {"failure.json", "error.json", "events.jsonl"}:
            found[name] = path.read_text(encoding="utf-8")
    return found


#: The fields of the class up to torch 2.8.
_OLD_PLUGIN = """
import os
from types import SimpleNamespace
from elastic_run.multiprocessing import LogsSpecs

class Old(LogsSpecs):
    def reify(self, envs):
        none = dict.fromkeys(envs, "")
        tees = {rank: f"{os.environ['TEE']}{rank}" for rank in envs}
        return SimpleNamespace(stdouts=tees, stderrs=none, tee_stdouts=tees, tee_stderrs=none, error_files=none)

    root_log_dir = ""
"""


@pytest.mark.parametrize("filters", [(), ("--duplicate-stdout-filters=rank", "--duplicate-stderr-filters=rank")])
def test_logs_of_an_older_torch_name_no_filtered_files(filters: Sequence[str], launch: Launch, tmp_path: Path) -> None:
    """The classes of torch 2.4 to 2.8 have no fields for them: workers run, and tees are written."""
    write_plugin(tmp_path / "site", "old_logs", "torchrun.logs_specs", {"old": "old_logs:Old"}, _OLD_PLUGIN)
    env = {"PYTHONPATH": str(tmp_path / "site"), "TEE": str(tmp_path / "tee")}
    words = ("--standalone", "--nproc-per-node=2", "--logs-specs=old", *filters, "--no-python", "sh", "-c")
    job = launch(*words, "echo rank $RANK", env=env)
    assert job.wait_exit() == 0, job.stderr
    assert [(tmp_path / f"tee{rank}").read_text() for rank in range(2)] == ["rank 0\n", "rank 1\n"]


@pytest.mark.parametrize(
    "name", ["own", *(pytest.param(name, marks=pytest.mark.long) for name in ("default", "derived"))]
)
def test_logs_specs_of_torchs_classes_lay_out_the_same_files(
    name: str, site: Path, launch: Launch, launch_torchrun: Launch, tmp_path: Path
) -> None:
    """Each plug-in gets what it gets from torchrun, and the files and the tee'd lines are the same, over a restart."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "rank, first = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "os.write(1, f'rank {rank}\\n'.encode())\n"
        "if rank == '0': open(os.environ['WRITTEN'], 'w').close()\n"
        "while rank == '1' and not os.path.exists(os.environ['WRITTEN']): time.sleep(0.01)\n"
        "sys.exit(first and rank == '1')\n",
        encoding="utf-8",
    )
    seen = []
    for start, directory in ((launch_torchrun, tmp_path / "theirs"), (launch, tmp_path / "ours")):
        words = [*_FLAGS, f"--logs-specs={name}", f"--log-dir={directory}", "--tee=3", "--redirects=0:1", script]
        # Rank 1 fails when rank 0 has written its line: its end stops rank 0.
        job = start(*words, env={"PYTHONPATH": str(site), "WRITTEN": f"{directory}.written"})
        assert job.wait_exit(deadline=100) == 0, job.stderr
        seen.append((_files(directory), {line for line in job.stdout.splitlines() if "rank" in line}))
    assert seen[1] == seen[0]


def test_torchs_default_is_laid_out_without_torch(launch: Launch, tmp_path: Path) -> None:
    """The name `default` of torch's package means the default layout: the launcher doesn't import torch for it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text("print('there')\n", encoding="utf-8")
    words = ["--logs-specs=default", f"--log-dir={tmp_path / 'logs'}", "--tee=3", script]
    job = launch(*words, env={"PYTHONPATH": str(tmp_path)})
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == "[default0]:there\n"


def test_a_directory_that_a_plugin_cant_make_is_bad_input(launch: Launch, site: Path, tmp_path: Path) -> None:
    """A log directory that is a file ends with 2 and one line that names the flag, whichever class finds it out."""
    (tmp_path / "file").touch()
    for name in ("default", "derived"):
        job = launch(f"--logs-specs={name}", f"--log-dir={tmp_path / 'file'}", __file__, env={"PYTHONPATH": str(site)})
        assert job.wait_exit() == 2
        assert job.stderr.startswith("elastic-run: error: --log-dir: ")
        assert job.stderr.count("\n") == 1
