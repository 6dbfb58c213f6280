"""Command lines as scripts, job files, manifests and programs have them, through torchrun and through elastic-run.

The lines of tests/data/command_lines.txt have the flags, the order and the quotes that somebody has written, with other
names and values. Under both launchers each must give the same configuration and the same command of the workers. What
torchrun takes and elastic-run refuses stands in `REFUSED`, with the words of docs/migrating-from-torchrun.md about it.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch.distributed.launch
import torch.distributed.run

import elastic_run.launch
import elastic_run.launcher
import elastic_run.run
from elastic_run.cli import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TESTS = Path(__file__).parents[1]
_LINES = (_TESTS / "data" / "command_lines.txt").read_text(encoding="utf-8").splitlines()
ACCEPTED = [line for line in _LINES if line and not line.startswith("#")]

_NO_KEY = "`--rdzv-conf` with an unknown key"
_NO_RANK = "ranks that do not exist"
REFUSED = {
    "torchrun --nproc_per_node=8 --rdzv_conf 'overlap_timeout=600' train.py": _NO_KEY,
    "torchrun --standalone --nnodes=1 --nproc_per_node=1 --local-ranks-filter 0 --tee 0:3,1:3 train.py": _NO_RANK,
    "torchrun --nnodes=1 --node_rank=1 --master_addr=127.0.0.1 --master_port=29500 train.py": _NO_RANK,
}

_FIELDS = (
    *("min_nodes", "max_nodes", "nproc_per_node", "run_id", "role", "rdzv_endpoint", "rdzv_backend", "rdzv_configs"),
    *("max_restarts", "monitor_interval", "start_method", "log_line_prefix_template", "local_addr"),
    *("event_log_handler", "signals_to_handle", "duplicate_stdout_filters", "duplicate_stderr_filters"),
    *("virtual_local_rank", "shutdown_timeout"),
)
_UUID_LENGTH = 36


def launch_with_torchrun(line: str) -> dict[str, Any]:
    """Let torchrun come as far as `elastic_launch`, and describe what it would launch."""
    with mock.patch.object(torch.multiprocessing, "_set_thread_name"):  # the thread is this process's
        parsers = {"torchrun": torch.distributed.run.parse_args, "launch": torch.distributed.launch.parse_args}
        return _launch(line, parsers, torch.distributed.run.run, torch.distributed.run)


def launch_with_ours(line: str) -> dict[str, Any]:
    """Let elastic-run come as far as `elastic_launch`, and describe what it would launch."""
    with mock.patch.object(checks, "_check_program"):  # there is no such script
        parsers = {"torchrun": elastic_run.run.parse_args, "launch": elastic_run.launch.parse_args}
        return _launch(line, parsers, elastic_run.run.run, elastic_run.launcher)


def _launch(
    line: str, parsers: Mapping[str, Callable[[list[str]], Any]], run: Callable[[Any], None], home: object
) -> dict[str, Any]:
    launched: dict[str, Any] = {}

    def elastic_launch(config: object, entrypoint: object) -> Callable[..., None]:
        return lambda *args: launched.update(_describe(config), command=[entrypoint, *args])

    words = shlex.split(line)
    variables = [word for word in words if word.startswith("PET_")]
    front_door, *rest = words[len(variables) :]
    environ = dict(variable.split("=", 1) for variable in variables)
    with mock.patch.dict(os.environ, environ, clear=True), mock.patch.object(home, "elastic_launch", elastic_launch):
        run(parsers[front_door](rest))
        return {**launched, "threads": os.environ.get("OMP_NUM_THREADS")}


def _describe(config: Any) -> dict[str, Any]:
    """Return the settings of a job; of one node without a rendezvous of the user's, as torchrun describes it."""
    described = {name: getattr(config, name) for name in _FIELDS}
    if config.rdzv_backend == "local":
        described.update(rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    if len(config.run_id) == _UUID_LENGTH:
        described["run_id"] = "random"
    specs = config.logs_specs
    for name, streams in (("redirects", specs._redirects), ("tee", specs._tee)):
        described[name] = {k: int(v) for k, v in streams.items()} if isinstance(streams, dict) else int(streams)
    return {**described, "ranks": specs._local_ranks_filter}


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to an empty directory: log directories are made."""
    monkeypatch.chdir(tmp_path)


def test_both_launchers_start_the_same() -> None:
    """A command line that is in use gives the same configuration and the same command of the workers under both."""
    for line in ACCEPTED:
        ours, theirs = launch_with_ours(line), launch_with_torchrun(line)
        if "--standalone" in line and "--rdzv_id" in line:
            ours["run_id"] = "random"  # ours is the user's
        assert ours == theirs, line


@pytest.mark.parametrize("line", REFUSED)
def test_a_refused_command_line_is_documented(line: str) -> None:
    """A command line that only torchrun takes is one of those about which the docs tell users."""
    documented = _TESTS.parent / "docs" / "migrating-from-torchrun.md"
    assert REFUSED[line] in documented.read_text(encoding="utf-8")
    assert launch_with_torchrun(line)
    with pytest.raises(ValueError, match="--"):
        launch_with_ours(line)
