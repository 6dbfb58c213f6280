"""Names of ours inside strings: in programs for `python -c`, in programs that tests write, in `monkeypatch.setattr`.

Neither mypy nor an import looks into a string. Where a module or a function has moved, only the test that runs the
program would show it; and a test that asks for the absence of a module would pass for ever.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[3]
_FROM = re.compile(r"\bfrom (elastic_run(?:\.\w+)*) import (\([^)]*\)|[\w, ]+)")
_IMPORT = re.compile(r"\b(?<!_)import (elastic_run(?:\.\w+)*)(?![\w.])")
_NAME = re.compile(r"elastic_run(?:\.[A-Za-z_]\w*)+")
#: Strings of the form of a name that name no module: a file, and a group of entry points.
_OTHERS = frozenset({"elastic_run.py", "elastic_run.event_handlers"})
#: Stands in an f-string for what is put into it: no name goes beyond it.
_HOLE = "\0"


def read_strings(source: str | bytes) -> Iterator[str]:
    """Return the strings of a program."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else _HOLE for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def find_names(text: str) -> Iterator[str]:
    """Return the dotted names of ours that a string imports, or is."""
    for module, attributes in _FROM.findall(text):
        for part in attributes.strip("()").split(","):
            attribute = part.partition(" as ")[0].strip()
            if attribute:
                yield f"{module}.{attribute}"
    yield from _IMPORT.findall(text)
    if _NAME.fullmatch(text) and text not in _OTHERS:
        yield text


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        try:
            found: object = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
        try:
            for word in words[length:]:
                found = getattr(found, word)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("'import sys; from elastic_run.a import b as c, d; x'", ["elastic_run.a.b", "elastic_run.a.d"]),
        ('"""\nfrom elastic_run.a import (\n    b,\n    c,\n)\n"""', ["elastic_run.a.b", "elastic_run.a.c"]),
        ("'import elastic_run.a.b as c; 1'", ["elastic_run.a.b"]),
        ("f'import elastic_run.{a}'", []),
        ("patch('elastic_run.a.b._C', 1)", ["elastic_run.a.b._C"]),
        ("open('elastic_run.py')", []),
    ],
)
def test_names_are_found(source: str, names: list[str]) -> None:
    """Imports are found in the middle of a program too, and names that are a whole string."""
    assert [name for text in read_strings(source) for name in find_names(text)] == names


@pytest.mark.parametrize("part", ["tests", "elastic_run"])
def test_names_in_strings_exist(part: str) -> None:
    """Each of our modules, functions and constants that a string imports or names is there."""
    missing = [
        f"{path.relative_to(_ROOT)}: {name}"
        for path in sorted((_ROOT / part).rglob("*.py"))
        if path != Path(__file__) and b"elastic_run" in (source := path.read_bytes())
        for text in read_strings(source)
        if "elastic_run" in text
        for name in find_names(text)
        if not is_there(name)
    ]
    assert missing == []
