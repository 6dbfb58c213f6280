"""What is read of a worker for the hang detection: its own stacks are no progress, whenever they come."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elastic_run import contract
from elastic_run.agent.driver import hang_detection, worker_readings
from elastic_run.agent.driver.hang_detection import HangDetection
from elastic_run.agent.driver.worker_readings import MOMENT, MOMENTS, ProcessSample, follow, sample_processes
from elastic_run.core.failure import hang
from elastic_run.core.failure.hang import JobStillness, Stillness, describe_rank
from elastic_run.core.failure.stacks import Dump, Place
from elastic_run.multiprocessing.process_table import list_running_threads
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round import Round

_TEXT = 'Thread 0x0f (most recent call first):\n  File "/code/data.py", line 41 in load_batch\n'
#: Holds the GIL in C, while the thread that answers for the flight recorder waits for it.
_HOLDER = """
import ctypes, glob, sys
from elastic_run.diagnosis.recorder import serve
serve(sys.argv[1])
while not any(open(path).read().strip() == sys.argv[2] for path in glob.glob("/proc/self/task/*/comm")):
    pass
mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
#: A thread wakes up 250 times a second, and the main thread does nothing.
_POLLER = """
import threading, time
def poll():
    while True:
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        time.sleep(0.002)
threading.Thread(target=poll, daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""
#: Computes in two threads, which take turns, beside a child that computes; another process leaves them next to nothing
#: of their processor.
_STARVED = """
import os, threading
def compute():
    while True:
        pass
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
if os.fork():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if os.fork():
        threading.Thread(target=compute, daemon=True).start()
        print("ready", flush=True)
compute()
"""
#: Writes as many bytes as a line of its stdin says, as faulthandler does.
_WRITER = """
import os, sys
print("ready", flush=True)
for line in sys.stdin:
    os.write(1, b"x" * (int(line) - 1) + b"\\n")
"""


class _Worker:
    """A worker of which the test knows when it writes its stacks, and when the agent reads them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.received = {0: 0}
        self.asked: list[Callable[[dict[int, Dump]], None]] = []
        self.round = cast(
            "Round",
            SimpleNamespace(
                number=1,
                global_ranks={0: 0},
                workers=SimpleNamespace(alive={0}, pids={0: process.pid}),
                alive_pids={0: process.pid},
                output=SimpleNamespace(activities={}),
                find_last_words=lambda _: None,
                uncaught={},
                output_files=lambda _: (),
                listen_for_stacks=lambda: self,
            ),
        )

    def ask(self, _: object, __: float, on_done: Callable[[dict[int, Dump]], None], **___: object) -> None:
        """Take a question."""
        self.asked.append(on_done)

    def write(self, count: int) -> None:
        """Let the worker write."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        assert len(self._process.stdout.readline()) == count
        self.wait_asleep()

    def wait_asleep(self) -> None:
        """Wait until the worker does nothing."""
        wait_until(lambda: not list_running_threads(self._process.pid), what="a worker that sleeps")

    def answer(self, count: int) -> None:
        """Let the agent have read what was written, and answer the question."""
        self.received[0] += count
        self.asked.pop()({0: Dump(_TEXT)})


class _Clock:
    """A loop of which the test moves the time."""

    def __init__(self) -> None:
        self.time = 0.0
        self._timers: dict[object, tuple[float, Callable[[], None]]] = {}

    def now(self) -> float:
        """Return the time."""
        return self.time

    def call_later(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        """Take a timer."""
        key = object()
        self._timers[key] = (self.time + seconds, call)
        return SimpleNamespace(cancel=lambda: self._timers.pop(key, None))

    def call_at(self, when: float, call: Callable[[], None]) -> SimpleNamespace:
        """Take a timer."""
        return self.call_later(when - self.time, call)

    def tick(self) -> None:
        """Let a second pass, and call what is due by then, each once."""
        self.time += 1.0
        for key, (due, call) in [*self._timers.items()]:
            if due <= self.time:
                del self._timers[key]
                call()


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the question for GPU use at once: a thread would answer it, and these tests have a loop of their own."""
    monkeypatch.setattr(hang_detection, "ask_gpu_use", lambda _, deliver: deliver({}))


@pytest.fixture
def worker() -> Iterator[_Worker]:
    """Return a worker that does nothing."""
    command = [sys.executable, "-c", _WRITER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        worker = _Worker(process)
        worker.wait_asleep()
        yield worker
        process.kill()


def _count_wakes(pid: int) -> int:
    """Return how often the threads of a process have slept and gone on."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("voluntary"))


def test_a_question_to_a_rank_that_holds_the_gil_does_not_make_it_run() -> None:
    """The thread that was asked wakes up 200 times a second, and would hide the hang on a busy machine."""
    name, thread = f"elastic-run-test-{os.getpid()}", contract.RECORDER_THREAD
    command = [sys.executable, "-c", _HOLDER, name, thread]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: not list_running_threads(process.pid), what="a process that holds the GIL")
        seen = set[bool]()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{name}")
            before = _count_wakes(process.pid)
            while _count_wakes(process.pid) < before + 50:
                seen.add(bool(list_running_threads(process.pid, besides=thread.encode())))
        process.kill()
    assert seen == {False}


def _follow(pid: int) -> tuple[ProcessSample, ProcessSample]:
    """Return the activity of a worker at the beginning and at the end of a look's moments."""
    workers = SimpleNamespace(alive={0}, pids={0: pid})
    current = SimpleNamespace(workers=workers, listen_for_stacks=lambda: SimpleNamespace(received={}))
    first = sample = sample_processes(cast("Round", current))[0]
    for _ in range(MOMENTS if sample.is_undecided else 0):
        began_at = time.monotonic()
        time.sleep(MOMENT)
        sample = follow(sample, pid, time.monotonic() - began_at)
    return first, sample


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    """Return a function that starts a program, waits until it is ready, and returns its pid."""
    with ExitStack() as stack:

        def start(program: str) -> int:
            command = [sys.executable, "-c", program]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            stack.enter_context(process)
            stack.callback(os.killpg, process.pid, signal.SIGKILL)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process.pid

        yield start


def test_a_thread_that_polls_does_not_compute(start: Callable[[str], int]) -> None:
    """It has a processor at some instants, and sleeps between them; gloo has such a thread for each process group."""
    pid = start(_POLLER)

    def sleeps() -> bool:
        first, last = _follow(pid)
        return bool(first.running) and not last.is_computing

    wait_until(sleeps, what="a thread that has slept since")


def test_a_thread_that_waits_for_a_processor_computes(start: Callable[[str], int]) -> None:
    """So does a child; on a machine with too few processors both get next to no processor time."""
    pid = start(_STARVED)
    for _ in range(10):
        _, last = _follow(pid)
        assert last.is_computing
        assert last.has_computing_child


class _Detection(HangDetection):
    """Tells the test of its hangs, and whether this node decides on the action, in place of the user."""

    def __init__(
        self, clock: _Clock, worker: _Worker, tell: Callable[[JobStillness, bool], None], job: MultiNodeJob | None
    ) -> None:
        self._tell_test = tell
        group = SimpleNamespace(group_rank=getattr(job, "group_rank", 0))
        context: Any = SimpleNamespace(heartbeats={}, flight_recorder=None, loop=clock, job=job, group=group)
        super().__init__(context, worker.round, timeout=60.0)
        self._is_large = getattr(job, "is_large", False)

    def _tell(self, found: JobStillness) -> None:
        self._watch = hang.tell(self._watch)
        self._tell_test(found, self._has_lowest_rank)


def _watch(clock: _Clock, worker: _Worker, found: list[bool], job: MultiNodeJob | None = None) -> HangDetection:
    return _Detection(clock, worker, lambda _, is_decided_here: found.append(is_decided_here), job)


def _find_hang(worker: _Worker, answer: Callable[[_Clock], None]) -> float:
    """Return after how many seconds the job hangs."""
    clock, found = _Clock(), list[bool]()
    detection = _watch(clock, worker, found)
    while not found and clock.time < 200:
        clock.tick()
        if worker.asked:
            answer(clock)
    detection.close()
    return clock.time


def test_a_look_that_takes_longer_than_a_tick_is_no_progress(worker: _Worker) -> None:
    """Stacks that are written, and not yet read, do not count as output: many threads take their time."""

    def answer(clock: _Clock) -> None:
        worker.write(1000)
        clock.tick()
        worker.answer(1000)

    assert 60 <= _find_hang(worker, answer) <= 64


def _show_thread(monkeypatch: pytest.MonkeyPatch, count_sleeps: Callable[[], int]) -> None:
    """Let the worker have a thread that always runs when it is looked at."""
    monkeypatch.setattr(worker_readings, "list_running_threads", lambda pid, **_: [f"{pid}/task/2"])
    monkeypatch.setattr(worker_readings, "_read_status", lambda _: (b"R", count_sleeps()))


@pytest.mark.parametrize(("step", "is_hang"), [(1, True), (0, False)], ids=["polls", "computes"])
def test_a_look_follows_a_thread_that_runs(
    worker: _Worker, monkeypatch: pytest.MonkeyPatch, *, step: int, is_hang: bool
) -> None:
    """A thread that has slept in each moment is no progress, also if it runs again at the end of all of them."""
    _show_thread(monkeypatch, count(0, step).__next__)
    seconds = _find_hang(worker, lambda _: worker.answer(0))
    assert 60 <= seconds <= 80 if is_hang else seconds == 200


def test_an_answer_says_how_old_the_last_look_is(worker: _Worker) -> None:
    """The node that asks knows from it when the next look is due, and asks again then; no worker is told after it."""
    clock = _Clock()
    detection = _watch(clock, worker, [])
    assert detection.answer()["age"] == 0.0
    while not worker.asked:
        clock.tick()
    worker.answer(0)
    clock.time += 7.0
    assert detection.answer()["age"] == 7.0
    assert [told["local_rank"] for told in detection.answer()["workers"]] == [0]
    detection.close()
    assert detection.answer()["workers"] == []


def _describe_others(*nodes: tuple[int, float]) -> list[dict[str, Any]]:
    """Return the answers of other nodes: the rank of each one's worker, and for how long it has been still."""
    stuck = Place("load", "/code/data.py", 41)
    return [
        {
            "host": f"node{rank}",
            "pid": 1,
            "round": 1,
            "timeout": 60.0,
            "age": 0.0,
            "workers": [
                describe_rank(rank, Stillness(stuck, waits=False, same=still, idle=still), pid=2, local_rank=0)
            ],
        }
        for rank, still in nodes
    ]


class _LargeJob:
    """A job of many nodes, whose answers the test gives."""

    def __init__(self, group_rank: int, *, is_large: bool = True) -> None:
        self.group_rank, self.is_large = group_rank, is_large
        self.nodes = 2
        self.questions = 0
        self.answers: list[dict[str, Any]] = []

    def is_member(self, _: object) -> bool:
        return True

    def gather_status(self, _kind: str, _seconds: float, on_done: Callable[[list[dict[str, Any]]], None]) -> None:
        self.questions += 1
        on_done(self.answers)


def _let_hang(worker: _Worker, job: _LargeJob, seconds: float, *, asked_at: float = inf) -> tuple[list[bool], float]:
    """Let the worker, whose rank is 5, hang; return whether the node decides, of each hang, and when it asks first."""
    clock, found, first = _Clock(), list[bool](), inf
    worker.round.global_ranks[0] = 5
    detection = _watch(clock, worker, found, cast("MultiNodeJob", job))
    while clock.time < seconds:
        clock.tick()
        if worker.asked:
            worker.answer(0)
        if clock.time >= asked_at:
            detection.answer()
            asked_at = inf
        first = min(first, clock.time) if job.questions else first
    detection.close()
    return found, first


@pytest.mark.parametrize("rank", [0, 5])
def test_a_node_of_a_large_job_asks_if_the_nodes_before_it_do_not(worker: _Worker, rank: int) -> None:
    """The workers of these have ended; it has the lowest rank of those that run, so it tells the hang and decides."""
    job = _LargeJob(rank)
    job.answers = _describe_others((7, 100.0))
    (is_decided_here,), first = _let_hang(worker, job, 70)
    assert 60 <= first <= 66
    assert is_decided_here


def test_a_node_of_a_large_job_leaves_the_decision_to_a_lower_rank(worker: _Worker) -> None:
    """It asks once in a while, and tells nothing; in a small job it tells the hang as well."""
    job = _LargeJob(5)
    job.answers = _describe_others((4, 100.0))
    found, _ = _let_hang(worker, job, 140)
    assert (found, job.questions) == ([], 2)
    job = _LargeJob(5, is_large=False)
    job.answers = _describe_others((4, 100.0))
    (is_decided_here,), _ = _let_hang(worker, job, 140)
    assert not is_decided_here
