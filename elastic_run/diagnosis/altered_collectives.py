"""Alters the collectives of this process, so that its ranks do not match those of its peers. Runs in a worker.

Rules
- The methods of torch's class ProcessGroup are replaced: the functions of torch.distributed call them, under whatever
  name a program has imported these. What C++ calls by itself, such as the buckets of DistributedDataParallel, stays.
- `wrong-collective` and `wrong-shape` alter one call, after which all methods are as they were. `skip-collective`
  leaves out the next call and all later calls of the same process group.
- A program that has not imported torch.distributed yet is waited for, in a thread that looks again and again: an import
  by a hook would be an import by another path than without the fault.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

from elastic_run.core.agent.faults import ALTERED, ARMED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Method = Callable[..., Any]

_MODULE = "torch.distributed.distributed_c10d"
#: Seconds between two looks; a process group takes longer to be made than the rest of this.
_PAUSE = 0.002
_METHODS = (
    *("allreduce", "broadcast", "barrier", "reduce", "allgather", "_allgather_base", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
#: Calls whose first argument is a list of one tensor of any size.
_SIMPLE = ("allreduce", "broadcast")


class Alteration:
    """The replaced methods of the class.

    Args:
        action: `wrong-collective`, `wrong-shape` or `skip-collective`.
    """

    def __init__(self, action: str) -> None:
        self._action = action
        self._kind: Any = None
        self._originals: dict[str, Method] = {}
        self._lock = threading.Lock()
        self._skipped = ""
        self._is_done = False
        self._connection: socket.socket | None = None

    def begin(self) -> bool:
        """Alter the next collective; return False if the program has not imported torch.distributed yet."""
        kind = self._kind = getattr(sys.modules.get(_MODULE), "ProcessGroup", None)
        if kind is None:
            return False
        names = _SIMPLE if self._action == "wrong-shape" else _METHODS
        self._originals.update((name, getattr(kind, name)) for name in names if hasattr(kind, name))
        for name in self._originals:
            setattr(kind, name, self._make_method(name))
        return True

    def begin_late(self) -> None:
        """Alter the next collective when the program has imported torch.distributed."""
        while not self.begin():
            time.sleep(_PAUSE)

    def answer_on(self, connection: socket.socket) -> None:
        """Answer on a connection whether a collective has been altered, and again when that happens."""
        with self._lock:
            self._connection = connection
            self._answer()

    def _answer(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(ALTERED if self._is_done else ARMED, socket.MSG_NOSIGNAL)

    def _make_method(self, name: str) -> Method:
        def call(group: Any, *args: Any, **options: Any) -> Any:
            return self._call(name, group, *args, **options)

        return call

    def _call(self, name: str, group: Any, *args: Any, **options: Any) -> Any:
        original = self._originals[name]
        with self._lock:
            if self._action == "skip-collective":
                self._skipped = self._skipped or group.group_name
                is_altered = self._skipped == group.group_name
            else:
                is_altered = getattr(self._kind, name) is not original
                self._restore()
            if is_altered and not self._is_done:
                self._is_done = True
                self._answer()
        if not is_altered:
            return original(group, *args, **options)
        if self._action == "skip-collective":
            return _make_done()
        if self._action == "wrong-collective":
            return self._call_other(name, group, _find_device(args))
        (tensor,), *others = args
        return original(group, [tensor.flatten().repeat(2)], *others, **options)

    def _call_other(self, name: str, group: Any, device: Any) -> Any:
        torch = sys.modules["torch"]
        other = "broadcast" if name == "allreduce" else "allreduce"
        kind = getattr(torch.distributed, "BroadcastOptions" if other == "broadcast" else "AllreduceOptions")
        return self._originals[other](group, [torch.ones(4, device=device)], kind())

    def _restore(self) -> None:
        for name, original in self._originals.items():
            setattr(self._kind, name, original)


def _find_device(arguments: Any) -> Any:
    """Return the device of the first tensor, or None."""
    for each in arguments:
        found = _find_device(each) if isinstance(each, list | tuple) else getattr(each, "device", None)
        if found is not None:
            return found
    return None


def _make_done() -> Any:
    """Return what a collective returns that is done."""
    torch = sys.modules["torch"]
    future = torch.futures.Future()
    future.set_result(None)
    return sys.modules["torch._C._distributed_c10d"]._create_work_from_future(future)  # noqa: SLF001 - no public way
