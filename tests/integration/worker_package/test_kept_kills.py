"""--keep-state where processes are killed: no step is lost, and what is torn, damaged or mixed is never loaded."""

from __future__ import annotations

import json
import os
import secrets
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.worker_package.test_kept_state import TRAIN, WARM, read_losses

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Worker

#: Saves states whose numbers are all the step, while a thread kills the worker at a random moment.
TORN = """
import os, random, signal, sys, threading, time, torch
import torch.distributed as dist
from elastic_run.worker import KeptState
restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
def kill_in_a_moment():
    if restart < int(sys.argv[1]):
        delay = random.Random(f"{sys.argv[2]} {restart} {rank}").uniform(0.02, 0.2)
        kill = lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL))
        threading.Thread(target=kill, daemon=True).start()
if restart % 2:  # in the restore, else in a save
    kill_in_a_moment()
dist.init_process_group("gloo")
model = torch.nn.Linear(512, 512, bias=False)
kept = KeptState(model=model)
step = kept.restore() or 0
values = model.weight.unique()
whole = step == 0 or (len(values) == 1 and int(values[0]) == step)
os.write(1, f"{'whole' if whole else 'torn'} {restart} {step}\\n".encode())
begun = step
while step < 10 ** 9 and (restart < int(sys.argv[1]) or step % 20):
    step += 1
    with torch.no_grad():
        model.weight.fill_(step)
    kept.save(step)
    if restart % 2 == 0 and step == begun + 2:  # the first of the two saves is whole on both ranks
        kill_in_a_moment()
dist.destroy_process_group()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("steps", "kills"),
    [pytest.param(30, 3, marks=pytest.mark.long), pytest.param(500, 20, marks=pytest.mark.soak)],
)
def test_a_killed_worker_loses_no_step(launch: Launch, worker: Worker, tmp_path: Path, steps: int, kills: int) -> None:
    """Losses of a job with kills before and after a save are bit by bit those of an undisturbed one."""
    program = worker(TRAIN)
    memory = ("--nproc-per-node=2", WARM, "--keep-state=16MB")
    flags = (*memory, f"--max-restarts={kills}", "--max-backoff=0", f"--events-file={tmp_path / 'events.jsonl'}")
    # Each other worker dies behind a save, the others before it: then one step is trained again.
    at = [steps * (number + 1) // (kills + 1) for number in range(kills)]
    deaths = [f"{number}:{number % 2}/{'' if number % 4 < 2 else '-'}{step}" for number, step in enumerate(at)]
    job = launch(*flags, program, str(tmp_path / "killed"), ",".join(deaths), f"{steps}")
    assert job.wait_exit(deadline=60 + 5 * kills) == 0, job.stderr[-3000:]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    found = [event["kept_state"] for event in events if event["event"] == "workers_started"]
    assert found == [None, *(f"{step - (number % 4 >= 2)}" for number, step in enumerate(at))]
    assert launch(*memory, program, str(tmp_path / "calm"), "", f"{steps}").wait_exit(deadline=100) == 0
    assert read_losses(tmp_path / "killed") == read_losses(tmp_path / "calm")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [pytest.param(10, marks=pytest.mark.long), pytest.param(200, marks=pytest.mark.soak)])
def test_a_torn_state_is_never_loaded(launch: Launch, worker: Worker, kills: int) -> None:
    """Workers that are killed at any moment of a save or restore go on from a state that is whole on all ranks."""
    flags = ("--nproc-per-node=2", WARM, f"--max-restarts={kills}", "--max-backoff=0", "--keep-state=16MB")
    job = launch(*flags, "--monitor-interval=0.1", worker(TORN), str(kills), secrets.token_hex(4))
    assert job.wait_exit(deadline=60 + 3 * kills) == 0, job.stderr[-3000:]
    assert "torn" not in job.stdout
    begun = [line.split() for line in job.stdout.splitlines() if line.startswith("whole")]
    steps = {restart: {step for _, each, step in begun if each == restart} for _, restart, _ in begun}
    assert all(len(each) == 1 for each in steps.values()), steps
    assert int(max(steps[f"{kills}"])) > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [pytest.param(10, marks=pytest.mark.long), pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("what", ["save", "flush"])
def test_what_a_kill_leaves_is_whole(launch: Launch, tmp_path: Path, what: str, kills: int) -> None:
    """Ranks, servers of copies and writers of checkpoints die at any moment; see `tests.support.kept_lives`."""
    program = (sys.executable, "-m", "tests.support.kept_lives")
    seed = os.environ.get("KEPT_SEED") or secrets.token_hex(4)
    lives = launch(what, seed, f"{kills}", tmp_path, program=program)
    assert lives.wait_exit(deadline=30 + kills) == 0, f"KEPT_SEED={seed}\n{lives.stdout[-3000:]}{lives.stderr[-3000:]}"
