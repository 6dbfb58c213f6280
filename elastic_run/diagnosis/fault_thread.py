"""Makes a fault of --inject-fault inside this process when the agent asks for it. Runs in a worker.

A line of the .pth file calls `begin` at Python's own start, where the flag has set the variable; the variable is taken
out of the environment, and a fork closes the socket, so that only this process does so. The main thread raises, sleeps
or holds the GIL as soon as it runs Python code: a call of C that blocks ends first.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

from elastic_run import contract
from elastic_run.diagnosis.recorder import is_own_user, listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

#: Bytes of the longest request, and seconds that a client gets to send it.
_LONGEST = 64
_WAIT_LIMIT = 1.0
#: Bytes of memory that are taken at a time.
_PIECE = 8 << 20
_NAME = "faults"


class InjectedFaultError(Exception):
    """The exception of `--inject-fault=raise`."""

    def __str__(self) -> str:
        return "--inject-fault asked for it"


def begin() -> None:
    """Wait for requests in a thread; called by the .pth file, or in the fork of a template."""
    listener = listen(os.environ.pop(contract.ENV_FAULTS))
    threading.Thread(target=_wait, args=(listener,), name=_NAME, daemon=True).start()


def _wait(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            continue
        with connection:
            request = _read(connection)
            try:
                _perform(*request.split())
            except (LookupError, OSError) as error:
                os.write(2, f"elastic-run: {request} has no effect in pid {os.getpid()}: {error}\n".encode())


def _read(connection: socket.socket) -> str:
    connection.settimeout(_WAIT_LIMIT)
    try:
        return connection.recv(_LONGEST).decode() if is_own_user(connection) else ""
    except OSError:
        return ""


def _perform(action: str = "", value: str = "") -> None:
    if action == "raise":
        _raise_in(threading.main_thread())
    elif action == "raise-in-thread":
        _raise_in(_find_other_thread())
    elif action == "exit":
        os._exit(int(value))
    elif action == "oom":
        take_memory()
    elif action in _IN_MAIN_THREAD:
        ctypes.pythonapi.Py_AddPendingCall(_IN_MAIN_THREAD[action], None)


def _raise_in(thread: threading.Thread) -> None:
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(InjectedFaultError))


def _find_other_thread() -> threading.Thread:
    """Return the youngest thread of the program beside the main thread."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and each.name != _NAME]
    if not others:
        message = "it has no thread beside its main thread"
        raise LookupError(message)
    return others[-1]


def take_memory() -> None:
    """Take memory until the kernel's OOM killer ends this process, and no other one of the control group."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    taken = []
    while True:
        taken.append(b"\1" * _PIECE)


def sleep_for_ever(_: int | None) -> int:
    """Sleep in Python; the name stands in the stacks."""
    while True:
        time.sleep(3600)


def hold_gil(_: int | None) -> int:
    """Wait for a lock in C, without giving up the GIL."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    return int(libc.pthread_mutex_lock(mutex))


_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_IN_MAIN_THREAD = {"sleep": _PENDING_CALL(sleep_for_ever), "hold-gil": _PENDING_CALL(hold_gil)}
