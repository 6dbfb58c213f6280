"""What is read of a worker for the hang detection: its own stacks are no progress, whenever they come."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elastic_run import contract
from elastic_run.agent.driver import hang_detection, hang_signs
from elastic_run.agent.driver.hang_detection import Hang, HangDetection
from elastic_run.core.diagnosis.stack_groups import Dump
from elastic_run.multiprocessing.process.process_table import is_running
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_run.agent.driver.round import Round
    from elastic_run.loop import Loop

_TEXT = 'Thread 0x0f (most recent call first):\n  File "/code/data.py", line 41 in load_batch\n'
#: Holds the GIL in C, while the thread that answers for the flight recorder waits for it.
_HOLDER = """
import ctypes, glob, sys
from elastic_run.diagnosis.recorder_server import serve
serve(sys.argv[1])
while not any(open(path).read().strip() == sys.argv[2] for path in glob.glob("/proc/self/task/*/comm")):
    pass
mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
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
                output=SimpleNamespace(activities={}),
                output_files=lambda _: (),
                listen_for_stacks=lambda: self,
            ),
        )

    def ask(self, _: object, __: float, on_done: Callable[[dict[int, Dump]], None]) -> None:
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
        wait_until(lambda: not is_running(self._process.pid), what="a worker that sleeps")

    def answer(self, count: int) -> None:
        """Let the agent have read what was written, and answer the question."""
        self.received[0] += count
        self.asked.pop()({0: Dump(_TEXT)})


class _Clock:
    """A loop with one timer; the test moves its time."""

    def __init__(self) -> None:
        self.time = 0.0
        self._next: Callable[[], None] = lambda: None

    def now(self) -> float:
        """Return the time."""
        return self.time

    def call_later(self, _: float, call: Callable[[], None]) -> SimpleNamespace:
        """Take the timer."""
        self._next = call
        return SimpleNamespace(cancel=lambda: None)

    def tick(self) -> None:
        """Let a second pass."""
        self.time += 1.0
        self._next()


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the question for GPU use at once: a thread would answer it, and these tests have a loop of their own."""
    monkeypatch.setattr(hang_detection, "ask_gpu_use", lambda _loop, _memory, deliver: deliver({}))


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
        wait_until(lambda: not is_running(process.pid), what="a process that holds the GIL")
        seen = set[bool]()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{name}")
            before = _count_wakes(process.pid)
            while _count_wakes(process.pid) < before + 50:
                seen.add(is_running(process.pid, besides=thread.encode()))
        process.kill()
    assert seen == {False}


def _find_hang(worker: _Worker, answer: Callable[[_Clock], None]) -> float:
    """Return after how many seconds the job hangs."""
    clock, found = _Clock(), list[Hang]()
    detection = HangDetection(
        cast("Loop", clock),
        worker.round,
        world_size=1,
        timeout=60.0,
        heartbeats={},
        recorder=None,
        job=None,
        on_hang=found.append,
        say=lambda _: None,
    )
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


def test_a_kernel_that_does_not_count_bytes_hides_no_hang(worker: _Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc/PID/io is missing or not permitted, the stacks that the agent reads are not counted either."""
    monkeypatch.setattr(hang_signs, "_read_io", lambda _: {})
    assert 60 <= _find_hang(worker, lambda _: worker.answer(100_000)) <= 64
