"""A worker without torch: after a moment the rank that is told to has its fault, the others wait.

Where the launcher injects the fault, all of them train. Where it takes the memory, they wait: a rank that asks for
memory while the victim is being ended makes the kernel end another process.
"""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

FAULT, RANK = sys.argv[1], int(sys.argv[2])


def raise_error() -> None:
    """Fail as a program does."""
    raise ValueError("bad batch")


def import_nothing() -> None:
    """Import a module that is not installed."""
    importlib.import_module("colorsys_of_nobody")


def bind_twice() -> None:
    """Serve at a port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        socket.create_server(first.getsockname())


def import_new_name() -> None:
    """Import what this version of a module does not have."""
    exec("from email import scaled_mm")  # noqa: S102 - type checkers look into imports


def meet_other_version() -> None:
    """Fail as two releases of a library do that talk to each other."""
    raise RuntimeError("tensor metadata of another length was received")


def fill_disk() -> None:
    """Write a checkpoint to a disk that is full."""
    with open("/dev/full", "w", encoding="ascii") as file:
        file.write("a checkpoint")


def walk() -> None:
    """Make steps for ever, slow ones where the fault is."""
    pause = 2.0 if IS_PLANTED else 0.05
    while True:
        time.sleep(pause)
        os.write(1, b"step\n")


def train() -> None:
    """Make steps for ever, each with a checkpoint."""
    while True:
        with open(f"checkpoint-{os.getpid()}", "w", encoding="ascii") as file:
            file.write("a checkpoint")
        time.sleep(0.05)


FAULTS: dict[str, Callable[[], object]] = {
    "exception": raise_error,
    "disk full": fill_disk,
    "disk full on one node": fill_disk,
    "import error": import_nothing,
    "import error on one node": import_nothing,
    "port taken": bind_twice,
    "port taken on one node": bind_twice,
    "wrong version": import_new_name,
    "wrong version on one node": meet_other_version,
    "host dark": signal.pause,
    "host slow": walk,
}
if FAULT == "training":
    train()
if FAULT == "waiting":
    signal.pause()
IS_PLANTED = int(os.environ["GROUP_RANK"]) == RANK // 2 if FAULT == "host slow" else int(os.environ["RANK"]) == RANK
if IS_PLANTED:
    time.sleep(0.1)
    os.write(1, f"planted {time.time()}\n".encode())
    FAULTS[FAULT]()
if FAULT == "host slow":
    walk()
signal.pause()
