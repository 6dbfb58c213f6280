"""Writes the dump of this process's flight recorder when the agent asks, and at the end. Runs in a worker, with torch.

A line of the .pth file calls `begin` at Python's own start, where --flight-recorder has set the variable; the import of
torch.distributed then starts a thread that waits on a socket. The main thread is usually in a collective, where no
signal handler of Python runs; it has given up the GIL there, which the stacks in a dump take. torch's own worker server
needs no GIL, but its dump of a gloo group has neither stacks nor the ranks of subgroups. NCCL's named pipe is looked at
once a second, and gloo has none. A request is one byte: `RECORDER_DUMP`, `RECORDER_COUNT` for the number of collectives
(no file, 0.2 ms), or `RECORDER_CALLS` for their times. A worker that ends writes its dump on the way out: its peers may
wait for it.

The dump is torch's own, a pickle of primitives that torch's tools read, with the rank and the ranks of every process
group, which gloo's dumps lack, under the name that torch would give it. A dump of torch's own is there if a backend has
given up; it is replaced unless the recorders are empty. Backends have recorders of their own: torch's function for NCCL
has one, and from torch 2.15 on the other function takes the name of a backend (`nccl` is `nccl2` there).
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock, get_ident

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_TRIGGER = "torch.distributed.distributed_c10d"
#: Seconds that a client gets to send its request.
_WAIT_LIMIT = 1.0
#: torch's functions: those of NCCL's and XCCL's recorders, and the one of all other backends.
_RECORDERS = ("_dump_nccl_trace", "_dump_xccl_trace", "_dump_fr_trace")
#: Backends of torch 2.15 whose recorders stay when their process groups are gone.
_HOOKED = ("nccl2", "nccl-lazy")

#: Beginnings of the names of collectives in which each rank waits for all others, and of those of a backend whose
#: recorder has no durations.
_WAIT_FOR_ALL = ("all", "reduce_scatter", "barrier")
_UNMEASURED = "gloo:"
#: What stands before the number of an entry in the recorder's JSON.
_NUMBER = b'"record_id":'

_lock = allocate_lock()
#: Of each recorder at the last answer of `list_calls`: its counts, the first entry of the next answer, the next entry.
_told: dict[int, tuple[dict[str, Any], int | None, int]] = {}
#: The dumps that are this module's to replace: the one that was there when this process began, and its own.
_replaceable: list[tuple[int, int, int] | None] = [None]


def begin() -> None:
    """Wait for the import of torch.distributed; called by the .pth file."""
    name = os.environ.pop(contract.ENV_FLIGHT_RECORDER)
    if _TRIGGER in sys.modules:
        serve(name)  # in the fork of a template that has imported torch
    else:
        sys.meta_path.insert(0, _ImportWatch(name))


class _ImportWatch:
    """A finder that answers for one module, once, and lets it be loaded as always."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's own spec of the module, with a call behind its execution; None for all other modules."""
        if fullname != _TRIGGER:
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute, name = loader.exec_module, self._name

        def execute_and_serve(module: ModuleType) -> None:
            execute(module)
            serve(name)

        loader.exec_module = execute_and_serve  # type: ignore[method-assign]
        return spec


def serve(name: str) -> None:
    """Answer requests in a thread, and write a dump when this process ends."""
    import atexit
    import threading

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
    import threading

    try:
        # The kernel gets this thread's name, as from Python 3.14: the agent doesn't count what it does.
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w", encoding="ascii") as file:
            file.write(contract.RECORDER_THREAD)
    except OSError:
        pass
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_WAIT_LIMIT)
                request = connection.recv(1) if is_own_user(connection) else b""
                if request == contract.RECORDER_COUNT:
                    connection.sendall(count_collectives())
                elif request == contract.RECORDER_CALLS:
                    connection.sendall(list_calls())
                elif request == contract.RECORDER_DUMP and write_dump(has_stacks=False):
                    # Stacks may take seconds, for which torch reads the debug symbols of C++, and the round waits.
                    write_dump(has_stacks=True)
        except OSError:
            if listener.fileno() < 0:
                return


# --- torch's recorders ------------------------------------------------------------------------------------------------
def count_collectives() -> bytes:
    """Return how many collectives each group has enqueued, started and ended, or nothing if unknown; never raises."""
    from contextlib import suppress

    counts, is_open = [], False
    with suppress(Exception):  # this runs in somebody's program
        for dump in _recorders():
            status = _unpickle(dump(False, False, False)).get("pg_status", {})
            for group, numbers in sorted(status.items()):
                own = [int(numbers[f"last_{state}_collective"]) for state in ("enqueued", "started", "completed")]
                is_open |= own[0] > own[2] and _has_open_collective(dump)
                counts.append(f"{group}={'/'.join(map(str, own))}")
        return f"{'open' if is_open else 'done'} {' '.join(counts)}".encode() if counts else b""
    return b""


def list_calls() -> bytes:
    """Return the collectives since the last answer in which each rank waits for all others, as JSON; never raises.

    Moments are in microseconds; the first answer has none. A recorder whose counts are as they were is not read: torch
    holds the GIL for 20 ms to write 2,000 entries. To parse them all would set off the garbage collector, for 80 ms.
    """
    from contextlib import suppress

    groups: dict[str, dict[str, Any]] = {}
    with suppress(Exception):  # this runs in somebody's program
        import json

        ranks = {name: sorted(_world().pg_group_ranks[group]) for group, name in _world().pg_names.items()}
        for recorder, dump in enumerate(_recorders("_json")):
            counts = json.loads(dump(False, False))["pg_status"]
            before, begin, seen = _told.get(recorder, ({}, None, 0))
            if counts == before:
                continue
            text = dump(True, False)
            first, end = (_read_number(text, find(_NUMBER)) for find in (text.find, text.rfind))
            new, lost = [], 0
            if begin is not None and end >= begin:
                lost = max(0, first - begin)
                at = text.find(b"%s%d," % (_NUMBER, begin + lost))
                new = json.loads(b"[%s}]" % text[text.rfind(b"{", 0, at) : text.find(b"}]", at)])
            left = end + 1
            for entry in reversed(new):
                if entry["retired"] or entry["profiling_name"].startswith(_UNMEASURED):
                    _add_call(groups, entry, ranks, 1 + lost / len(new))
                elif entry["record_id"] >= seen:
                    left = entry["record_id"]  # the next answer tells it; torch never retires parts of a batch of sends
            _told[recorder] = (counts, left, end + 1)
        return json.dumps([*groups.values()]).encode()
    return b""


def _read_number(text: bytes, at: int) -> int:
    """Return the number of the entry that is told at some place; -1 where no entry is."""
    return -1 if at < 0 else int(text[at + len(_NUMBER) : text.index(b",", at)])


def _add_call(groups: dict[str, Any], entry: dict[str, Any], ranks: dict[str, list[int]], scale: float) -> None:
    """Add a collective to those of its group, if each rank waits for all others in it, and if its time is known."""
    (name, _), (backend, _, operation) = entry["process_group"], entry["profiling_name"].partition(":")
    is_measured = f"{backend}:" != _UNMEASURED
    # torch measures NCCL's collectives with TORCH_NCCL_ENABLE_TIMING=1.
    moment = -entry.get("duration_ms", 0) * 1000 if is_measured else entry["time_created_ns"] // 1000
    if moment and name in ranks and operation.lstrip("_").startswith(_WAIT_FOR_ALL):
        group = f"{backend} {name} {ranks[name][0]}"  # two groups may have one name if no rank is in both
        known = {"group": group, "size": len(ranks[name]), "is_measured": is_measured, "scale": scale, "calls": []}
        groups.setdefault(group, known)["calls"].append((entry["collective_seq_id"], int(moment)))


def _has_open_collective(dump: Callable[..., bytes]) -> bool:
    """Whether one of the recorded collectives has not ended.

    The counts do not tell: gloo's threads write the number of the last completed collective in any order, so it may be
    that of an earlier one for as long as no other collective follows.
    """
    entries = _unpickle(dump(True, False, True)).get("entries", ())
    return any(not entry["retired"] for entry in entries)


def _unpickle(dump: bytes) -> dict[str, Any]:
    import pickle

    document: dict[str, Any] = pickle.loads(dump)  # noqa: S301 - of this process
    return document


def _recorders(form: str = "") -> list[Callable[..., bytes]]:
    """Return torch's functions that dump the recorders of this process, as a pickle or, with `_json`, as JSON."""
    from contextlib import suppress
    from functools import partial

    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name + form) for name in _RECORDERS if hasattr(c10d, name + form)]
    if "backend: str" in (dumps[-1].__doc__ or ""):  # the signature, which a function in C++ has nowhere else
        names = {*_HOOKED}
        for group in _world().pg_names:
            with suppress(RuntimeError):  # torch has no backend for a device of this group
                names |= {group._get_backend(device).name() for device in group._device_types}  # noqa: SLF001 - as below
        dumps += [partial(dumps[-1], backend=name) for name in sorted(names - {"gloo"})]
    return dumps


def _world() -> Any:
    """Return torch's record of all process groups."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world  # noqa: SLF001 - it has no other list of all groups


def write_dump(*, has_stacks: bool) -> bool:
    """Write the content of this process's recorder; return whether a file was written. Never raises."""
    from contextlib import suppress

    path = _dump_path()
    with suppress(Exception), _lock:  # this runs in somebody's program
        import pickle

        from elastic_run.files import replace_file

        if path:
            document, world = _read_recorders(has_stacks=has_stacks), _world()
            groups = {
                name: {"name": name, "desc": group.group_desc, "ranks": str(sorted(world.pg_group_ranks[group]))}
                for group, name in world.pg_names.items()
            }
            # A rank that has called no collective has an empty dump, which says so: its peers may wait in the first.
            if not document["entries"] and (not groups or _stamp(path) not in _replaceable):
                return False
            document["rank"] = int(os.environ[contract.ENV_RANK])
            document["pg_config"] |= groups
            replace_file(path, pickle.dumps(document, protocol=2))
            _replaceable[1:] = [_stamp(path)]
            return True
    return False


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
        self._thread = get_ident()

    def __getattr__(self, name: str) -> object:
        if get_ident() == self._thread:
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


# --- the abstract Unix sockets on which workers take requests of their agent ------------------------------------------
# Every user of the machine may connect to such a socket, or take its name first. So nobody can foretell a name, which
# is another one in each attempt, and both sides look at the user of the other side.
def make_name(purpose: str) -> str:
    """Return the name of a socket for one worker in one attempt."""
    return f"elastic-run-{purpose}-{os.urandom(8).hex()}"


def listen(name: str) -> socket.socket:
    """Listen in a worker; a fork of it does not. OSError says that the name is taken, or no such socket is here."""
    import socket

    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(4)
    except OSError:
        listener.close()
        raise
    os.register_at_fork(after_in_child=listener.close)
    return listener


def send_request(name: str, request: bytes) -> socket.socket | None:
    """Send a request to a worker, without waiting; None if no worker of this user listens."""
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(f"\0{name}")
        if is_own_user(connection):
            connection.send(request)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other side is this user or root."""
    import socket
    import struct

    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.getuid(), 0)
