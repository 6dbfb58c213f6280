"""Checks after each import whether the process can still be forked, so that the right module is named.

A fork has only the thread that forked; other threads' work is never done. It can't use a GPU that was initialised
before, and is not the parent of its parent's children. Kernel objects (sockets, pipes, epoll, shared memory with its
locks, file positions) are shared by all forks, while each exec would have its own. A fork gets its orders and streams
through descriptors: it needs the standard ones as they were, and room for more. Reads of the environment are checked by
`environment_watch`.

Native thread pools that survive a fork are allowed: they end their threads before the fork, or start new ones after it.
The library of a thread is read from its stack, since threads have no names of their own. GNU OpenMP is not allowed: its
pool hangs in a fork.
"""

from __future__ import annotations

import os
import stat
import sys
import time

from elastic_run.multiprocessing.warm.environment_watch import EnvironmentWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

#: Beginnings of libraries whose threads survive a fork: pthread_atfork in OpenBLAS (numpy, and torch through it),
#: in LLVM's and Intel's OpenMP, which is MKL's, and in Arrow's pools and its jemalloc (pandas, datasets).
_FORK_SAFE = ("libarrow", "libopenblas", "libscipy_openblas", "libomp", "libiomp5", "libmkl_")
#: Libraries at the bottom of every stack, and inside every wait.
_EVERYBODYS = ("libc.", "libc-", "ld-linux", "ld-musl", "libpthread", "[vdso]")
_DEVICES = (
    *("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/kfd", "/dev/dri/", "/dev/dxg"),
    *("/dev/accel", "/dev/davinci", "/dev/infiniband/"),
)
#: Kernel objects behind a descriptor, with their names in a message.
_SHARED_KINDS = {"socket:": "a socket", "pipe:": "a pipe", "anon_inode:": "a descriptor of the kernel's"}
_STACK_BYTES = 1 << 14
#: Seconds in which a new thread should begin to wait for work, and seconds between two looks, since nothing reports it.
#: A thread that waits at the first look, as usual, costs no time.
_SETTLED = 1.0
_LOOK = 0.005
_POINTER_BYTES = 8
_NOT_SURVIVED = "which a fork doesn't survive"
_SHARED = "which all workers would share"
_FROM_THE_START = "which workers would have from their start"
#: A limit as /proc/PID/limits names it, and the width of the names there.
_OPEN_FILES = "Max open files"
_LIMIT_NAME_WIDTH = 26


class ImportWatch:
    """Finds what Python's start and imports leave in this process; made before them, and closed afterwards."""

    def __init__(self) -> None:
        # Python's own descriptors are close-on-exec; the inheritable ones were there from the beginning.
        self._descriptors = {each for each in _list_descriptors().items() if _is_inheritable(each[0])}
        self._standard = _list_standard_descriptors()
        self._limits = _read_limits()
        self._memory = set(_list_shared_memory())
        self.environment = EnvironmentWatch()

    def close(self) -> None:
        """Let the environment be read without a note."""
        self.environment.close()

    def find_hazard(self, own: Collection[int] = (), *, variables: Collection[str] = ()) -> str:
        """Return the reason why the process can't be forked, as the end of a sentence about a module; or ""."""
        return (
            self._find_limit()  # first: without room for a descriptor nothing else can be read
            or self._find_standard_descriptor()
            or _find_gpu()  # before the threads: the driver starts one
            or _find_threads()
            or _find_children()
            or self._find_descriptor(own)
            or self._find_memory()
            or _find_temporary_directory()
            or self.environment.find_hazard(variables)
        )

    def _find_limit(self) -> str:
        limits = _read_limits()
        if not limits and self._limits:
            return f"lowers a limit ({_OPEN_FILES}), {_FROM_THE_START}"
        lower = (name for name, before in self._limits.items() if any(map(float.__lt__, limits[name], before)))
        name = next(lower, "")
        return f"lowers a limit ({name}), {_FROM_THE_START}" if name else ""

    def _find_standard_descriptor(self) -> str:
        now = _list_standard_descriptors()
        changed = next((each for each, target in self._standard.items() if now.get(each) != target), None)
        return "" if changed is None else f"closes or replaces descriptor {changed}, {_FROM_THE_START}"

    def _find_descriptor(self, own: Collection[int]) -> str:
        for descriptor, target in _list_descriptors().items():
            if descriptor in own or (descriptor, target) in self._descriptors:
                continue
            kind = next((name for start, name in _SHARED_KINDS.items() if target.startswith(start)), "")
            if kind:
                return f"leaves {kind} open ({target}), {_SHARED}"
            if _has_place(descriptor):
                return f"leaves {target} open, with a position in the file {_SHARED}"
        return ""

    def _find_memory(self) -> str:
        found = [path for path in _list_shared_memory() if path not in self._memory]
        return f"has shared memory or a lock in it ({found[0]}), {_SHARED}" if found else ""


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False  # the descriptor of the listing itself


def _has_place(descriptor: int) -> bool:
    """Whether a descriptor is a file in which reading has a place: both read and written, or not read to its end."""
    try:
        status = os.fstat(descriptor)
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
            fields = dict(line.split(None, 1) for line in lines)
        mode = int(fields["flags:"], 8) & os.O_ACCMODE
        is_half_read = mode != os.O_WRONLY and int(fields["pos:"]) < status.st_size
        return stat.S_ISREG(status.st_mode) and (is_half_read or mode == os.O_RDWR)
    except (OSError, KeyError, ValueError):
        return False


def _find_temporary_directory() -> str:
    """Look for directories that Python removes at the end of each process that knows them."""
    tempfile, weakref = sys.modules.get("tempfile"), sys.modules.get("weakref")
    if tempfile is None or weakref is None:
        return ""
    cleanup = tempfile.TemporaryDirectory._cleanup.__func__  # noqa: SLF001 - nothing else tells
    for finalizer in weakref.finalize._registry.values():  # noqa: SLF001 - ditto
        if getattr(finalizer.func, "__func__", None) is cleanup:
            return f"makes a temporary directory ({finalizer.args[0]}), which the first worker that ends would remove"
    return ""


def _list_shared_memory() -> list[str]:
    """Return the shared writable mappings, whose changes all forks see."""
    return [each.name or "without a name" for each in _list_mappings() if each.rights.startswith("rw-s")]


def _find_threads() -> str:
    import _thread

    if _thread._count():  # noqa: SLF001 - what `threading` knows is less
        return f"starts a thread{_name_python_threads()}, {_NOT_SURVIVED}"
    tasks, give_up_at = _list_other_tasks(), time.monotonic() + _SETTLED
    code = [each for each in _list_mappings() if "x" in each.rights] if tasks else []
    for task in tasks:
        owner = _await_owner(task, code, give_up_at)
        if not owner.startswith(_FORK_SAFE):
            return f"starts a native thread ({owner}), {_NOT_SURVIVED}"
    return ""


def _await_owner(task: str, code: Sequence[_Mapping], give_up_at: float) -> str:
    """Return the library of a thread once it waits; before, the library can't be known."""
    while (owner := _find_owner(task, code)) == "" and time.monotonic() < give_up_at:
        time.sleep(_LOOK)
    return owner or "of an unknown library"


def _name_python_threads() -> str:
    threading = sys.modules.get("threading")
    if threading is None:
        return ""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if thread is not main]
    return f" ({', '.join(names)})" if names else ""


def _list_other_tasks() -> list[str]:
    me = str(os.getpid())
    try:
        return [task for task in os.listdir("/proc/self/task") if task != me]
    except OSError:
        return []


def _find_owner(task: str, code: Sequence[_Mapping]) -> str | None:
    """Return the library that a thread waits in, the first on its stack that is not in every stack.

    Returns "" if it can't be known now, None if it never can.
    """
    try:
        with open(f"/proc/self/task/{task}/syscall", encoding="ascii") as call:
            words = call.read().split()
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(int(words[-2], 16))
            stack = memory.read(_STACK_BYTES)
    except (ValueError, IndexError):
        return ""  # it runs
    except OSError:
        return None
    for start in range(0, len(stack), _POINTER_BYTES):
        pointer = int.from_bytes(stack[start : start + _POINTER_BYTES], sys.byteorder)
        name = next((os.path.basename(each.name) for each in code if each.first <= pointer < each.last), "")
        if name and not name.startswith(_EVERYBODYS):
            return name
    return ""


class _Mapping:
    """A part of this process's memory, as a line of /proc/self/maps tells of it."""

    __slots__ = ("first", "last", "name", "rights")

    def __init__(self, line: str) -> None:
        span, self.rights, _, _, _, *name = line.split(maxsplit=5)
        first, _, last = span.partition("-")
        self.first, self.last = int(first, 16), int(last, 16)
        self.name = name[0].strip() if name else ""


def _list_mappings() -> list[_Mapping]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return [_Mapping(line) for line in maps]
    except OSError:
        return []


def _find_gpu() -> str:
    for name in ("torch.cuda", "torch.xpu"):
        module: Any = sys.modules.get(name)
        if module is not None and module.is_initialized():
            return f"initialises {name.removeprefix('torch.').upper()}, {_NOT_SURVIVED}"
    for target in _list_descriptors().values():
        if target.startswith(_DEVICES):
            return f"opens a device ({target}), {_NOT_SURVIVED}"
    return ""


def _list_descriptors() -> dict[int, str]:
    found = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for name in names:
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # the descriptor of the listing itself
    return found


def _list_standard_descriptors() -> dict[int, str]:
    return {descriptor: target for descriptor, target in _list_descriptors().items() if descriptor <= 2}  # noqa: PLR2004


def _read_limits() -> dict[str, tuple[float, float]]:
    """Return the soft and the hard limits by name, without the module `resource`, which a worker need not have."""
    try:
        with open("/proc/self/limits", encoding="ascii") as file:
            lines = file.read().splitlines()[1:]
    except OSError:
        return {}
    values = {line[:_LIMIT_NAME_WIDTH].strip(): line[_LIMIT_NAME_WIDTH:].split()[:2] for line in lines}
    return {name: (_read_limit(soft), _read_limit(hard)) for name, (soft, hard) in values.items()}


def _read_limit(text: str) -> float:
    return float("inf") if text == "unlimited" else float(text)


def _find_children() -> str:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    return f"starts a process, {_NOT_SURVIVED}"
