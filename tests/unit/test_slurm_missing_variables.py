"""A task of Slurm that lacks some variables of its step is refused, if it is seen to be one of several."""

from __future__ import annotations

import pytest

from elastic_run.cli.cluster_values import complete_from_cluster
from elastic_run.cli.slurm_step import derive_from_step
from elastic_run.cluster.slurm import find_step
from elastic_run.errors import UsageError
from elastic_run.run import parse_args
from tests.support.slurm_variables import HOST, STEP

ALONE = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"]
)
def test_a_task_that_lacks_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If Slurm's daemon shows the step, nothing excuses the gap: each task would train a model of its own."""
    environ = {**STEP, "SLURM_NTASKS": "3"}
    del environ[name]
    monkeypatch.setattr("elastic_run.cluster.slurm.read_running_step", lambda: "41.2")
    with pytest.raises(UsageError, match=f"^{name}: is not set, but SLURM_STEP_.*: start with srun, .*--standalone "):
        complete_from_cluster(parse_args(["train.py"]), environ)
    assert complete_from_cluster(parse_args(["--standalone", "train.py"]), environ) == []
    assert complete_from_cluster(parse_args(["--nnodes=3", "--master-addr=a7", "train.py"]), environ) == []
    alone = {**environ, "SLURM_NTASKS": "1", **({} if name == "SLURM_STEP_NUM_TASKS" else ALONE)}
    alone.pop(name, "")
    assert find_step(alone, HOST) is None
    bare = {key: value for key, value in environ.items() if not key.startswith("SLURM_STEP_")}
    assert find_step({**bare, "SLURM_PROCID": ""}, HOST) is None
    for running in ("", "41.batch", "41.interactive", None):
        monkeypatch.setattr("elastic_run.cluster.slurm.read_running_step", lambda running=running: running)
        assert find_step(environ, HOST) is None


@pytest.mark.parametrize(
    ("words", "nodes", "told"),
    [("train.py", "3", "2 other nodes"), ("--nnodes=2 train.py", "3", ""), ("train.py", None, "")],
)
def test_a_shell_of_srun_is_told_of_nodes_that_are_not_used(
    monkeypatch: pytest.MonkeyPatch, words: str, nodes: str | None, told: str
) -> None:
    """Only by a job on one node, and only if Slurm says how many there are."""
    monkeypatch.setattr("os.isatty", lambda _: True)
    environ = {"SLURM_PTY_PORT": "7"} | ({} if nodes is None else {"SLURM_JOB_NUM_NODES": nodes})
    notices = derive_from_step(parse_args(words.split()), environ, (), names_place=False).notices
    assert (len(notices), told in "".join(notices)) == (bool(told), True)
