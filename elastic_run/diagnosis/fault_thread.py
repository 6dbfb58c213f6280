"""Makes a fault of --inject-fault inside this process when the agent asks for it. Runs in a worker.

Rules
- A line of the .pth file calls `begin` at Python's own start, where the flag has set the variable; without the flag no
  worker has this thread.
- The main thread raises, sleeps or holds the GIL as soon as it runs Python code: a call of C that blocks ends first.
- A module that is to be missing is missing from the start: the variable names it. So is a collective that is to be
  altered from the start: a program of a few collectives may be over before the agent's request.
- The agent's connection for an altered collective stays open: this process answers when that was called.
- Only this process does so: the variable is taken out of the environment, and a fork closes the socket.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

from elastic_run import contract
from elastic_run.core.agent.faults import COLLECTIVE_ACTIONS
from elastic_run.diagnosis.worker_sockets import is_own_user, listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from elastic_run.diagnosis.altered_collectives import Alteration

#: Bytes of the longest request, and seconds that a client gets to send it.
_LONGEST = 64
_WAIT_LIMIT = 1.0
#: Bytes of memory that are taken at a time.
_PIECE = 8 << 20
_NAME = "faults"
#: Altered collectives that the agent has not asked for yet.
_armed: dict[str, list[Alteration]] = {}


class InjectedFaultError(Exception):
    """The exception of `--inject-fault=raise`."""

    def __str__(self) -> str:
        return "--inject-fault asked for it"


def begin() -> None:
    """Wait for requests in a thread; called by the .pth file, or in the fork of a template."""
    name, *from_start = os.environ.pop(contract.ENV_FAULTS).split()
    if missing := [word for word in from_start if word not in COLLECTIVE_ACTIONS]:
        sys.meta_path.insert(0, _MissingModules(missing))
    for word in from_start:
        if word in COLLECTIVE_ACTIONS:
            _armed.setdefault(word, []).append(_alter(word))
    listener = listen(name)
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
                _perform(connection, *request.split())
            except (LookupError, OSError) as error:
                os.write(2, f"elastic-run: {request} has no effect in pid {os.getpid()}: {error}\n".encode())


def _read(connection: socket.socket) -> str:
    connection.settimeout(_WAIT_LIMIT)
    try:
        return connection.recv(_LONGEST).decode() if is_own_user(connection) else ""
    except OSError:
        return ""


def _perform(connection: socket.socket, action: str = "", value: str = "") -> None:
    if action == "raise":
        _raise_in(threading.main_thread())
    elif action == "raise-in-thread":
        _raise_in(_find_other_thread())
    elif action == "exit":
        os._exit(int(value))
    elif action == "oom":
        take_memory()
    elif action == "disk-full":
        from elastic_run.diagnosis.full_disk import fill_disks

        fill_disks()
    elif action in _IN_MAIN_THREAD:
        ctypes.pythonapi.Py_AddPendingCall(_IN_MAIN_THREAD[action], None)
    elif action:
        armed = _armed.get(action)
        alteration = armed.pop() if armed else _alter(action)
        alteration.answer_on(connection.dup())


def _alter(action: str) -> Alteration:
    """Alter the next collective, as soon as the program has imported torch.distributed."""
    from elastic_run.diagnosis.altered_collectives import Alteration

    alteration = Alteration(action)
    if not alteration.begin():
        threading.Thread(target=alteration.begin_late, name=_NAME, daemon=True).start()
    return alteration


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


class _MissingModules:
    """Finds none of some modules, and lets no other finder look for them.

    Args:
        names: Their names; a template may have imported them already.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        for module in [name for name in sys.modules if self._has(name)]:
            del sys.modules[module]

    def _has(self, name: str) -> bool:
        return any(name == missing or name.startswith(f"{missing}.") for missing in self._names)

    def find_spec(self, name: str, *_: object) -> None:
        """Refuse an import as Python does where no module is found."""
        if self._has(name):
            message = f"No module named {name!r}"
            raise ModuleNotFoundError(message, name=name)


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
