"""What schedulers are asked for: a stopped job again, by a scontrol that is a script here; a machine out of use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.schedulers.actions import describe_drain, find_machine_name, requeue_job

if TYPE_CHECKING:
    from pathlib import Path

#: Says what it was told to, and notes how it was called.
SCONTROL = """#!/bin/sh
echo "$@" >>"{calls}"
case $1 in
show) echo "JobId=42 JobName=x JobState={state} Reason=None Requeue={allowed}" ;;
requeue) echo "{answer}" >&2; exit {code} ;;
esac
"""


class Scontrol:
    """A stand-in for scontrol in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._calls = directory / "calls"
        self._path = directory / "scontrol"
        self.environ = {"PATH": str(directory), "SLURM_JOB_ID": "42", "SLURM_PROCID": "0"}

    def write(self, *, state: str = "RUNNING", answer: str = "", code: int = 0, allowed: int = 1) -> None:
        """Let it answer so."""
        text = SCONTROL.format(calls=self._calls, state=state, answer=answer, code=code, allowed=allowed)
        self._path.write_text(text, encoding="utf-8")
        self._path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """How it was called."""
        return self._calls.read_text(encoding="utf-8").splitlines() if self._calls.exists() else []


@pytest.fixture
def scontrol(tmp_path: Path) -> Scontrol:
    """A scontrol that says that the job runs."""
    stand_in = Scontrol(tmp_path)
    stand_in.write()
    return stand_in


def test_a_job_that_slurm_only_warned_is_requeued(scontrol: Scontrol) -> None:
    """The state is asked for first; the line counts."""
    assert requeue_job(scontrol.environ, 3) == (True, "the Slurm job 42 is requeued (1 of 3)")
    assert scontrol.calls == ["show job --oneliner 42", "requeue 42"]
    again = {**scontrol.environ, "SLURM_RESTART_COUNT": "2"}
    assert requeue_job(again, 3) == (True, "the Slurm job 42 is requeued (3 of 3)")


@pytest.mark.parametrize("more", [{"SLURM_PROCID": "1"}, {"SLURM_JOB_ID": ""}])
def test_only_the_first_task_of_a_slurm_job_asks(scontrol: Scontrol, more: dict[str, str]) -> None:
    """The others, and a launcher outside of Slurm, say and do nothing."""
    assert requeue_job({**scontrol.environ, **more}, 3) == (False, "")
    assert scontrol.calls == []


def test_the_number_of_requeues_has_a_limit(scontrol: Scontrol) -> None:
    """Slurm counts: an administrator's requeue counts too. A user who gave no number learns it here."""
    text = "the Slurm job 42 is not requeued: SLURM_RESTART_COUNT is 3, and --requeue=3 allows no more"
    assert requeue_job({**scontrol.environ, "SLURM_RESTART_COUNT": "3"}, 3) == (False, text)
    assert scontrol.calls == []


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "REQUEUED", "PREEMPTED"])
def test_a_job_about_which_slurm_has_decided_is_left_alone(scontrol: Scontrol, state: str) -> None:
    """Cancelled by a person, or requeued by Slurm itself: never twice."""
    scontrol.write(state=state)
    text = f"the Slurm job 42 is not requeued: Slurm says that it is {state}, so it was cancelled or is over"
    assert requeue_job(scontrol.environ, 3) == (False, text)
    assert scontrol.calls == ["show job --oneliner 42"]


def test_what_scontrol_says_against_it_is_told(scontrol: Scontrol, tmp_path: Path) -> None:
    """The exit code still asks for another run: a batch script may know how."""
    scontrol.write(answer="Requested operation is presently disabled\nfor job 42", code=1)
    text = "the Slurm job 42 is not requeued: scontrol says: Requested operation is presently disabled for job 42"
    assert requeue_job(scontrol.environ, 3) == (True, text)
    (tmp_path / "scontrol").write_text("#!/no/such/shell\n", encoding="utf-8")
    assert "No such file or directory" in requeue_job(scontrol.environ, 3)[1]


def test_a_job_that_may_not_be_requeued_is_told_so(scontrol: Scontrol) -> None:
    """Slurm's own command would be silent about it."""
    scontrol.write(allowed=0)
    text = "the Slurm job 42 is not requeued: its submission does not allow that (sbatch --requeue does)"
    assert requeue_job(scontrol.environ, 3) == (True, text)
    assert scontrol.calls == ["show job --oneliner 42"]


def test_without_scontrol_the_line_says_what_to_run(tmp_path: Path) -> None:
    """In a container there is often none."""
    text = "the Slurm job 42 is not requeued: there is no scontrol here; run: scontrol requeue 42"
    assert requeue_job({"PATH": str(tmp_path), "SLURM_JOB_ID": "42"}, 3) == (True, text)


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
