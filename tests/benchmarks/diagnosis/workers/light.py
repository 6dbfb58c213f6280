"""A worker without torch: after a moment the rank that is told to has its fault, the others wait."""

import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

FAULT, RANK = sys.argv[1], int(sys.argv[2])


class StepTookTooLong(Exception):
    """Raised from another thread."""


def raise_error() -> None:
    """Fail as a program does."""
    raise ValueError("bad batch")


def fill_disk() -> None:
    """Write to a disk that is full."""
    with open("/dev/full", "w", buffering=1, encoding="ascii") as file:
        print("a checkpoint", file=file)


def import_missing() -> None:
    """Import what is not there."""
    importlib.import_module("tokenizer_of_ours")


def import_new_name() -> None:
    """Import what this version of a module does not have."""
    exec("from email import scaled_mm")  # noqa: S102 - type checkers look into imports


def meet_other_version() -> None:
    """Fail as two releases of a library do that talk to each other."""
    raise RuntimeError("tensor metadata of another length was received")


def raise_from_thread() -> None:
    """Be interrupted by a watchdog thread in the middle of a step."""
    main = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    threading.Thread(target=lambda: raise_in(main, ctypes.py_object(StepTookTooLong))).start()
    while True:
        time.sleep(0.001)


def take_memory() -> None:
    """Take memory until the kernel's OOM killer ends this process."""
    taken = []
    while True:
        taken.append(bytearray(b"\1" * (8 << 20)))


def take_port() -> None:
    """Bind a port that somebody has."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        socket.create_server(first.getsockname())


def walk() -> None:
    """Make steps for ever, slow ones where the fault is."""
    pause = 2.0 if IS_PLANTED else 0.05
    while True:
        time.sleep(pause)
        os.write(1, b"step\n")


FAULTS: dict[str, Callable[[], object]] = {
    "exception": raise_error,
    "async exception": raise_from_thread,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit code": lambda: sys.exit(7),
    "OOM kill": take_memory,
    "disk full": fill_disk,
    "disk full on one node": fill_disk,
    "import error": import_missing,
    "import error on one node": import_missing,
    "port taken": take_port,
    "port taken on one node": take_port,
    "wrong version": import_new_name,
    "wrong version on one node": meet_other_version,
    "host dark": signal.pause,
    "agent killed": signal.pause,
    "host slow": walk,
}
IS_PLANTED = int(os.environ["GROUP_RANK"]) == RANK // 2 if FAULT == "host slow" else int(os.environ["RANK"]) == RANK
if IS_PLANTED:
    time.sleep(0.1)
    os.write(1, f"planted {time.time()}\n".encode())
    FAULTS[FAULT]()
if FAULT == "host slow":
    walk()
signal.pause()
