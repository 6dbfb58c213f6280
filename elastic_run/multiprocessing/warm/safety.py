"""What a process must not have if it is to be forked, looked for after each import so that the right module is blamed.

A fork has one thread, the one that forked; whatever the others were about to do is never done. It can't use a GPU that
was initialised before, shares its parent's sockets, and is no parent of its parent's children.

Native pools that are known to take a fork well are let through: before it they end their threads, or afterwards they
start anew. A thread's library is read off its stack, since threads have no names of their own. GNU OpenMP isn't on the
list: its pool hangs in a fork.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Beginnings of libraries whose threads take a fork well: pthread_atfork in OpenBLAS (numpy, and torch through it),
#: and in LLVM's and Intel's OpenMP, which is MKL's.
_FORK_SAFE = ("libopenblas", "libscipy_openblas", "libomp", "libiomp5", "libmkl_")
#: What is at the bottom of every stack, and inside every wait.
_EVERYBODYS = ("libc.", "libc-", "ld-linux", "ld-musl", "libpthread", "[vdso]")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/davinci")
_STACK_BYTES = 1 << 14
#: Seconds in which a thread that was just started should wait for work, and between two looks: nothing tells that it
#: does, and one that is there by the first look, as usual, costs none.
_SETTLED = 1.0
_LOOK = 0.005
_POINTER_BYTES = 8


def find_hazard() -> str:
    """Return what this process has that can't be forked, as the end of a sentence about a module; empty for nothing."""
    return _find_threads() or _find_gpu() or _find_descriptors() or _find_children()


def _find_threads() -> str:
    import _thread  # noqa: PLC0415 - built in

    if _thread._count():  # noqa: SLF001 - what `threading` knows is less
        return f"starts a thread{_name_python_threads()}"
    owners = {owner for task in _other_tasks() if not (owner := _await_owner(task)).startswith(_FORK_SAFE)}
    return f"starts a native thread ({', '.join(sorted(owners))})" if owners else ""


def _await_owner(task: str) -> str:
    """Return the library of a thread, once it waits somewhere: one that is just starting can't be told."""
    give_up_at = time.monotonic() + _SETTLED
    while not (owner := _find_owner(task)) and time.monotonic() < give_up_at:
        time.sleep(_LOOK)
    return owner or "of an unknown library"


def _name_python_threads() -> str:
    threading = sys.modules.get("threading")
    if threading is None:
        return ""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if thread is not main]
    return f" ({', '.join(names)})" if names else ""


def _other_tasks() -> list[str]:
    me = str(os.getpid())
    try:
        return [task for task in os.listdir("/proc/self/task") if task != me]
    except OSError:
        return []


def _find_owner(task: str) -> str:
    """Return the library that a thread waits in, the first on its stack that isn't everybody's; empty if unknown."""
    try:
        with open(f"/proc/self/task/{task}/syscall", encoding="ascii") as call:
            stack = int(call.read().split()[-2], 16)
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(stack)
            words = memory.read(_STACK_BYTES)
    except (OSError, ValueError, IndexError):
        return ""
    code = _read_code()
    for start in range(0, len(words), _POINTER_BYTES):
        pointer = int.from_bytes(words[start : start + _POINTER_BYTES], sys.byteorder)
        name = next((name for first, last, name in code if first <= pointer < last), "")
        if name and not name.startswith(_EVERYBODYS):
            return name
    return ""


def _read_code() -> list[tuple[int, int, str]]:
    """Return where code lies in this process, and the names of its files."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, rights, _, _, _, *path = line.split(maxsplit=5)
            if "x" in rights:
                first, _, last = span.partition("-")
                found.append((int(first, 16), int(last, 16), os.path.basename(path[0].strip()) if path else ""))
    return found


def _find_gpu() -> str:
    for name in ("torch.cuda", "torch.xpu"):
        module: Any = sys.modules.get(name)
        if module is not None and module.is_initialized():
            return f"initialises {name.removeprefix('torch.').upper()}"
    for target in _descriptors().values():
        if target.startswith(_DEVICES):
            return f"opens a device ({target})"
    return ""


def _find_descriptors() -> str:
    for fd, target in _descriptors().items():
        if target.startswith("socket:") and fd > 2 and _is_listening(fd):  # noqa: PLR2004 - above the standard ones
            return "listens on a socket"
    return ""


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # the descriptor of the listing itself
    return found


def _is_listening(fd: int) -> bool:
    import _socket  # noqa: PLC0415 - imported by now

    copy = _socket.socket(fileno=os.dup(fd))
    try:
        return bool(copy.getsockopt(_socket.SOL_SOCKET, _socket.SO_ACCEPTCONN))
    finally:
        copy.close()


def _find_children() -> str:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    return "starts a process"
