"""Stop requests and signs of life, with real signals and real groups."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker


QUIET = {"OMP_NUM_THREADS": "1"}
#: These tests do not test the start of workers, and each import of torch takes a second.
WARM = "--preload=torch"
HEAD = """
import json, os, signal, sys, threading, time
import elastic_run.worker as worker
def say(**words): os.write(1, (json.dumps(words) + "\\n").encode())
"""
#: Trains until it is told to stop, by any rank; every step is a collective, as in real training.
LOOP = """
context = worker.init_distributed()
is_stopping = worker.stop_requested()
say(begins=context.rank, pid=os.getpid(), ranks=context.world_size)
step = 0
while not worker.stop_requested(everywhere=True):
    worker.reduce_mean(1.0)
    step += 1
    time.sleep(0.001 * context.rank)  # ranks are at different places when the signal comes
say(ends=context.rank, step=step, ranks=context.world_size, is_told=worker.stop_requested())
"""


@pytest.fixture
def script(tmp_path: Path) -> Worker:
    """Write a script; `worker` and `say` are there already."""

    def write(body: str) -> Path:
        path = tmp_path / "loop.py"
        path.write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
        return path

    return write


def told(job: Launched, key: str) -> list[dict[str, Any]]:
    """Return what the workers have said with a key in it, in the order of its values."""
    words = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    return sorted((word for word in words if key in word), key=lambda word: int(word[key]))


def is_served(port: int) -> bool:
    """Tell whether somebody listens on a port of loopback."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_all_ranks_leave_at_the_step_where_one_was_told(launch: Launch, script: Worker) -> None:
    """One rank gets SIGTERM: all three leave the loop at the same step, and the job ends well."""
    job = launch("--standalone", WARM, "--nproc-per-node=3", script(LOOP), env=QUIET)
    job.wait_lines('"begins"', count=3)
    os.kill(told(job, "begins")[1]["pid"], signal.SIGTERM)
    assert job.wait_exit() == 0, job.stderr
    ends = told(job, "ends")
    assert [word["is_told"] for word in ends] == [False, True, False]
    assert len({word["step"] for word in ends}) == 1


@pytest.mark.long
def test_a_stopped_job_leaves_its_loop(launch: Launch, script: Worker) -> None:
    """SIGTERM to the launcher reaches the workers as a request: they save and leave within the grace period."""
    job = launch("--standalone", WARM, "--nproc-per-node=2", script(LOOP), env=QUIET)
    job.wait_lines('"begins"', count=2)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 128 + signal.SIGTERM
    ends = told(job, "ends")
    assert [word["ends"] for word in ends] == [0, 1]
    assert ends[0]["step"] == ends[1]["step"]


@pytest.mark.long
def test_a_scale_up_is_a_request(launch: Launch, script: Worker) -> None:
    """--scale-up-signal, whatever signal that is, asks the workers to leave before they start again with new nodes."""
    meeting = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=scale"]
    flags = [*meeting, WARM, "--rdzv-conf=last_call_timeout=0", "--scale-up-delay=0", "--scale-up-signal=SIGUSR2"]
    path = script(LOOP)
    first = launch(*flags, path, env=QUIET)
    first.wait_line('"begins"')
    second = launch(*flags, path, env=QUIET)
    second.wait_line('"begins"')
    first.wait_line('"ends"')
    (alone,) = told(first, "ends")
    assert (alone["ranks"], alone["is_told"]) == (1, True)
    assert told(second, "begins")[0]["ranks"] == 2
    for job in (first, second):
        job.send(signal.SIGTERM)
    for job in (first, second):
        assert job.wait_exit() == 128 + signal.SIGTERM


@pytest.mark.long
def test_the_others_go_on_without_a_node_that_is_told_to_stop(launch: Launch, script: Worker) -> None:
    """SIGTERM to one node's launcher: all ranks leave at one step, and those of the other node start again alone."""
    port = free_port()
    meeting = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=leave"]
    flags = [*meeting, WARM, "--rdzv-conf=last_call_timeout=30"]
    path = script(LOOP)
    first = launch(*flags, path, env=QUIET)
    wait_until(lambda: is_served(port), what="the store")  # so that it is the first one's, which stays
    second = launch(*flags, path, env=QUIET)
    for job in (first, second):
        job.wait_line('"begins"')
    second.send(signal.SIGTERM)
    assert second.wait_exit() == 128 + signal.SIGTERM
    first.wait_lines('"begins"', count=2)
    lives = [json.loads(line) for line in first.stdout.splitlines() if "begins" in line]
    assert [life["ranks"] for life in lives] == [2, 1]
    steps = {word["step"] for word in [*told(first, "ends"), *told(second, "ends")] if word["ranks"] == 2}
    assert len(steps) == 1
    first.send(signal.SIGTERM)
    assert first.wait_exit() == 128 + signal.SIGTERM


@pytest.mark.long
def test_a_handler_of_the_script_still_gets_its_signal(launch: Launch, script: Worker) -> None:
    """The script's own handler of SIGTERM runs as well. In a fork of a watching worker, it runs alone."""
    path = script("""
        signal.signal(signal.SIGTERM, lambda *_: say(own=1))
        before = worker.stop_requested()
        if not (child := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3)
        say(fork=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.kill(os.getpid(), signal.SIGTERM)
        say(before=before, after=worker.stop_requested(), everywhere=worker.stop_requested(everywhere=True))
    """)
    job = launch(path, program=[sys.executable, "-W", "error"], env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    own, after = '{"own": 1}\n', '{"before": false, "after": true, "everywhere": true}\n'
    assert job.stdout == own + '{"fork": 3}\n' + own + after


def test_a_forked_process_that_does_not_ask_is_ended(launch: Launch, script: Worker) -> None:
    """SIGTERM ends a process that a watching worker has forked, as daemons are at its end; one that asks is told."""
    path = script("""
        import multiprocessing
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        def hang():
            ready.set()
            signal.pause()
        def ask():
            before = worker.stop_requested()
            os.kill(os.getpid(), signal.SIGTERM)
            say(before=before, after=worker.stop_requested())
        worker.stop_requested()
        hanging, asking = context.Process(target=hang), context.Process(target=ask)
        hanging.start()
        ready.wait()
        hanging.terminate()
        hanging.join()
        asking.start()
        asking.join()
        say(codes=[hanging.exitcode, asking.exitcode], told=worker.stop_requested())
    """)
    job = launch(path, program=[sys.executable, "-W", "error"], env=QUIET)
    assert job.wait_exit() == 0, job.stderr
    assert job.stdout == '{"before": false, "after": true}\n{"codes": [-15, 0], "told": false}\n'


def test_the_first_question_comes_from_the_main_thread(launch: Launch, script: Worker) -> None:
    """Another thread, which may not set handlers, is told what to do; later it may ask."""
    path = script("""
        def ask():
            try:
                say(answer=worker.stop_requested())
            except worker.WorkerError as error:
                say(error=str(error))
        for prepare in (lambda: None, worker.stop_requested):
            prepare()
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
    """)
    job = launch(path, program=[sys.executable, "-W", "error"])
    assert job.wait_exit() == 0, job.stderr
    assert "once in the main thread before other threads ask" in job.stdout
    assert job.stdout.endswith('{"answer": false}\n')


def test_heartbeats_reach_the_file_that_is_named(launch: Launch, script: Worker, tmp_path: Path) -> None:
    """The named file changes while the worker sends heartbeats, and stays the same when the worker hangs."""
    path, file = (
        script("""
        for step in range(100000):
            worker.heartbeat(step)
            if step == 50000:
                say(pauses=1)
                sys.stdin.read(1)
            elif step > 50000:
                time.sleep(0.001)
    """),
        tmp_path / "heartbeats",
    )
    job = launch(path, program=[sys.executable], env={"ELASTIC_RUN_HEARTBEAT_FILE": str(file)}, stdin=-1)
    job.wait_line("pauses")
    paused = file.read_text(encoding="ascii")
    count, step = paused.split()
    assert step == f"step={int(count) - 1}"
    assert job.process.stdin is not None
    job.process.stdin.write(b"x")
    job.process.stdin.flush()
    changed = wait_until(lambda: file.read_text(encoding="ascii") != paused and file.read_text(encoding="ascii"))
    assert int(str(changed).split()[0]) > int(count)
    assert len(str(changed).splitlines()) == 1
