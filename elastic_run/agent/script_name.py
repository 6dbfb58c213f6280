"""Names of the workers' program: one that is the same on all nodes of a job, and one for reports on this node.

- Nodes may have a script in different directories and at different mount points, and start in different working
  directories. So only the last part of a path counts, and files of one name count by their content
  (`core.job.node_changes`).
- Nodes may name their interpreter differently. So an interpreter counts by the script, module or code that it runs.
- The arguments of a script may differ by node, so they don't count.
"""

from __future__ import annotations

import os
import sys

from elastic_run.contract import ENV_PYTHON_EXEC
from elastic_run.multiprocessing.fork_exec import (
    is_interpreters_name,
    is_run_path_code,
    own_interpreter,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.job.documents import ScriptFile

#: Flags of an interpreter whose value is the next word.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_LONGEST = 255
_LONGEST_PATH = 1024
#: Bytes of a file that are compared. Scripts are shorter, and a program of gigabytes must not delay the start.
_READ = 4 << 20


def name_script(entrypoint: object, args: Sequence[object]) -> str:
    """Name the workers' program: ``train.py``, ``-m package.train``, ``program`` or a function's qualified name."""
    if not isinstance(entrypoint, str):
        while hasattr(entrypoint, "func"):  # functools.partial, one around the other
            entrypoint = entrypoint.func
        return str(getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__))[:_LONGEST]
    word = _find_script(entrypoint, args)
    return (os.path.basename(word.rstrip(os.sep)) or word)[:_LONGEST]


def program_name(entrypoint: object, args: tuple[object, ...]) -> str:
    """Return the program as its user named it, for reports: the script rather than the interpreter."""
    if entrypoint in (sys.executable, own_interpreter(), os.environ.get(ENV_PYTHON_EXEC)):
        words = (str(arg) for arg in args if not is_run_path_code(str(arg)))
        return next((word for word in words if not word.startswith("-")), str(entrypoint))
    return str(getattr(entrypoint, "__qualname__", entrypoint))


def find_script_file(entrypoint: object, args: Sequence[object]) -> ScriptFile | None:
    """Return the file that the workers run; None for a module, code, a function, or a file that can't be read."""
    word = _find_script(entrypoint, args) if isinstance(entrypoint, str) else "-"
    if word.startswith("-"):
        return None
    import zlib

    from elastic_run.core.job.documents import ScriptFile

    try:
        path = os.path.abspath(word)  # fails where the working directory was deleted
        if len(path) > _LONGEST_PATH:
            return None
        with open(path, "rb") as file:
            content = file.read(_READ)
            return ScriptFile(path, f"{os.fstat(file.fileno()).st_size}-{zlib.crc32(content):08x}")
    except OSError:
        return None


def _find_script(entrypoint: str, args: Sequence[object]) -> str:
    """Return the path of the script or program as typed, ``-m module``, or another argument of an interpreter."""
    if not is_interpreters_name(os.path.basename(entrypoint)) and entrypoint != os.environ.get(ENV_PYTHON_EXEC):
        return entrypoint
    words = [str(arg) for arg in args]
    while words:
        word = words.pop(0)
        if word == "-m":
            return f"-m {' '.join(words[:1])}"
        if word == "-c":
            is_run_path = len(words) > 1 and is_run_path_code(words[0])
            return words[1] if is_run_path else "-c"
        if word in _WITH_VALUE:
            del words[:1]
        elif word == "-" or not word.startswith("-"):
            return word
    return entrypoint  # it reads its program from a terminal
