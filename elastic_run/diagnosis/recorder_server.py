"""Writes the dump of this process's flight recorder, on request and at the end. Runs in a worker, beside torch.

A request is one byte: `RECORDER_DUMP`, or `RECORDER_COUNT` for the number of collectives (no file, 0.2 ms).

The dump is torch's own, a pickle of primitives that torch's tools read, with two things more: the rank, and the ranks
of every process group, which gloo's dumps lack. It is written under the name that torch would give it. A dump of
torch's own is there if a backend has given up; it is replaced unless the recorders are empty.

Backends have recorders of their own: torch's function for NCCL has one, and from torch 2.15 on the other function takes
the name of a backend (`nccl` is `nccl2` there). The dump has the entries of all of them, in the order of their calls.

For a dump with stacks torch may have to read the debug symbols of C++, on which the stop of the round waits. So a dump
without stacks is written first, within milliseconds, and replaced by the one with stacks where there is time for it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from contextlib import suppress
from functools import partial

from elastic_run import contract
from elastic_run.diagnosis.worker_sockets import is_own_user, listen
from elastic_run.files import replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

#: Seconds that a client gets to send its request.
_WAIT_LIMIT = 1.0

#: torch's functions: those of NCCL's and XCCL's recorders, and the one of all other backends.
_RECORDERS = ("_dump_nccl_trace", "_dump_xccl_trace", "_dump_fr_trace")
#: Backends of torch 2.15 whose recorders stay when their process groups are gone.
_HOOKED = ("nccl2", "nccl-lazy")

_lock = threading.Lock()
#: The dumps that are this module's to replace: the one that was there when this process began, and its own.
_replaceable: list[tuple[int, int, int] | None] = [None]


def serve(name: str) -> None:
    """Answer requests in a thread, and write a dump when this process ends."""
    own = os.getpid()
    _replaceable.append(_stamp(_dump_path()))
    atexit.register(lambda: _write_at_exit() if os.getpid() == own else None)
    try:
        listener = listen(name)
    except OSError:
        return  # the worker still writes a dump at its end
    threading.Thread(target=_answer, args=(listener,), name=contract.RECORDER_THREAD, daemon=True).start()


def _write_at_exit() -> None:
    """Write the dump; with stacks after an exception, since peers that lost this rank end by one as well."""
    if write_dump(has_stacks=False) and getattr(sys, "last_value", None) is not None:
        write_dump(has_stacks=True)


def _answer(listener: socket.socket) -> None:
    """Answer each connection; its end says that the answer is whole, or that the dump is written."""
    _show_name()
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_WAIT_LIMIT)
                request = connection.recv(1) if is_own_user(connection) else b""
                if request == contract.RECORDER_COUNT:
                    connection.sendall(count_collectives())
                elif request == contract.RECORDER_DUMP and write_dump(has_stacks=False):
                    write_dump(has_stacks=True)
        except OSError:
            if listener.fileno() < 0:
                return


def _show_name() -> None:
    """Give the kernel the name of this thread, as Python 3.14 does: the agent doesn't count what it does."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w", encoding="ascii") as file:
            file.write(contract.RECORDER_THREAD)
    except OSError:
        pass


def count_collectives() -> bytes:
    """Return how many collectives each group has enqueued, started and ended, or nothing if unknown; never raises."""
    try:
        counts, is_open = [], False
        for dump in _recorders():
            status = _unpickle(dump(False, False, False)).get("pg_status", {})
            for group, numbers in sorted(status.items()):
                own = [int(numbers[f"last_{state}_collective"]) for state in ("enqueued", "started", "completed")]
                is_open |= own[0] > own[2] and _has_open_collective(dump)
                counts.append(f"{group}={'/'.join(map(str, own))}")
    except Exception:  # noqa: BLE001 - this runs in somebody's program
        return b""
    return f"{'open' if is_open else 'done'} {' '.join(counts)}".encode() if counts else b""


def _unpickle(dump: bytes) -> dict[str, Any]:
    document: dict[str, Any] = pickle.loads(dump)  # noqa: S301 - of this process
    return document


def _recorders() -> list[Callable[..., bytes]]:
    """Return torch's functions that dump the recorders of this process."""
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name) for name in _RECORDERS if hasattr(c10d, name)]
    if "backend: str" in (dumps[-1].__doc__ or ""):  # the signature, which a function in C++ has nowhere else
        from torch.distributed import distributed_c10d

        names = {*_HOOKED}
        for group in distributed_c10d._world.pg_names:  # noqa: SLF001 - as below
            with suppress(RuntimeError):  # torch has no backend for a device of this group
                names |= {group._get_backend(device).name() for device in group._device_types}  # noqa: SLF001 - ditto
        dumps += [partial(dumps[-1], backend=name) for name in sorted(names - {"gloo"})]
    return dumps


def _has_open_collective(dump: Callable[..., bytes]) -> bool:
    """Whether one of the recorded collectives has not ended.

    The counts do not tell: gloo's threads write the number of the last completed collective in any order, so it may be
    that of an earlier one for as long as no other collective follows.
    """
    entries = _unpickle(dump(True, False, True)).get("entries", ())
    return any(not entry["retired"] for entry in entries)


def write_dump(*, has_stacks: bool) -> bool:
    """Write the content of this process's recorder; return whether a file was written.

    Never raises, because it runs in the user's program.
    """
    path = _dump_path()
    if not path:
        return False
    try:
        with _lock:
            document, groups = _read_recorders(has_stacks=has_stacks), _process_groups()
            # A rank that has called no collective has an empty dump, which says so: its peers may wait in the first.
            if not document["entries"] and (not groups or _stamp(path) not in _replaceable):
                return False
            document["rank"] = int(os.environ[contract.ENV_RANK])
            document["pg_config"] |= groups
            replace_file(path, pickle.dumps(document, protocol=2))
            _replaceable[1:] = [_stamp(path)]
    except Exception:  # noqa: BLE001 - see above
        return False
    return True


def _dump_path() -> str:
    prefix = next(filter(None, map(os.environ.get, contract.ENV_RECORDER_PREFIX)), "")
    rank = os.environ.get(contract.ENV_RANK, "")
    return f"{prefix}{rank}" if prefix and rank.isdecimal() else ""


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read_recorders(*, has_stacks: bool) -> dict[str, Any]:
    """Return the dumps of all recorders as one, with the entries in the order of their calls.

    The numbers of entries begin with the number of those that the recorders have overwritten.
    """
    merged: dict[str, Any] = {"pg_config": {}, "pg_status": {}}
    entries: list[dict[str, Any]] = []
    overwritten = 0
    for dump in reversed(_recorders()):
        document = _unpickle(_dump(dump, has_stacks=has_stacks))
        own = document.get("entries", [])
        entries += own
        overwritten += min((entry["record_id"] for entry in own), default=0)
        groups = {key: {**merged[key], **document.get(key, {})} for key in ("pg_config", "pg_status")}
        merged |= {key: value for key, value in document.items() if value} | groups
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    for number, entry in enumerate(entries, overwritten):
        entry["record_id"] = number
    return {**merged, "entries": entries}


class _NoCompiler:
    """Stands for torch's compiler: for this thread it has nothing, and any other thread gets the compiler itself."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> object:
        if threading.get_ident() == self._thread:
            raise AttributeError(name)
        import importlib

        return getattr(importlib.import_module("torch._inductor"), name)


def _dump(dump: Callable[..., bytes], *, has_stacks: bool) -> bytes:
    """Return a dump of torch's, and spare it the import of its compiler.

    For stacks torch asks the compiler about compiled code, and imports it for that: 1.2 s of CPU time. If the program
    has no compiler yet, a stand-in answers. An import in another thread replaces the stand-in.
    """
    names, stand_in = vars(sys.modules["torch"]), _NoCompiler()
    names.setdefault("_inductor", stand_in)
    try:
        return dump(True, has_stacks, False)
    finally:
        if names.get("_inductor") is stand_in:
            del names["_inductor"]


def _process_groups() -> dict[str, dict[str, str]]:
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world  # noqa: SLF001 - it has no other list of all groups
    return {
        name: {"name": name, "desc": group.group_desc, "ranks": str(sorted(world.pg_group_ranks[group]))}
        for group, name in world.pg_names.items()
    }
