"""Finds the program that runs Python code in a process of its own: not always `sys.executable`.

In a program that embeds Python (uwsgi, a simulator, a C++ service) or that was frozen (PyInstaller), `sys.executable`
is that program. With an interpreter's arguments it would begin its own work a second time, so trying is no option. The
name decides: interpreters are called python, pypy or graalpy.
"""

from __future__ import annotations

import os
import sys

#: Beginnings of an interpreter's name, and what may follow: a version, and a build's letters.
_NAMES = ("python", "pypy", "graalpy")
_BUILDS = ("", "t", "d", "td", "w", "m", "dm")

#: Begin of the code that a worker runs under --run-path. torch calls runpy in a process that multiprocessing has made
#: with the launcher's `sys.path`, on which stubs that start a program (Bazel, PEX) put their directories. Our workers
#: are executed, so this is a command. With -m and a module of ours, the workers' interpreter would have to find ours.
_RUN_PATH = "import runpy, sys; del sys.argv[0]; sys.path[:] = "


def make_run_path_code() -> str:
    """Return the code that runs the script of its first argument, with the `sys.path` of this process."""
    entries: list[object] = [*sys.path]
    path = [entry for entry in entries if isinstance(entry, str)]  # Python, too, passes over a pathlib.Path
    return f"{_RUN_PATH}{path!a}; runpy.run_path(sys.argv[0], run_name='__main__')"


def is_run_path_code(word: str) -> bool:
    """Whether a word of a command is such code."""
    return word.startswith(_RUN_PATH)


def is_frozen() -> bool:
    """Whether this program and its modules are one file, as PyInstaller and its like make it."""
    return bool(getattr(sys, "frozen", False))


def own_interpreter() -> str:
    """Return `sys.executable`; if that is no interpreter, this Python's interpreter, or ""."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    installed = [os.path.join(prefix, "bin", f"python{version}") for prefix in (sys.exec_prefix, sys.base_exec_prefix)]
    candidates = (sys.executable, *([] if is_frozen() else installed))
    return next((path for path in candidates if path and is_interpreter(path)), "")


def running_interpreter() -> str:
    """Return the interpreter that runs now, or "" if the system does not tell; profilers replace `sys.executable`."""
    path = os.path.realpath("/proc/self/exe")
    return path if is_interpreter(path) else ""


def find_interpreter() -> str:
    """Return the path of an interpreter for code of ours, or "" where this program has none.

    The interpreter of `multiprocessing.set_executable` comes first.
    """
    return _chosen_for_multiprocessing() or own_interpreter()


def is_interpreter(path: str) -> bool:
    """Whether a program is an interpreter, as its name, or the name of the file behind a link, tells.

    The executable of a frozen program is the program itself, under any name.
    """
    if is_frozen() and path == sys.executable:
        return False
    is_named = is_interpreters_name(os.path.basename(path))
    return (is_named or is_interpreters_name(os.path.basename(os.path.realpath(path)))) and os.access(path, os.X_OK)


def is_interpreters_name(name: str) -> bool:
    """Whether a file's name is an interpreter's."""
    for beginning in _NAMES:
        if name.startswith(beginning):
            rest = name[len(beginning) :].lstrip("0123456789.")
            return rest in _BUILDS or rest.startswith("-")
    return False


def _chosen_for_multiprocessing() -> str:
    """Return the program's setting of `multiprocessing.set_executable`; the default is `sys.executable`."""
    spawn = sys.modules.get("multiprocessing.spawn")
    chosen = spawn.get_executable() if spawn is not None else None
    path = os.fsdecode(chosen) if chosen else ""
    return path if path != sys.executable else ""
