"""The slow rank of real jobs: named with its reason, and none named where ranks differ at random."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.commands.report import run_report
from tests.support.programs import shortened
from tests.support.sessions import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Launched

#: Rank 2 is slowed in the way that the first argument names, and rank 0 tells when the seconds of the second are over.
_TRAIN = """
import os, random, subprocess, sys, time
import torch, torch.distributed as dist

kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
first, *others = sorted(os.sched_getaffinity(0))
if kind == "shares":
    os.sched_setaffinity(0, {first if rank == 2 else others[0]})
if rank == 2 and kind in ("shares", "nice"):
    [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 if kind == "shares" else 2)]
    os.nice(10 * (kind == "nice"))
over = time.monotonic() + float(sys.argv[2])
while True:
    if kind in ("sleeps", "differs"):
        time.sleep(0.1 * random.uniform(0.9, 1.1) if kind == "differs" else 0.1 + 0.02 * (rank == 2))
    else:
        time.sleep(0.05 * (kind != "overloads"))
        end = time.thread_time() + 0.02
        while time.thread_time() < end: pass
    dist.all_reduce(torch.ones(4))
    if rank == 0 and time.monotonic() > over:
        os.write(1, b"over\\n")
        over *= 2
"""
_LINE = r"rank 2( on \S+)? is slower than the others \(they wait (\d+) % of the time for it\)"


def start(launch: Launch, directory: Path, kind: str, *flags: str, scale: float) -> Launched:
    """Start a job whose minutes are shorter; the program tells when six of them are over."""
    program = directory / "train.py"
    program.write_text(_TRAIN, encoding="utf-8")
    times = {"PERIOD": 15 * scale, "SPAN": 300 * scale, "RECENT": 60 * scale}
    launcher = shortened({f"elastic_run.agent.driver.slow_rank.{name}": value for name, value in times.items()})
    words = ("--preload=torch", "--flight-recorder", *flags, program, kind, str(360 * scale))
    return launch(*words, program=launcher, env={"OMP_NUM_THREADS": "1"})


def test_a_rank_that_the_others_wait_for_is_named_and_shown(launch: Launch, tmp_path: Path) -> None:
    """On the console, in `status`, for Prometheus and on the page of the job's history."""
    port, logs = free_port(), tmp_path / "logs"
    flags = ("--nproc-per-node=4", f"--metrics-port={port}", f"--log-dir={logs}")
    job = start(launch, tmp_path, "sleeps", *flags, scale=0.03)
    assert 8 < int(job.wait_line(_LINE, deadline=80)[2]) < 30
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        (share,) = re.findall(r'^elastic_run_behind_ratio\{rank="2"\} ([\d.]+)$', answer.read().decode(), re.MULTILINE)
    assert 0.05 < float(share) < 0.3
    status = launch("status", str(job.pid), "--json")
    assert status.wait_exit() == 0
    (node,) = json.loads(status.stdout)["nodes"]
    assert max(node["workers"], key=lambda worker: worker["behind"])["rank"] == 2
    run_report([str(logs), "-o", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.search("rank 2: .*" + _LINE, page, re.DOTALL)


#: Of several jobs that run beside each other: what slows rank 2, their number, and the reason in their lines.
_JOBS = [
    ("sleeps", 5, "(: .*)?$"),  # it may wait for a processor as well
    ("differs", 5, ""),
    ("shares", 1, r": it waits for a processor \d+ % of the time \(it may use processor \d+ only\)$"),
    ("nice", 1, r": it waits for a processor \d+ % of the time \(nice 10\)$"),
    ("overloads", 1, ""),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("times", "kind", "beside", "reason"),
    [
        # Those that take whole processors disturb each other, and the tests beside them.
        *(pytest.param(1, *job, id=f"1-{job[0]}", marks=pytest.mark.long) for job in _JOBS[:2]),
        *(pytest.param(20, *job, id=f"20-{job[0]}", marks=pytest.mark.soak) for job in _JOBS),
    ],
)
def test_of_twenty_jobs_nineteen_name_the_slow_rank_with_the_reason(
    times: int, kind: str, beside: int, reason: str, launch: Launch, tmp_path: Path
) -> None:
    """Within a minute after five, which are six and thirty seconds here; none is named where ranks differ at random."""
    said = []
    for _ in range(0, times, beside):
        jobs = [start(launch, tmp_path, kind, "--nproc-per-node=4", scale=0.1) for _ in range(min(times, beside))]
        for job in jobs:
            job.wait_line("^over$", deadline=120)
            job.send(signal.SIGTERM)
            said += [line for line in job.stderr.splitlines() if "is slower than" in line]
    assert times - times // 20 <= len(said) <= times if reason else not said, said
    assert all(re.search(_LINE + reason, line) for line in said), said


@pytest.mark.long
def test_the_first_of_several_nodes_tells_of_the_ranks_of_all(launch: Launch, tmp_path: Path) -> None:
    """Their clocks are compared by the ages of calls."""
    flags = ("--nproc-per-node=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--nnodes=2")
    first, other = (start(launch, tmp_path, "sleeps", *flags, f"--node-rank={rank}", scale=0.06) for rank in range(2))
    assert first.wait_line(_LINE, deadline=80)[1]
    assert "slower than" not in other.stderr
