"""Which functions `spawn`, `fork` and `forkserver` can run; what they can't is refused before the start.

A process that `spawn` or `forkserver` starts imports the program's main module, and looks the function up by its name.
That fails for a lambda, for a function inside another function, and for a function of a notebook. The messages say what
to do then.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from multiprocessing import context, process, reduction

from elastic_run.multiprocessing.process.interpreter import find_interpreter, is_frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.multiprocessing.functions.worker import FunctionWorker

START_METHODS = ("spawn", "fork", "forkserver")
#: Devices that a forked process can't use once they were initialised; torch's modules of these names say so.
_DEVICES = ("cuda", "xpu")
#: Where a main module without a file is.
_NO_FILE = "in an interactive session or on the command line"
#: Errors of pickle for an object that can't be pickled; they differ by kind of object and release of Python.
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError)


def refuse_method(start_method: str, function: Callable[..., Any]) -> None:
    """Refuse a start method that there isn't, or that the program can't use for a function, or can't use any more.

    Raises:
        ValueError: There is no such start method.
        RuntimeError: The program has initialised a GPU, and forked workers can't use it; there is no interpreter; or
            this is a worker that is importing its main module.
        PicklingError: A fresh interpreter can't find the function by its name.
    """
    if start_method not in START_METHODS:
        message = f"start_method {start_method!r} is none of {', '.join(START_METHODS)}"
        raise ValueError(message)
    device = _find_initialised_device() if start_method == "fork" else ""
    if device:
        message = (
            f"this process has initialised {device}, and forked workers can't use {device} then: launch "
            f"with start_method='spawn', or use {device} in the workers only"
        )
        raise RuntimeError(message)
    if start_method == "fork":
        return
    if not is_frozen() and not find_interpreter():
        message = (
            f"start_method={start_method!r} needs a Python interpreter, and {sys.executable or 'sys.executable'} is "
            "none: name one by multiprocessing.set_executable(path), or launch with start_method='fork'"
        )
        raise RuntimeError(message)
    refuse_unguarded_main()
    _refuse_local(function, start_method)


def refuse_unguarded_main() -> None:
    """Refuse to launch in a worker that is importing its main module; a root cause is known by this function's name."""
    if getattr(process.current_process(), "_inheriting", False):
        message = (
            "this program launches workers while it is being imported by one: put the launch below "
            "`if __name__ == '__main__':`, so that a worker can import the program without launching it again"
        )
        raise RuntimeError(message)


def _find_initialised_device() -> str:
    """Return the kind of device that this process has initialised, or ""."""
    modules = ((device, sys.modules.get(f"torch.{device}")) for device in _DEVICES)
    return next((device.upper() for device, module in modules if module is not None and module.is_initialized()), "")


def choose_start_method(function: Callable[..., Any]) -> str:
    """Return the start method of a function for which the program has left the default.

    It is `fork` for a function of a notebook's cell or of an interactive session, which no other interpreter can find,
    and `spawn` for all others, and where this process can't fork any more.
    """
    inner: Any = getattr(function, "func", function)  # of functools.partial
    is_of_main = getattr(inner, "__module__", None) == "__main__"
    is_unreachable = is_of_main and _unreachable_main(sys.modules.get("__main__")) == _NO_FILE
    return "fork" if is_unreachable and not _find_initialised_device() else "spawn"


def refuse_function(function: object) -> None:
    """Refuse an object that can't be called."""
    if not callable(function):
        kind = type(function)
        message = f"{function!r} (of type {kind.__module__}.{kind.__qualname__}) is neither a function nor a command"
        raise TypeError(message)


def _refuse_local(function: Callable[..., Any], start_method: str) -> None:
    """Refuse a function that a fresh interpreter can't find by name."""
    inner: Any = getattr(function, "func", function)  # of functools.partial
    name = str(getattr(inner, "__qualname__", ""))
    what = ""
    if name.endswith("<lambda>"):
        what = "a lambda"
    elif "<locals>" in name:
        what = f"{name}, which is defined inside another function,"
    elif getattr(inner, "__module__", None) == "__main__":
        where = _unreachable_main(sys.modules.get("__main__"))
        what = where and f"{name}, which is defined {where},"
    if what:
        message = (
            f"{what} can't be found by a process started by {start_method!r}: define the function at the top level of "
            "a module (in a notebook: of a file beside it), or use start_method='fork'"
        )
        raise pickle.PicklingError(message)


def _unreachable_main(main: object) -> str:
    """Return where a program's main module is that another interpreter doesn't import; empty if it does."""
    spec: Any = getattr(main, "__spec__", None)
    if spec is not None:
        # multiprocessing leaves the main files of packages and archives alone: many have no guard.
        return "in a __main__.py" if str(spec.name).rpartition(".")[2] == "__main__" else ""
    if os.path.isfile(getattr(main, "__file__", None) or ""):
        return ""
    return _NO_FILE


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
    """Pickle things, one after the other, as multiprocessing does for a child, or for the fork server's child.

    Returns the bytes, and the descriptors that go with them.
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
    parts = [(f"the function {getattr(worker.function, '__qualname__', worker.function)}", worker.function)]
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
