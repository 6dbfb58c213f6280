"""What a node's workers run, by a name that honest nodes of one job share.

- Nodes may have a script in different directories and at different mount points, and start in different working
  directories. So a path counts by its last part only.
- Nodes may name their interpreter differently. So an interpreter counts by the script, module or code that it runs.
- The arguments of a script may differ by node: they don't count.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.multiprocessing.interpreter import RUN_PATH_CODE, is_interpreters_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["name_script"]

#: An interpreter's flags that take the next word.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_LONGEST = 255


def name_script(entrypoint: object, args: Sequence[object]) -> str:
    """Name what the workers run.

    Args:
        entrypoint: A command, or a function.
        args: Its arguments.

    Returns:
        ``train.py``, ``-m package.train``, ``program`` or a function's qualified name.
    """
    if not isinstance(entrypoint, str):
        return _name_function(entrypoint)[:_LONGEST]
    name = os.path.basename(entrypoint)
    if is_interpreters_name(name) or entrypoint == os.environ.get(contract.ENV_PYTHON_EXEC):
        name = _name_python_script([str(arg) for arg in args]) or name
    return name[:_LONGEST]


def _name_function(function: object) -> str:
    while hasattr(function, "func"):  # functools.partial, one around the other
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _name_python_script(words: list[str]) -> str:
    """Return what an interpreter runs, "" where it reads its program from a terminal."""
    while words:
        word = words.pop(0)
        if word == "-m":
            return f"-m {' '.join(words[:1])}"
        if word == "-c":
            is_run_path = words[:1] == [RUN_PATH_CODE]
            return os.path.basename(words[1]) if is_run_path and len(words) > 1 else "-c"
        if word in _WITH_VALUE:
            del words[:1]
        elif word == "-" or not word.startswith("-"):
            return os.path.basename(word.rstrip(os.sep)) or word
    return ""
