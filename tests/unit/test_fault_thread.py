"""Faults that `--inject-fault` makes inside a worker. Only those that do not end the test's own process are here."""

from __future__ import annotations

import io
import os
import socket
import threading
import weakref

import pytest

from elastic_run.diagnosis import fault_thread


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
