"""Wrong set-ups on clusters: the real command refuses each at once, in one line that names the mend."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.launch import clean_environment
from tests.support.slurm_variables import task_of
from tests.support.wait import stretched

ROOT = Path(__file__).parents[3]
_HOST = os.uname().nodename
#: Seconds on a quiet machine; a refusal that waits for others would take minutes.
_AT_ONCE = 1.0
_STEP = {
    "SLURM_JOB_ID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": f"{_HOST},b,c",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
}
_POD = {"JOB_COMPLETION_INDEX": "4"}
_PODS = {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "3"}
_MEET = "--nnodes=2 --rdzv-id=a --rdzv-backend=c10d"


class Setup(NamedTuple):
    """A wrong set-up.

    Attributes:
        name: For the test's name.
        flags: Of the command.
        environ: Variables beside those of a clean environment.
        what: Part of the line: what is wrong.
        mend: Part of the line: what to give.
    """

    name: str
    flags: str
    environ: dict[str, str]
    what: str
    mend: str


SETUPS = [
    Setup(
        "four-launchers-per-node", "", {**_STEP, "SLURM_STEP_NUM_TASKS": "12"}, "12 tasks on its 3", "srun --ntasks=3"
    ),
    Setup("one-node-in-a-step-of-three", "--nnodes=1", _STEP, "the Slurm step has 3 nodes", "leave --nnodes out"),
    Setup("more-nodes-than-the-step", "--nnodes=5", _STEP, "the Slurm step has 3 tasks", "leave --nnodes out"),
    Setup(
        "each-node-of-the-step-meets-itself",
        "--nnodes=3 --rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint=localhost:29400",
        _STEP,
        "--rdzv-endpoint: localhost leads each node of the Slurm step to itself",
        "leave --rdzv-endpoint out",
    ),
    Setup(
        "each-node-of-an-elastic-step-meets-itself",
        "--nnodes=1:3 --rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint=[::1]:29400",
        _STEP,
        "--rdzv-endpoint: ::1 leads each node",
        f"--rdzv-endpoint={_HOST}:29400",
    ),
    Setup(
        "each-node-of-the-step-is-the-master",
        "--master-port=29500",
        _STEP,
        "--master-addr: 127.0.0.1 leads each node of the Slurm step to itself",
        f"--master-addr={_HOST}",
    ),
    Setup(
        "each-pod-meets-itself",
        "--rdzv-backend=c10d --rdzv-id=a --rdzv-endpoint=127.0.0.1:29400",
        _PODS,
        "--rdzv-endpoint: 127.0.0.1 leads each pod of the Job to itself",
        "leave --rdzv-endpoint out",
    ),
    Setup(
        "node-names-that-are-none",
        "",
        {**_STEP, "SLURM_STEP_NODELIST": f"{_HOST},b:1,c"},
        f"error: SLURM_STEP_NODELIST={_HOST},b:1,c: --rdzv-endpoint: ",
        "'b:1' is not a host name, an IPv4 or an [IPv6] address",
    ),
    Setup(
        "index-that-is-no-number",
        "--nnodes=2",
        {"JOB_COMPLETION_INDEX": "$(INDEX)"},
        "error: JOB_COMPLETION_INDEX: '$(INDEX)' is not a whole number",
        "remove it from the pod template's env",
    ),
    Setup("pods-without-number", "", _POD, "this is pod 4 of an indexed Job", "set PET_NNODES"),
    Setup("pod-beyond-the-number", "", {**_POD, "PET_NNODES": "4"}, "this is pod 4 of its Job", "Job's completions"),
    Setup(
        "pod-with-a-foreign-name", "", {**_POD, "PET_NNODES": "5"}, "does not end with -4", "--rdzv-endpoint=HOST:PORT"
    ),
    Setup("rank-beyond-the-number", "--nnodes=2 --node-rank=2 --master-port=1", {}, "2 is not below", "--nnodes=2"),
    Setup("rank-missing", "--nnodes=2 --node-rank=-1 --master-port=1", {}, "'-1' is not", "from 0 up"),
    Setup(
        "rank-not-given",
        "--nnodes=2 --master-addr=192.0.2.1 --master-port=1",
        {},
        "192.0.2.1 is no address of this machine",
        "give --node-rank=1",
    ),
    Setup("rank-of-a-template", "--nnodes=2", {"PET_NODE_RANK": "$(RANK)"}, "PET_NODE_RANK", "from 0 up"),
    Setup("no-id", "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:1 --rdzv-id=", {}, "is empty", "the same id"),
    Setup("no-endpoint", "--nnodes=2 --rdzv-backend=etcd-v3", {}, "--rdzv-endpoint: is needed", "HOST:PORT"),
    Setup("no-address", f"{_MEET} --rdzv-endpoint=h:1,", {}, "names an empty endpoint", "--rdzv-endpoint"),
    Setup("any-port", f"{_MEET} --rdzv-endpoint=h:0,i:1", {}, "'h:0'", "port 0 is any port"),
    Setup("one-place-twice", f"{_MEET} --rdzv-endpoint=h:1,h:1", {}, "h:1 is listed twice", "--rdzv-endpoint"),
    Setup("no-configuration-file", "", {"PET_CONFIG": "none.toml"}, "error: PET_CONFIG: 'none.toml'", "no such file"),
    Setup("no-token", "", {"PET_RDZV_TOKEN_FILE": "/none", "PET_NNODES": "2"}, "error: PET_RDZV_TOKEN_FILE", "/none"),
    Setup("alone-with-two-nodes", "--standalone --nnodes=2", {}, "--standalone: is for one node", "--nnodes=2"),
    Setup(
        "unknown-backend", "--rdzv-backend=c10b --rdzv-endpoint=h:1", {}, "'c10b' is none of", "did you mean 'c10d'?"
    ),
    Setup("most-below-least", "", {"PET_NNODES": "4:2"}, "PET_NNODES: '4:2' is not", "1 <= MIN <= MAX"),
    Setup("misspelt-flag", "--rdzv-endpiont=h:1", {}, "--rdzv-endpiont", "--rdzv-endpoint"),
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_a_wrong_setup_is_refused_at_once_with_its_mend(tmp_path: Path, setup: Setup) -> None:
    """Exit code 2 and one line, within a second: nothing was started, nobody was waited for."""
    (tmp_path / "train.py").write_text("raise SystemExit('started')", encoding="utf-8")
    # Variables of a step are believed in a task of it.
    task = task_of("4.0") if "SLURM_STEP_ID" in setup.environ else ()
    command = [*task, sys.executable, "-m", "elastic_run", *setup.flags.split(), "train.py"]
    env = clean_environment({**setup.environ, "PYTHONPATH": str(ROOT)})
    start = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    seconds = time.monotonic() - start
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, ""), line
    assert setup.what in line, line
    assert setup.mend in line, line
    assert seconds < stretched(_AT_ONCE)
