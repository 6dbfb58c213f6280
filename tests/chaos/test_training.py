"""Training on virtual hosts through faults, deaths and pauses: the short versions of this directory's commands."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chaos.deaths import Deaths, run
from tests.chaos.faults import FAULTS, draw_faults
from tests.chaos.job import Progress, Segment, audit
from tests.chaos.paused_coordinator import STORES, reproduce
from tests.chaos.story import Story, tell
from tests.chaos.strangers import run_jobs

if TYPE_CHECKING:
    from tests.support.launch import Launch


# --- faults that are drawn at random, and the audit; at length: make chaos, or python -m tests.chaos --help -----------
def write_books(directory: Path, life: str, steps: range, *, ranks: int) -> None:
    """Write what the ranks of a life would, two samples a step."""
    (directory / "books").mkdir(exist_ok=True)
    for rank in range(ranks):
        lines = [json.dumps({"step": step, "samples": [2 * step, 2 * step + 1][rank::ranks]}) + "\n" for step in steps]
        (directory / "books" / f"{life}.{rank}.jsonl").write_text("".join(lines))


def progress_of(*segments: Segment) -> Progress:
    """Return the progress of a checkpoint with such an ancestry."""
    return Progress(segments[-1].last, 1.0, segments[-1].life, segments[-1].ranks, segments)


def test_the_audit_sees_ranks_samples_and_steps_that_are_missing(tmp_path: Path) -> None:
    """Steps that a life did after its last checkpoint count once; what is missing, or there twice, is named."""
    write_books(tmp_path, "aa", range(13), ranks=1)
    write_books(tmp_path, "bb", range(10, 12), ranks=2)
    first, second = Segment("aa", 0, 10, 1), Segment("bb", 10, 12, 2)
    assert audit(progress_of(first, second), tmp_path, 2) == []
    assert audit(progress_of(first, Segment("bb", 11, 12, 2)), tmp_path, 2) == ["life bb begins at step 11, not 10"]
    books = tmp_path / "books"
    (books / "bb.1.jsonl").write_text((books / "bb.0.jsonl").read_text())
    assert audit(progress_of(first, second), tmp_path, 2)[0] == "step 10 of life bb: samples [20, 20]"
    (books / "bb.1.jsonl").unlink()
    assert audit(progress_of(first, second), tmp_path, 2)[0] == "step 10 of life bb: ranks [0] of 2"


def test_a_seed_is_a_test() -> None:
    """The same seed draws the same faults; all kinds come before one comes again; the store's node keeps its agent."""
    drawn = [
        draw_faults(random.Random(7), 33, nodes=3, has_etcd=True)  # noqa: S311 - it must be the same again
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert {fault.name for fault in drawn[0][: len(FAULTS) - 1]} == set(FAULTS) - {"fill-store"}
    assert all(fault.node != fault.other for fault in drawn[0])
    alone = draw_faults(random.Random(7), 99, nodes=3, has_etcd=False, store_node=0)  # noqa: S311 - ditto
    assert {fault.node for fault in alone if fault.name == "power-off"} == {1, 2}
    assert {fault.name for fault in alone} == set(FAULTS) - {"cut-from-hub", "kill-store-leader"}


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_job_outlives_a_worker_an_agent_and_a_host(tmp_path: Path) -> None:
    """The short version: each is killed once, all nodes train again after each, and the books are right in the end."""
    tell(Story(seed=1, count=3, store="c10d", only=("kill-worker", "kill-agent", "power-off")), tmp_path, say=print)


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "store", [*(pytest.param(store, marks=pytest.mark.soak) for store in ("c10d", "etcd-v3")), "successors"]
)
def test_a_job_outlives_faults_that_overlap(store: str, tmp_path: Path) -> None:
    """Five faults, one every two seconds: no agent ends that was not ended, and every sample is accounted for."""
    tell(Story(seed=5, count=5, store=store, every=2.0, longest=4.0), tmp_path, say=print)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_job_outlives_a_stranger_at_its_ports(tmp_path: Path) -> None:
    """All nodes train on while somebody on their network sends the agents what would fill and read a store."""
    tell(Story(seed=2, count=1, store="c10d", only=("fill-store",)), tmp_path, say=print)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_job_takes_no_harm_of_signals_second_jobs_and_escapes(tmp_path: Path) -> None:
    """No worker notices a stray signal or a second job of the same id; what leaves a worker ends with its round."""
    tell(Story(seed=1725, count=3, store="c10d", only=("signal-agent", "second-job", "escape")), tmp_path, say=print)


# --- agents killed one after another, strangers, warm workers, pauses -------------------------------------------------
@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "kills_guardians",
    [pytest.param(False, id="agents", marks=pytest.mark.soak), pytest.param(True, id="guardians too")],
)
def test_every_sample_is_accounted_for(tmp_path: Path, kills_guardians: bool) -> None:
    """A kill every two seconds on three hosts, each with an endpoint: one job goes on, and no sample is lost."""
    run(Deaths(seed=17, count=8, kills_guardians=kills_guardians), tmp_path, say=print)


def test_no_stranger_is_signalled_or_named() -> None:
    """Whatever workers, flags, surroundings and ends there are, and whatever a stranger has in common with the job."""
    run_jobs(range(12))


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_warm_workers_end_after_a_start_and_two_restarts(launch: Launch) -> None:
    """Jobs under --preload end with 0, whatever processes and threads their workers leave to the interpreter's end."""
    command = (sys.executable, "-m", "tests.chaos.preloaded")
    # The workers of this seed take all parts but the compiler's, which alone takes longer than the others together.
    job = launch("--starts", "1", "--restarts", "2", "--seed", "1", program=command, cwd=Path(__file__).parents[2])
    assert job.wait_exit(deadline=200) == 0, job.stdout
    assert "1 starts and 2 restarts" in job.stdout


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "store",
    [
        "file",
        *(pytest.param(store, marks=[pytest.mark.system, pytest.mark.soak]) for store in STORES if store != "file"),
    ],
)
def test_a_coordinator_that_stood_still_decides_nothing(store: str, tmp_path: Path) -> None:
    """Restarts are counted once each; a node that coordinated comes to the others' round."""
    reproduce(store, tmp_path)
