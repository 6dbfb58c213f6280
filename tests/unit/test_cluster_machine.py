"""The scheduler's name of this machine, and the line that takes it out of use."""

from __future__ import annotations

import os

import pytest

from elastic_run.cluster.machine import describe_drain, find_machine_name

SLURM = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu7", "SLURM_TASK_PID": str(os.getpid())}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "worker-3"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (SLURM, "gpu7"),
        ({**SLURM, "SLURM_TASK_PID": "1", "SLURMD_NODENAME": os.uname().nodename}, os.uname().nodename),
        ({**SLURM, "SLURM_TASK_PID": "1"}, ""),  # leaked from another machine
        (POD, "worker-3"),
        ({"NODE_NAME": "built-in"}, ""),
        ({"SLURMD_NODENAME": "x"}, ""),
        ({}, ""),
    ],
)
def test_the_name_is_the_schedulers(environ: dict[str, str], name: str) -> None:
    """Variables that leaked, or that another program has set, name no machine."""
    assert find_machine_name(environ) == name
    assert bool(describe_drain(environ, "why")) == bool(name)


def test_the_command_of_slurm_is_one_that_a_shell_takes() -> None:
    """Quotes and lines of the reason are left out, and it is short."""
    line = describe_drain(SLURM, "it's \n $(bad) `x`; " + "y" * 200)
    command = "scontrol update nodename=gpu7 state=drain reason='elastic-run: it s (bad) x"
    assert command in line
    assert line.count("'") == 2
    assert len(line) < 220


def test_the_command_of_kubernetes_names_the_node() -> None:
    """A pod's node is cordoned by a person."""
    assert describe_drain(POD, "why").endswith("kubectl cordon worker-3")
