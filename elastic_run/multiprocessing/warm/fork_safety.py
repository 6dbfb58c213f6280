"""Checks after each import whether the process can still be forked, so that the right module is named.

A fork has only the thread that forked. It can't use a GPU that was initialised before, and is not the parent of its
parent's children. Kernel objects (sockets, pipes, epoll, shared memory with its locks) are shared by all forks. A
template lacks the variables in which workers differ, so a module that reads one of them has the wrong value.

Only what modules do is checked; docs/warm-workers.md lists what goes unnoticed. Native thread pools that survive a fork
are allowed: they end their threads before the fork, or start new ones after it. The library of a thread is read from
its stack, since threads have no names of their own. GNU OpenMP is not allowed: its pool hangs in a fork.
"""

from __future__ import annotations

import os
import sys
import time

from elastic_run import contract
from elastic_run.multiprocessing.fork_exec import has_child, inheritable_descriptors

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
#: Variables that a template doesn't have, or not as its workers will.
_WORKERS_OWN = frozenset(
    (
        *(contract.ENV_RANK, contract.ENV_LOCAL_RANK, contract.ENV_GROUP_RANK, contract.ENV_ROLE_RANK),
        *(contract.ENV_WORLD_SIZE, contract.ENV_LOCAL_WORLD_SIZE, contract.ENV_GROUP_WORLD_SIZE),
        *(contract.ENV_ROLE_WORLD_SIZE, contract.ENV_ROLE_NAME, contract.ENV_MASTER_ADDR, contract.ENV_MASTER_PORT),
        *(contract.ENV_RESTART_COUNT, contract.ENV_MAX_RESTARTS, contract.ENV_RUN_ID, contract.ENV_ERROR_FILE),
        *(contract.ENV_USE_AGENT_STORE, contract.ENV_SIGNALS_TO_HANDLE, contract.ENV_SCALE_UP_SIGNAL),
        *(contract.ENV_TIMER_FILE, contract.ENV_STOP_TIME),
    )
)
#: Variables that differ between workers in some jobs only.
_WORKERS_OWN_SOMETIMES = frozenset((contract.ENV_CUDA_VISIBLE_DEVICES, contract.ENV_HIP_VISIBLE_DEVICES))
#: Modules that read for other modules.
_READING_FOR_OTHERS = frozenset((__name__, "os", "_collections_abc", "collections.abc", "copy"))


class ImportWatch:
    """Finds what Python's start and imports leave in this process; made before them, and closed afterwards.

    It begins in the line of our .pth file. So it covers the later parts of Python's own start (later .pth files,
    `sitecustomize`, `usercustomize`) and the import of modules.
    """

    def __init__(self) -> None:
        # Python's own descriptors are close-on-exec; the inheritable ones were there from the beginning.
        inherited = (0, 1, 2, *inheritable_descriptors())
        self._descriptors = {each for each in _list_descriptors().items() if each[0] in inherited}
        self._memory = set(_list_shared_memory())
        self._reads: dict[str, str] = {}
        self._environs: list[tuple[Any, Any]] = [(each, each.encodekey) for each in (os.environ, os.environb)]
        for environ, encode in self._environs:
            environ.encodekey = self._watch(encode)

    def _watch(self, encode: Any) -> Any:
        """Return a function in the place of the one that each read of a variable calls with its name."""

        def encode_key(key: Any) -> Any:
            name = os.fsdecode(encode(key))
            if name in _WORKERS_OWN or name in _WORKERS_OWN_SOMETIMES:
                self._reads.setdefault(name, _name_reader())
            return encode(key)

        return encode_key

    def close(self) -> None:
        """Note no more reads."""
        for environ, encode in self._environs:
            environ.encodekey = encode

    def find_hazard(self, own: Collection[int] = (), *, variables: Collection[str] = ()) -> str:
        """Return the reason why the process can't be forked, as the end of a sentence about a module; or "".

        `own` are descriptors that it may have, and `variables` further ones that differ between workers.
        """
        return (
            _find_gpu()  # before the threads: the driver starts one
            or _find_threads()
            or (f"starts a process, {_NOT_SURVIVED}" if has_child() else "")
            or self._find_descriptor(own)
            or self._find_memory()
            or self._find_read(variables)
        )

    def _find_descriptor(self, own: Collection[int]) -> str:
        for descriptor, target in _list_descriptors().items():
            kind = next((name for start, name in _SHARED_KINDS.items() if target.startswith(start)), "")
            if kind and descriptor not in own and (descriptor, target) not in self._descriptors:
                return f"leaves {kind} open ({target}), {_SHARED}"
        return ""

    def _find_memory(self) -> str:
        found = [path for path in _list_shared_memory() if path not in self._memory]
        return f"has shared memory or a lock in it ({found[0]}), {_SHARED}" if found else ""

    def _find_read(self, variables: Collection[str]) -> str:
        for name, reader in self._reads.items():
            if name in _WORKERS_OWN or name in variables:
                return f"reads {name}, whose value differs from worker to worker (in {reader})"
        return ""


def _name_reader() -> str:
    """Return the module whose code reads the environment now; it is `site` for a .pth file."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way
    while frame.f_back is not None and frame.f_globals.get("__name__") in _READING_FOR_OTHERS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


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


def _list_shared_memory() -> list[str]:
    """Return the shared writable mappings, whose changes all forks see."""
    return [each.name or "without a name" for each in _list_mappings() if each.rights.startswith("rw-s")]


def _find_gpu() -> str:
    for name in ("torch.cuda", "torch.xpu"):
        module: Any = sys.modules.get(name)
        if module is not None and module.is_initialized():
            return f"initialises {name.removeprefix('torch.').upper()}, {_NOT_SURVIVED}"
    for target in _list_descriptors().values():
        if target.startswith(_DEVICES):
            return f"opens a device ({target}), {_NOT_SURVIVED}"
    return ""


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


def _name_python_threads() -> str:
    threading = sys.modules.get("threading")
    if threading is None:
        return ""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if thread is not main]
    return f" ({', '.join(names)})" if names else ""


def _await_owner(task: str, code: Sequence[_Mapping], give_up_at: float) -> str:
    """Return the library of a thread once it waits; before, the library can't be known."""
    while (owner := _name_owner(task, code)) == "" and time.monotonic() < give_up_at:
        time.sleep(_LOOK)
    return owner or "of an unknown library"


def _name_owner(task: str, code: Sequence[_Mapping]) -> str | None:
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


def _list_other_tasks() -> list[str]:
    me = str(os.getpid())
    try:
        return [task for task in os.listdir("/proc/self/task") if task != me]
    except OSError:
        return []


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
