"""Pickles functions and arguments as multiprocessing does, and refuses before the start what can't be pickled."""

from __future__ import annotations

import io
import pickle
from multiprocessing import context, reduction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.multiprocessing.functions.worker import FunctionWorker

#: Errors of pickle for an object that can't be pickled; they differ by kind of object and release of Python.
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError)


class _ChildPickler:
    """The object that multiprocessing asks, during pickling for a child, which descriptors the child gets."""

    def __init__(self, *, is_served: bool) -> None:
        self.descriptors: list[int] = []
        self._is_served = is_served

    def DupFd(self, number: int) -> object:  # noqa: N802 - multiprocessing's name
        """Return the object that becomes the descriptor in the child, from the result of `duplicate_for_child`."""
        from multiprocessing import popen_forkserver, popen_spawn_posix

        kind: Any = popen_forkserver if self._is_served else popen_spawn_posix
        return kind.Popen.DupFd(number)

    def duplicate_for_child(self, fd: int) -> int:
        """Note a descriptor; return its number in the child."""
        self.descriptors.append(fd)
        return len(self.descriptors) - 1 if self._is_served else fd


def pickle_for_child(*things: object, is_served: bool = False) -> tuple[bytes, list[int]]:
    """Pickle things, one after the other, as multiprocessing does for a child.

    Args:
        things: The objects to pickle, one after the other.
        is_served: Whether the child is the fork server's.

    Returns:
        The bytes, and the descriptors that go with them.
    """
    sender, buffer = _ChildPickler(is_served=is_served), io.BytesIO()
    context.set_spawning_popen(sender)  # type: ignore[arg-type]
    try:
        for thing in things:
            reduction.dump(thing, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue(), sender.descriptors


def refuse_unsendable(worker: FunctionWorker, rank: int, start_method: str) -> None:
    """Pickle a worker's function and arguments one by one, so that the message names the object that can't be pickled.

    Raises:
        PicklingError: One can't be pickled; depending on the object AttributeError or TypeError, as pickle has it.
    """
    is_served = start_method == "forkserver"
    parts = [(f"the function {_name(worker.function)}", worker.function)]
    parts += [(f"argument {number} of local rank {rank}", arg) for number, arg in enumerate(worker.args)]
    for what, part in parts:
        try:
            pickle_for_child(part, is_served=is_served)
        except Exception as error:
            kind = type(part)
            message = (
                f"{what} (of type {kind.__module__}.{kind.__qualname__}) can't be sent to a process started by "
                f"{start_method!r}: {error}"
            )
            raised = type(error) if type(error) in _REFUSALS else pickle.PicklingError
            raise raised(message) from error


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))
