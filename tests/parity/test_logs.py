"""Where output goes: `Std`, `DefaultLogsSpecs`, and plug-ins of `--logs-specs` derived from torch's classes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs as TorchLogsSpecs
from torch.distributed.elastic.multiprocessing import Std as TorchStd

from elastic_run.multiprocessing import DefaultLogsSpecs, Std
from tests.support.programs import write_plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.launch import Launch


# --- classes ---------------------------------------------------------------------------------------------------------
def environments(count: int, *, run_id: str = "job", restarts: int = 0) -> dict[int, dict[str, str]]:
    """Return workers' environments as far as logs need them."""
    return {rank: {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(restarts)} for rank in range(count)}


@pytest.mark.parametrize("value", ["0", "1", "2", "3", "0:3", "0:3,1:0,2:1,3:2"])
def test_std_reads_what_torch_reads(value: str) -> None:
    """Every value that torch accepts means the same here."""
    ours, torchs = Std.from_str(value), TorchStd.from_str(value)
    plain = {rank: int(std) for rank, std in torchs.items()} if isinstance(torchs, dict) else int(torchs)
    assert ({rank: int(std) for rank, std in ours.items()} if isinstance(ours, dict) else int(ours)) == plain


def relative(paths: dict[int, str], base: str) -> dict[int, str]:
    """Return paths below a log directory without its random part."""
    return {rank: re.sub(r"job_[\w-]+", "job", path.replace(base, "")) for rank, path in paths.items()}


@pytest.mark.parametrize("local_ranks", [None, {0}, {1, 2}])
@pytest.mark.parametrize(("redirects", "tee"), [(0, 0), (3, 0), (0, 3), (1, 2), (2, 1)])
def test_layout_is_torchs(tmp_path: Path, redirects: int, tee: int, local_ranks: set[int] | None) -> None:
    """With a log directory every stream of every rank goes where torch sends it."""
    ours_at, torchs_at = str(tmp_path / "ours"), str(tmp_path / "torchs")
    ours_env, torchs_env = environments(3), environments(3)
    ours = DefaultLogsSpecs(ours_at, Std(redirects), Std(tee), local_ranks).reify(ours_env)
    torchs = TorchLogsSpecs(torchs_at, TorchStd(redirects), TorchStd(tee), local_ranks).reify(torchs_env)
    for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"):
        assert relative(getattr(ours, name), ours_at) == relative(getattr(torchs, name), torchs_at), name
    names = ("filtered_stdout", "filtered_stderr")
    assert relative({0: getattr(ours, names[0])}, ours_at) == relative({0: getattr(torchs, names[0])}, torchs_at)
    assert relative({0: getattr(ours, names[1])}, ours_at) == relative({0: getattr(torchs, names[1])}, torchs_at)
    errors = {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in ours_env.items()}
    assert errors == ours.error_files
    assert all(Path(path).parent.is_dir() for path in errors.values())


def test_nowhere() -> None:
    """The log directory /dev/null means no files, and redirects and tee count for nothing, as with torch."""
    env, torchs_env = environments(2), environments(2)
    ours = DefaultLogsSpecs(os.devnull, Std.ALL, Std.ALL).reify(env)
    torchs = TorchLogsSpecs(os.devnull, TorchStd.ALL, TorchStd.ALL).reify(torchs_env)
    for name in ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"):
        assert getattr(ours, name) == getattr(torchs, name), name
    assert env == torchs_env


def test_equality_and_text_are_torchs(tmp_path: Path) -> None:
    """Specifications are equal by value, and print as torch's do."""
    ours, torchs = (kind(str(tmp_path), local_ranks_filter={1}) for kind in (DefaultLogsSpecs, TorchLogsSpecs))
    assert ours == DefaultLogsSpecs(str(tmp_path), local_ranks_filter={1})
    assert ours != DefaultLogsSpecs(str(tmp_path))
    assert ours != torchs
    assert repr(ours) == repr(torchs)
    assert ours.root_log_dir == torchs.root_log_dir


# --- --logs-specs ----------------------------------------------------------------------------------------------------
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["own", "default", pytest.param("derived", marks=pytest.mark.soak)])
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
