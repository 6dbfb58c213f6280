"""`elastic-run status`: what it shows of real jobs, how fast, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.contract import ENV_CONTROL_DIR, ENV_RDZV_TOKEN
from tests.support.launch import launch as start
from tests.support.sessions import free_port
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

WAITING = "say('rank', rank, 'waits')\nsignal.pause()\n"


def run(*words: str, env: dict[str, str] | None = None) -> Launched:
    """Run a command to its end."""
    with start(*words, env=env) as command:
        command.wait_exit()
    return command


def status(*words: str, env: dict[str, str] | None = None) -> Launched:
    """Run `elastic-run status` to its end."""
    return run("status", *words, env=env)


def read_status(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON document, once a job is found."""

    def ask() -> str:
        command = status("--json", *words, env=env)
        return command.stdout if command.process.returncode == 0 else ""

    document: dict[str, Any] = json.loads(wait_until(ask, what="a job"))
    return document


def test_a_job_is_shown_with_each_workers_state_and_last_line(launch: Launch, worker: Worker) -> None:
    """From the first line of a worker on; a worker that SIGSTOP holds stands there as stopped."""
    body = "say('rank', rank, 'begins')\nwhile rank == 1: pass\nsignal.pause()\n"
    launcher = launch("--nproc-per-node=3", "--max-restarts=2", worker(body), merge=True)
    launcher.wait_lines("begins", count=3)
    (node,) = json.loads(status("--json").stdout)["nodes"]
    assert [each["last_line"] for each in node["workers"]] == [f"rank {rank} begins" for rank in range(3)]
    assert all(each["silence"] < stretched(30) and each["memory"] > 1 << 20 for each in node["workers"])

    def has_computed() -> bool:
        workers = read_status()["nodes"][0]["workers"]
        return bool(workers[1]["cpu"] > workers[0]["cpu"])

    wait_until(has_computed, what="CPU time of rank 1, which others may take for a while")
    assert (node["pid"], node["max_restarts"], node["world_size"]) == (launcher.pid, 2, 3)
    os.kill(node["workers"][2]["pid"], signal.SIGSTOP)
    wait_until(lambda: read_status()["nodes"][0]["workers"][2]["state"] == "stopped", what="rank 2 stopped")
    table = status(str(launcher.pid)).stdout
    assert f"job {launcher.pid}: " in table
    assert "0 of 2 restarts used" in table
    assert "rank 0 begins" in table


def test_the_restart_count_and_the_new_workers_are_shown(launch: Launch, worker: Worker) -> None:
    """After a restart."""
    launcher = launch(
        "--nproc-per-node=2", "--max-restarts=3", worker("if attempt == 0: sys.exit(3)\n" + WAITING), merge=True
    )
    launcher.wait_lines("waits", count=2)
    (node,) = read_status()["nodes"]
    assert node["restart_count"] == 1
    assert [each["last_line"] for each in node["workers"]] == ["rank 0 waits", "rank 1 waits"]


def test_a_worker_that_has_ended_keeps_its_exit_code(launch: Launch, worker: Worker) -> None:
    """While the others run on."""
    launcher = launch("--nproc-per-node=2", worker("if rank == 0: sys.exit(0)\n" + WAITING), merge=True)
    launcher.wait_line("waits")
    wait_until(lambda: read_status()["nodes"][0]["workers"][0]["exit_code"] == 0, what="rank 0 ended")
    assert "done" in status().stdout


@pytest.mark.parametrize("flags", [["--redirects=3"], ["--tee=3"]], ids=" ".join)
def test_output_that_goes_to_files_is_seen(flags: list[str], launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The last line comes from the file where the worker writes it itself."""
    launch(*flags, f"--log-dir={tmp_path / 'logs'}", worker(WAITING))
    wait_until(lambda: read_status()["nodes"][0]["workers"][0]["last_line"] == "rank 0 waits", what="its last line")
    (found,) = read_status()["nodes"][0]["workers"]
    assert found["silence"] is not None


def test_stdout_that_goes_past_the_launcher_is_no_silence(launch: Launch, worker: Worker) -> None:
    """The silence is unknown then, and the table says why."""
    launcher = launch("--no-capture", worker(WAITING))
    launcher.wait_line("waits")
    (found,) = read_status()["nodes"][0]["workers"]
    assert found["silence"] is None
    assert "does not pass through elastic-run" in status().stdout


def test_several_jobs_have_to_be_named_and_an_unknown_one_is_refused(launch: Launch, worker: Worker) -> None:
    """One line, exit 2, with what may be typed; without a name, and with `ps`, all jobs are listed."""
    assert (status().process.returncode, status("x").process.returncode) == (2, 2)
    none = run("ps")
    assert (none.process.returncode, none.stdout) == (0, "no job of yours runs on this machine\n")
    launchers = [launch(worker(WAITING)) for _ in range(2)]
    for launcher in launchers:
        launcher.wait_line("waits")
        read_status(str(launcher.pid))
    refused = status("--json")
    assert refused.process.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert all(f"{launcher.pid} (" in refused.stderr for launcher in launchers)
    for listed in (status(), run("ps")):
        heading, *rows = listed.stdout.splitlines()
        assert (listed.process.returncode, heading.split()) == (0, ["RUN", "PID", "STATE", "STARTED", "PROGRAM"])
        pids = [str(launcher.pid) for launcher in launchers]
        assert sorted(row.split()[:3] for row in rows) == sorted([pid, pid, "running"] for pid in pids)
    assert "'x' is not a job of yours" in status("x").stderr


def test_a_stopped_launcher_is_told_as_such(launch: Launch, worker: Worker) -> None:
    """The command ends, in one line, when nobody answers."""
    launcher = launch(worker(WAITING))
    read_status()
    launcher.send(signal.SIGSTOP)
    refused = status()
    assert refused.process.returncode == 2
    assert f"the agent with pid {launcher.pid} does not answer" in refused.stderr
    launcher.send(signal.SIGCONT)


def test_64_ranks_are_shown_quickly(launch: Launch, worker: Worker) -> None:
    """The bar is 0.3 s on a quiet machine; the bound is for a busy one."""
    launcher = launch("--nproc-per-node=64", worker(WAITING), merge=True)
    launcher.wait_lines("waits", count=64)
    read_status()
    begin = time.monotonic()
    table = status().stdout
    took = time.monotonic() - begin
    assert "rank 63 waits" in table
    assert took < stretched(1.0), took


def test_a_job_that_nobody_asks_is_not_woken(launch: Launch, worker: Worker) -> None:
    """With the socket open the launcher sleeps; a look at the kernel's counter of its wake-ups tells."""
    launcher = launch(worker(WAITING))
    read_status()

    def count_wakes() -> int:
        lines = Path(f"/proc/{launcher.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    # Each window is as long as a poll of the slowest kind would take; one quiet window is the promise.
    def has_rested() -> bool:
        before, end = count_wakes(), time.monotonic() + 1.5
        wait_until(lambda: time.monotonic() > end)
        return count_wakes() == before

    wait_until(has_rested, what="a window without a wake-up")


@pytest.mark.parametrize("token", [None, "secret of this job"], ids=["no token", "token"])
def test_the_workers_of_all_nodes_are_shown_on_each(
    token: str | None, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Each node has a directory of sockets of its own, as another machine has, so the store is the only way."""
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    directories = [tmp_path / "0", tmp_path / "1"]
    nodes, path = [], worker(WAITING)
    for rank, directory in enumerate(directories):
        directory.mkdir()
        env = {ENV_CONTROL_DIR: str(directory), ENV_RDZV_TOKEN: token}
        words = ("--nproc-per-node=2", f"--node-rank={rank}", *place, path)
        nodes.append(launch(*words, env=env, merge=True))
    for node in nodes:
        node.wait_lines("waits", count=2)
    for directory in directories:
        document = read_status("j", env={ENV_CONTROL_DIR: str(directory)})
        assert [node["node_rank"] for node in document["nodes"]] == [0, 1]
        shown = [each["last_line"] for node in document["nodes"] for each in node["workers"]]
        assert shown == [f"rank {rank} waits" for rank in range(4)]
    # A node that does not answer is missing, and is said to be. It is cut off before it is given up.
    nodes[1].send(signal.SIGSTOP)
    refused = status("j", env={ENV_CONTROL_DIR: str(directories[0])})
    nodes[1].send(signal.SIGCONT)
    assert "1 of 2 nodes have not answered" in refused.stderr
    assert "rank 0 waits" in refused.stdout
