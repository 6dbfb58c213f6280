"""Launchers that another program has started side by side, and that nothing makes one job."""

from __future__ import annotations

import os

import pytest

from elastic_run.cli import make_config as config
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.cli.request import _OF_SCHEDULERS
from elastic_run.schedulers.derivation import STARTERS
from tests.support.slurm_variables import STEP, complete_from_cluster

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"}


def notices(
    words: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, object], list[str]]:
    """Return the values that follow from an environment, and what is told."""
    monkeypatch.setattr(config, "_DRIVERS", ())
    monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: None)
    parser = LauncherArgumentParser(FLAGS)
    args = parser.parse_args(words.split())
    before = dict(vars(args))
    told = complete_from_cluster(args, environ, parser.origins)
    return {name: value for name, value in vars(args).items() if value != before[name]}, told


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ("train.py", {"OMPI_COMM_WORLD_SIZE": "1"}),
        ("train.py", {"OMPI_COMM_WORLD_SIZE": "many"}),
        ("train.py", {"SM_HOSTS": '["algo-1"]'}),
        ("train.py", {"SM_HOSTS": "[]"}),
        ("train.py", {"PMI_SIZE": "8"}),  # srun's own variables
        ("--standalone train.py", OPEN_MPI),
        ("--nnodes=2 --node-rank=1 --master-addr=h train.py", OPEN_MPI),
        ("--nnodes=8 --rdzv-backend=c10d --rdzv-endpoint=h:1 --rdzv-id=j train.py", OPEN_MPI),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py", OPEN_MPI),
        ("--nnodes=2 train.py", OPEN_MPI),
        ("train.py", {**OPEN_MPI, "TORCHELASTIC_RUN_ID": "outer"}),
    ],
)
def test_nothing_is_told_where_it_is_one_or_somebody_chose(
    words: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, a rendezvous, several nodes and --standalone are what the user wants."""
    assert notices(words, environ, monkeypatch) == ({}, [])


def test_a_task_that_srun_has_started_itself_belongs_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of MPI leak into a step that a program of mpirun starts; Slurm's number of the process tells."""
    environ = {**STEP, **OPEN_MPI, "SLURM_TASK_PID": str(os.getpid())}
    values, told = notices("train.py", environ, monkeypatch)
    assert (values["nnodes"], told) == ("3", [])


def test_all_variables_of_schedulers_are_looked_for() -> None:
    """A launcher looks at schedulers only if one of these variables is there."""
    assert {*STARTERS.values()} < {*_OF_SCHEDULERS}
