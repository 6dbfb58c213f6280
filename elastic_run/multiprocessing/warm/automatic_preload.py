"""`--preload auto`: finds the modules that are worth importing once. It reads the program and executes none of it.

A module is taken if three conditions hold. The program's import would import it (inside `if`, `try`, loops and classes
too, but not in a function, nor for type checkers only). It is neither part of the standard library nor beside the
program. Its package has 4 MB of code or more: torch, numpy, transformers; a fork saves hardly anything for small ones.

A module that is imported after the program has changed its environment isn't taken: modules read variables such as
OMP_NUM_THREADS, HF_HOME and PYTORCH_CUDA_ALLOC_CONF when they are imported, and the template would import them earlier.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from importlib.machinery import PathFinder
from itertools import accumulate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec

#: Bytes of code from which a package counts as heavy.
_HEAVY = 4 << 20
_ENVIRON = frozenset({"environ", "environb"})
#: Methods of `os.environ` that leave it as it is.
_READING_METHODS = frozenset({"copy", "get", "items", "keys", "values"})
#: Functions that change it: two of `os`, and the function of dotenv that scripts often call between imports.
_CHANGING_FUNCTIONS = frozenset({"putenv", "unsetenv", "load_dotenv"})


def choose_modules(kind: str, program: str) -> list[str]:
    """Return the full names of the heavy modules of others that a program imports, in its order.

    None where it can't be read. `kind` is `file`, `module`, `command` or `stdin`; `program` its path, name or text.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers will say it
            tree = ast.parse(_read_source(kind, program))
        names = dict.fromkeys(_imported_names(tree))
        heavy = {top: _is_heavy(top) for top in dict.fromkeys(name.partition(".")[0] for name in names)}
    except Exception:  # noqa: BLE001 - source may nest too deeply, and finders of others may raise anything
        return []  # the job runs in any case, and Python reports the program's mistake
    return [name for name in names if heavy[name.partition(".")[0]]]


def _read_source(kind: str, program: str) -> bytes | str:
    if kind == "file":
        if not os.path.isfile(program):
            return ""  # a pipe can be read only once, by the program
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


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that the program imports until it changes its environment."""
    for node in _walk(tree):
        if _changes_environment(node):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run at an import of the program, in the order of the source. Without recursion."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(_running_parts(node)))


def _running_parts(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return []
    if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
        return [*node.orelse]
    return list(ast.iter_child_nodes(node))


def _changes_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        is_method = isinstance(node.func, ast.Attribute) and _last_name(node.func.value) in _ENVIRON
        name = _last_name(node.func)
        return name not in _READING_METHODS if is_method else name in _CHANGING_FUNCTIONS
    if isinstance(node, ast.Subscript):
        return _last_name(node.value) in _ENVIRON and not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.AugAssign) and _last_name(node.target) in _ENVIRON


def _last_name(expression: ast.AST) -> str:
    """Return `c` for `a.b.c`, and for `c`."""
    return getattr(expression, "attr", "") or getattr(expression, "id", "")


def _is_heavy(name: str) -> bool:
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, sys.path[:1]) is not None:
        return False
    spec = PathFinder.find_spec(name)
    directories = (spec and spec.submodule_search_locations) or ()
    sizes = accumulate(size for directory in directories for size in _code_sizes(directory))
    return any(size >= _HEAVY for size in sizes)  # no longer than it takes: large packages have thousands of files


def _code_sizes(directory: str) -> Iterator[int]:
    for place, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(place, name)
            if (name.endswith(".py") or ".so" in name) and os.path.isfile(path):
                yield os.path.getsize(path)
