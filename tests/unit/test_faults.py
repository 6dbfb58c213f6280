"""Faults that a user asks for: what is read, what the seed chooses, and what a worker makes."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import weakref

import pytest

from elastic_run.cli.faults import read_faults
from elastic_run.core.agent.faults import Fault, plan_faults
from elastic_run.diagnosis import fault_thread
from elastic_run.run import run_command

#: As a message names them.
_ALL_KINDS = "kill, stop, signal, agent, freeze, raise, raise-in-thread, exit, sleep, hold-gil, oom"


def test_what_is_read() -> None:
    """A fault has a kind, a time, a rank, an attempt and a seed, all but the kind with a default."""
    assert read_faults(
        "kill,stop=5s@1m..2m:rank=any:attempt=all:seed=7,signal=SIGSEGV@3:rank=2,agent,exit=7,exit,raise,"
        "freeze=20s,oom:rank=3"
    ) == (
        Fault(signal.SIGKILL),
        Fault(signal.SIGSTOP, after=60.0, before=120.0, rank=None, attempt=None, pause=5.0, seed=7),
        Fault(signal.SIGSEGV, after=3.0, before=3.0, rank=2),
        Fault(0, action="agent"),
        Fault(0, action="exit 7"),
        Fault(0, action="exit 1"),
        Fault(0, action="raise"),
        Fault(0, action="freeze", pause=20.0),
        Fault(0, rank=3, action="oom"),
    )
    assert read_faults("") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "kil",
            f"a fault 'kil', which is none of {_ALL_KINDS}",
        ),
        ("kill,", "a fault '', which is none of"),
        ("kill=3", "kill=3, but kill takes no value"),
        ("exit=256", "exit=256, which is above 255"),
        ("exit=x", "exit=x, which is not a number from 0 up"),
        ("raise=x", "raise=x, but raise takes no value"),
        ("freeze=x", "the time 'x', which is"),
        ("signal=9", "signal=9, which is not the name of a signal"),
        ("kill@soon", "the time 'soon', which is not a number of seconds"),
        ("kill@", "the time '', which is not a number of seconds"),
        ("stop=x", "the time 'x', which is"),
        ("kill@5..3", "the time 5..3, whose end is before its start"),
        ("kill:rank=x", "rank=x, which is not a number from 0 up, nor any"),
        ("kill:seed=any", "seed=any, which is not a number from 0 up"),
        ("kill:rang=1", "'rang=1', and the keys are rank, attempt, seed, each at most once"),
        ("kill:rank=1:rank=2", "'rank=1:rank=2', and the keys are rank"),
    ],
)
def test_what_is_refused(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong fault is one line that names flag, value and what is allowed, and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        run_command(["--inject-fault", text, __file__])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"--inject-fault: {text!r} has {said}" in err


def test_a_rank_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank above the job's last one is refused before anything starts."""
    with pytest.raises(SystemExit) as ended:
        run_command(["--nnodes=1:2", "--nproc-per-node=2", "--inject-fault=kill:rank=4", __file__])
    assert ended.value.code == 2
    assert "'kill:rank=4' names rank 4, but the job has ranks 0 to 3" in capsys.readouterr().err


def test_faults_of_an_attempt() -> None:
    """Only the faults of the attempt and of ranks that the round has are planned."""
    faults = (Fault(9, rank=1), Fault(9, rank=5), Fault(9, rank=0, attempt=1), Fault(9, rank=2, attempt=None))
    assert [plan.rank for plan in plan_faults(faults, attempt=0, world_size=4)] == [1, 2]
    assert [plan.rank for plan in plan_faults(faults, attempt=1, world_size=4)] == [0, 2]


def test_who_makes_a_fault() -> None:
    """A worker makes the faults that need its own process; the agent sends signals, and makes those of its node."""
    faults = read_faults("exit=7,oom,kill,agent,freeze")
    assert [fault.is_of_worker for fault in faults] == [True] * 2 + [False] * 3


def test_a_seed_chooses_the_same_each_time() -> None:
    """What a seed chooses is the same at each call, within its bounds, and different for other seeds."""
    faults = [Fault(9, after=10.0, before=20.0, rank=None, attempt=None, seed=seed) for seed in range(200)]
    planned = plan_faults(faults, attempt=0, world_size=4)
    assert plan_faults(faults, attempt=0, world_size=4) == planned
    assert {plan.rank for plan in planned} == {0, 1, 2, 3}
    assert all(10.0 <= plan.delay < 20.0 for plan in planned)
    assert len({plan.delay for plan in planned}) > 190


class Piece:
    """A piece of memory."""


class Size:
    """Stands for the size of a piece of memory. The memory is full after four pieces."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Piece]] = []

    def __rmul__(self, _: bytes) -> Piece:
        if len(self.made) == 4:
            raise MemoryError
        piece = Piece()
        self.made.append(weakref.ref(piece))
        return piece


def test_memory_is_taken_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault takes memory until none is left, and makes this process the first choice of the kernel's OOM killer."""
    score, size = io.StringIO(), Size()
    monkeypatch.setattr(score, "close", lambda: None)
    monkeypatch.setattr(fault_thread, "open", lambda *_, **__: score, raising=False)
    monkeypatch.setattr(fault_thread, "_PIECE", size)
    with pytest.raises(MemoryError) as raised:
        fault_thread.take_memory()
    assert [piece() is not None for piece in size.made] == [True] * 4
    assert (score.getvalue(), raised.type) == ("1000", MemoryError)


def test_the_youngest_thread_of_the_program_is_the_other_one() -> None:
    """The main thread and threads of elastic-run do not count. If the program has no other thread, none is found."""
    gate = threading.Event()
    ours = threading.Thread(target=gate.wait, name="faults")
    others = [threading.Thread(target=gate.wait) for _ in range(2)]
    before = {*threading.enumerate()}
    try:
        for thread in (*others, ours):
            thread.start()
        assert fault_thread._find_other_thread() is others[1]
    finally:
        gate.set()
        for thread in (*others, ours):
            thread.join()
    if before == {threading.main_thread()}:
        with pytest.raises(LookupError, match="it has no thread beside its main thread"):
            fault_thread._find_other_thread()


def test_a_request_that_cannot_be_met_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the worker's stderr, with the reason; the next request is met all the same."""
    own, agent = socket.socketpair()
    told: list[bytes] = []
    exits: list[int] = []

    class Listener:
        """A listener with one client, which is closed behind it."""

        def __init__(self) -> None:
            self.clients = [(own, "")]

        def accept(self) -> tuple[socket.socket, str]:
            """Return the client."""
            if not self.clients:
                raise OSError
            return self.clients.pop()

        def fileno(self) -> int:
            """Return that it is closed."""
            return -1

    def refuse() -> None:
        message = "no such file"
        raise OSError(message)

    monkeypatch.setattr(os, "write", lambda _, text: told.append(text))
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(fault_thread, "take_memory", refuse)
    with agent:
        agent.send(b"oom")
        fault_thread._wait(Listener())  # type: ignore[arg-type] # it stands for one
    assert told == [f"elastic-run: oom has no effect in pid {os.getpid()}: no such file\n".encode()]
