"""What the recorder of gloo's and NCCL's collectives, and the links between nodes, tell of a hang."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.agent.driver.flight_recorder import FILE_PREFIX, FlightRecorder
from elastic_run.core.job.state import BROKEN, ENDED, SILENT
from elastic_run.diagnosis.dumps import find_dumps
from elastic_run.loop import Loop
from elastic_run.multiprocessing.logs import LogsDest
from elastic_run.rendezvous.coordination.link import DOCUMENT, Link, encode_frame
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Launch


#: Rank 1 does not join the collective of a subgroup in which rank 0 waits; rank 2 waits in one of all ranks.
PROGRAM = """
import atexit, os, sys, time
atexit.register(lambda: print("compiler:", "torch._inductor" in sys.modules))  # after what torch's import registers
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
inner = dist.new_group([0, 1], group_desc="inner")
dist.all_reduce(torch.ones(4))
if rank == 1:
    os.write(1, b"late\\n")
    if sys.argv[1] == "raise":
        raise ValueError("bad batch")
    time.sleep(600)
work = dist.all_reduce(torch.ones(4), group=inner if rank == 0 else None, async_op=True)
os.write(1, b"joined\\n")
work.wait()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the path of the program."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_a_stopped_job_says_which_rank_did_not_join(script: Path, launch: Launch, tmp_path: Path) -> None:
    """A job that hangs and is stopped names the rank that all wait for, and keeps the dumps."""
    logs = tmp_path / "logs"
    job = launch("--preload=torch", "--nproc-per-node=3", "--flight-recorder", f"--log-dir={logs}", script, "sleep")
    job.wait_lines("joined|late", count=3, deadline=120)
    job.send(signal.SIGTERM)
    assert job.wait_exit() == 143
    report = " ".join(job.stderr.split())
    assert "recorder rank 1 did not join all_reduce number 1 of group 'inner', in which rank 0 waits" in report
    (directory,) = logs.glob("latest/attempt_0")
    found = find_dumps([str(directory)])
    assert [dump.rank for dump in found.dumps] == [0, 1, 2]
    assert found.dumps[0].members["1"] == (0, 1)
    document = pickle.loads((directory / f"{FILE_PREFIX}0").read_bytes())  # noqa: S301 - of this test
    assert document["rank"] == 0
    traced = subprocess.run(
        [sys.executable, "-m", "elastic_run", "trace", directory], check=True, capture_output=True, text=True
    )
    assert "rank 1 did not join" in traced.stdout


@pytest.mark.long
def test_a_rank_that_raises_leaves_its_dump(script: Path, launch: Launch, tmp_path: Path) -> None:
    """A worker that ends by an exception writes its dump on the way out, with the stacks, and imports no compiler."""
    logs = tmp_path / "logs"
    job = launch("--preload=torch", "--nproc-per-node=3", "--flight-recorder", f"--log-dir={logs}", script, "raise")
    assert job.wait_exit(deadline=180) == 1
    assert "ValueError: bad batch" in job.stderr
    (path,) = logs.glob(f"latest/attempt_0/{FILE_PREFIX}1")
    (dump,) = find_dumps([str(path)]).dumps
    assert dump.collectives[-1].where == "train.py:8 in <module>"
    assert {line for line in job.stdout.splitlines() if "compiler" in line} == {"compiler: False"}


def test_values_of_the_user_stay() -> None:
    """A size or a path that the user has set is not replaced."""
    logs = LogsDest(error_files={0: "/logs/attempt_0/0/error.json"})
    envs: dict[int, dict[str, str]] = {0: {contract.ENV_RANK: "4"}}
    FlightRecorder().switch_on(envs, logs, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_FR_DUMP_TEMP_FILE": "/mine_"})
    assert "TORCH_FR_BUFFER_SIZE" not in envs[0]
    assert envs[0]["TORCH_FR_DUMP_TEMP_FILE"] == "/mine_"
    FlightRecorder().switch_on(envs, logs, {})
    assert envs[0]["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert envs[0]["TORCH_FR_DUMP_TEMP_FILE"] == f"/logs/attempt_0/{FILE_PREFIX}"


def test_workers_without_torch_are_left_alone(launch: Launch, tmp_path: Path) -> None:
    """A worker that never imports torch.distributed has no thread of ours, and its children not the variable."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, subprocess, sys, threading\n"
        "assert threading.active_count() == 1\n"
        f"assert {contract.ENV_FLIGHT_RECORDER!r} not in os.environ\n"
        "assert 'socket' not in sys.modules\n"
        "sys.exit(3)\n",
        encoding="utf-8",
    )
    job = launch("--flight-recorder", script)
    assert job.wait_exit() == 3
    assert "recorder" not in job.stderr


def test_a_worker_that_does_not_answer_holds_nothing_up() -> None:
    """The loop goes on while dumps are awaited; a second Ctrl-C ends the wait, as its wait_limit does."""
    recorder, envs = FlightRecorder(), {0: {contract.ENV_RANK: "0"}}
    recorder.switch_on(envs, LogsDest(error_files={0: "/logs/attempt_0/0/error.json"}), {})
    with socket.socket(socket.AF_UNIX) as listener, Loop() as loop:
        listener.bind(f"\0{envs[0][contract.ENV_FLIGHT_RECORDER]}")
        listener.listen()
        events: list[str] = []
        question = recorder.collect(loop, lambda: events.append("interrupted"), wait_limit=1e6)
        loop.call_soon(lambda: events.append("loop"))
        loop.call_later(0.05, question.finish)
        assert loop.run_until(lambda: len(events) == 2, loop.now() + 60)
        question.finish()
        assert events == ["loop", "interrupted"]
        recorder.collect(loop, lambda: events.append("late"), wait_limit=0.05)
        assert loop.run_until(lambda: events[-1] == "late", loop.now() + 60)
        counts: list[dict[int, str]] = []
        recorder.count(loop, counts.append)
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                if connection.recv(1) == contract.RECORDER_COUNT:
                    connection.sendall(b"open 0=2/-1/1")
        assert loop.run_until(lambda: bool(counts), loop.now() + 60)
        assert counts == [{0: "open 0=2/-1/1"}]


@pytest.mark.system  # for another owner of the socket
def test_another_user_can_not_answer_for_a_worker() -> None:
    """A made-up answer would hide a hang: the user at the other end is checked, and each attempt has other names."""
    recorder, envs = FlightRecorder(), {0: {contract.ENV_RANK: "0"}}
    names = set()
    for _ in range(2):
        recorder.switch_on(envs, LogsDest(error_files={0: "/logs/attempt_0/0/error.json"}), {})
        names.add(envs[0][contract.ENV_FLIGHT_RECORDER].rpartition("-")[2])
    assert [len(name) for name in names] == [16, 16]
    with socket.socket(socket.AF_UNIX) as listener, Loop() as loop:
        listener.bind(f"\0{envs[0][contract.ENV_FLIGHT_RECORDER]}")
        os.seteuid(54321)
        try:
            listener.listen()  # the kernel notes the user of this moment
        finally:
            os.seteuid(0)
        counts: list[dict[int, str]] = []
        recorder.count(loop, counts.append)
        assert loop.run_until(lambda: bool(counts), loop.now() + 60)
        assert counts == [{}]
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b""  # nobody asked


# --- links between nodes ----------------------------------------------------------------------------------------------
_LEASE = 0.2


class Sides:
    """Two connected sides, each on a loop of its own, so that one of them can stand still.

    Attributes:
        near: One side; `far` is the other one.
        ends: How the connection has ended on each side.
    """

    def __init__(self) -> None:
        self.loops = Loop(), Loop()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.sockets = socket.create_connection(listener.getsockname()), listener.accept()[0]
        self.ends: list[list[str]] = [[], []]
        self.near, self.far = (
            Link(loop, one, lease=_LEASE) for loop, one in zip(self.loops, self.sockets, strict=True)
        )
        for link, ends in zip((self.near, self.far), self.ends, strict=True):
            link.on_end = lambda how, _, ends=ends: ends.append(how)  # type: ignore[misc]

    def run(self, side: int) -> str:
        """Let one side run until its connection has ended, and return how."""
        loop, ends = self.loops[side], self.ends[side]
        assert loop.run_until(lambda: bool(ends), loop.now() + DEADLINE)
        return ends[0]

    def close(self) -> None:
        """Close all."""
        for link, loop in zip((self.near, self.far), self.loops, strict=True):
            link.close()
            loop.close()


@pytest.fixture
def sides() -> Iterator[Sides]:
    """Return two connected sides."""
    made = Sides()
    yield made
    made.close()


def test_a_side_that_gives_up_the_other_is_not_dead_for_it(sides: Sides) -> None:
    """A side that stands still longer than the lease reads, when it goes on, that the other one lives."""
    sides.near.offer(b'{"a": 1}')
    assert sides.run(0) == SILENT
    assert sides.run(1) == BROKEN


def test_the_end_of_a_process_is_death(sides: Sides) -> None:
    """The kernel closes the connection of a process that ends; nothing was said before."""
    sides.sockets[0].shutdown(socket.SHUT_RDWR)
    assert sides.run(1) == ENDED


def test_a_side_that_parts_lives(sides: Sides) -> None:
    """A process that closes a connection says so before."""
    sides.near.part()
    assert sides.run(1) == BROKEN


def test_an_end_in_the_middle_of_a_frame_proves_nothing(sides: Sides) -> None:
    """It may be a living process that could not send the rest, nor say that it parts."""
    sides.sockets[0].send(encode_frame(DOCUMENT, {"a": 1})[:-1])
    sides.sockets[0].shutdown(socket.SHUT_RDWR)
    assert sides.run(1) == BROKEN


def test_a_reset_proves_nothing(sides: Sides) -> None:
    """Networks reset connections as well as kernels of processes that were killed."""
    sides.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sides.loops[0].remove_reader(sides.near.fileno())
    sides.sockets[0].close()
    assert sides.run(1) == BROKEN


@pytest.mark.parametrize(("number", "how"), [(errno.ETIMEDOUT, SILENT), (errno.ECONNRESET, BROKEN)])
def test_an_error_that_a_write_was_told_is_not_forgotten(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, number: int, how: str
) -> None:
    """The kernel tells an error once: to a write, after which reading finds the end of the stream, as after a death."""

    class Failing:
        """A socket whose next write is told the error."""

        def __getattr__(self, name: str) -> object:
            return getattr(sides.sockets[1], name)

        def send(self, _: bytes) -> int:
            raise OSError(number, "")

    monkeypatch.setattr(sides.far, "_socket", Failing())
    sides.far.send({"kind": "a message"})
    sides.sockets[0].shutdown(socket.SHUT_RDWR)
    assert sides.run(1) == how
