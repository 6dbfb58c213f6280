"""Where output goes: `Std` and `DefaultLogsSpecs` beside torch's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs as TorchLogsSpecs
from torch.distributed.elastic.multiprocessing import Std as TorchStd

from elastic_run.multiprocessing import DefaultLogsSpecs, Std


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
