"""How the process of a function is started: `spawn`, `fork` or `forkserver`, and which functions each of them can run.

A process that `spawn` or `forkserver` starts imports the program's main module, and looks the function up by its name.
That fails for a lambda, for a function inside another function, and for a function of a notebook. The messages say what
to do then.
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing import process

from elastic_run.multiprocessing.process.interpreter import find_interpreter, is_frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

START_METHODS = ("spawn", "fork", "forkserver")
#: Devices that a forked process can't use once they were initialised; torch's modules of these names say so.
_DEVICES = ("cuda", "xpu")
#: Where a main module without a file is.
_NO_FILE = "in an interactive session or on the command line"


def refuse_method(start_method: str) -> None:
    """Refuse a start method that there isn't, or that the program can't use any more.

    Raises:
        ValueError: There is no such start method.
        RuntimeError: The program has initialised a GPU, and forked workers can't use it.
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


def _find_initialised_device() -> str:
    """Return the kind of device that this process has initialised, or ""."""
    modules = ((device, sys.modules.get(f"torch.{device}")) for device in _DEVICES)
    return next((device.upper() for device, module in modules if module is not None and module.is_initialized()), "")


def choose_start_method(function: Callable[..., Any]) -> str:
    """Return the start method of a function for which the program has left the default.

    Returns:
        `fork` for a function of a notebook's cell or of an interactive session: no other interpreter can find it.
        `spawn` for all others, and where this process can't fork any more.
    """
    inner: Any = getattr(function, "func", function)  # of functools.partial
    is_of_main = getattr(inner, "__module__", None) == "__main__"
    is_unreachable = is_of_main and _unreachable_main(sys.modules.get("__main__")) == _NO_FILE
    return "fork" if is_unreachable and not _find_initialised_device() else "spawn"


def refuse_without_interpreter(start_method: str) -> None:
    """Refuse a start method that executes an interpreter in a program that has none."""
    if is_frozen() or find_interpreter():
        return
    message = (
        f"start_method={start_method!r} needs a Python interpreter, and {sys.executable or 'sys.executable'} is none: "
        "name one by multiprocessing.set_executable(path), or launch with start_method='fork'"
    )
    raise RuntimeError(message)


def refuse_uncallable(function: object) -> None:
    """Refuse an object that can't be called."""
    if not callable(function):
        kind = type(function)
        message = f"{function!r} (of type {kind.__module__}.{kind.__qualname__}) is neither a function nor a command"
        raise TypeError(message)


def refuse_unguarded_main() -> None:
    """Refuse to launch in a worker that is importing its main module."""
    if getattr(process.current_process(), "_inheriting", False):
        message = (
            "this program launches workers while it is being imported by one: put the launch below "
            "`if __name__ == '__main__':`, so that a worker can import the program without launching it again"
        )
        raise RuntimeError(message)


def refuse_local(function: Callable[..., Any], start_method: str) -> None:
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
