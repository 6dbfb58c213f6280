"""Makes a fault of --inject-fault inside this process when the agent asks for it. Runs in a worker.

Rules
- A line of the .pth file calls `begin` at Python's own start, where the flag has set the variable; without the flag no
  worker has this thread.
- The main thread raises, sleeps or holds the GIL as soon as it runs Python code: a call of C that blocks ends first.
- Only this process does so: the variable is taken out of the environment, and a fork closes the socket.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time

from elastic_run import contract
from elastic_run.diagnosis.recorder_server import is_own_user

#: Bytes of the longest request, and seconds that a client gets to send it.
_LONGEST = 64
_PATIENCE = 1.0


class InjectedFaultError(Exception):
    """The exception of `--inject-fault=raise`."""

    def __str__(self) -> str:
        return "--inject-fault asked for it"


def begin() -> None:
    """Wait for requests in a thread; called by the .pth file, or in the fork of a template."""
    name = os.environ.pop(contract.ENV_FAULTS)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen()
    os.register_at_fork(after_in_child=listener.close)
    threading.Thread(target=_wait, args=(listener,), name="faults", daemon=True).start()


def _wait(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_PATIENCE)
                request = connection.recv(_LONGEST).decode() if is_own_user(connection) else ""
        except OSError:
            if listener.fileno() < 0:
                return
        else:
            _perform(*request.split())


def _perform(action: str = "", value: str = "") -> None:
    if action == "raise":
        main = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(InjectedFaultError))
    elif action == "exit":
        os._exit(int(value))
    elif action in _IN_MAIN_THREAD:
        ctypes.pythonapi.Py_AddPendingCall(_IN_MAIN_THREAD[action], None)


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
