"""`--preload auto`: which modules a program imports that are worth to be imported once. Nothing of it is executed.

A module is taken when the program imports it at its top level (also inside `try`, `if` and `with` there, but not for
type checkers only), when it isn't the standard library's and doesn't lie beside the program, and when its code takes
4 MB or more: torch, numpy, transformers, and none of the small ones, whose import is as quick as a fork.
"""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec

#: Bytes of code from which a package counts as heavy.
_HEAVY = 4 << 20


def choose_modules(kind: str, program: str) -> list[str]:
    """Return the heavy modules of others that a program imports, in its order.

    Args:
        kind: What Python is about to run: `file`, `module`, `command` or `stdin`.
        program: Its path, name or text.
    """
    try:
        tree = ast.parse(_read_source(kind, program))
    except (OSError, SyntaxError, ValueError, ImportError):
        return []  # Python will say what is wrong with it
    names = dict.fromkeys(_imported_names(tree.body))
    heavy = {top: _is_heavy(top) for top in dict.fromkeys(name.partition(".")[0] for name in names)}
    return [name for name in names if heavy[name.partition(".")[0]]]


def _read_source(kind: str, program: str) -> bytes | str:
    if kind == "file":
        with open(program, "rb") as file:
            return file.read()
    if kind == "module":
        spec = _find_module(program)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = PathFinder.find_spec(f"{program}.__main__", spec.submodule_search_locations)
        get_source = getattr(spec and spec.loader, "get_source", None)
        return (get_source(spec.name) if get_source and spec else None) or ""
    return program if kind == "command" else ""


def _find_module(name: str) -> ModuleSpec | None:
    """Find a module without importing its parents. A directory or zip file is the module `__main__` there."""
    parts, path, spec = name.split("."), sys.path[:1] if name == "__main__" else None, None
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _imported_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield node.module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imported_names(node.orelse)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for name in ("body", "handlers", "orelse", "finalbody"):
                yield from _imported_names(getattr(node, name, ()))
        elif isinstance(node, ast.ExceptHandler):
            yield from _imported_names(node.body)


def _is_heavy(name: str) -> bool:
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, sys.path[:1]) is not None:
        return False
    try:
        spec = PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return False
    left = _HEAVY
    for directory in (spec and spec.submodule_search_locations) or ():
        for size in _code_sizes(directory):
            left -= size
            if left <= 0:
                return True
    return False


def _code_sizes(directory: str) -> Iterator[int]:
    waiting = [directory]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif entry.name.endswith(".py") or ".so" in entry.name:
                yield entry.stat().st_size
