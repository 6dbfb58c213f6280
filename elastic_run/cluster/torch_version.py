"""The version of the torch that Python would import, found out without importing it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

#: Characters of torch/version.py, in which the version stands near the top.
_MOST = 4096


def find_torch_version(paths: Iterable[str]) -> str:
    """Return the version of the first torch on a search path like `sys.path`, or "" where it is unknown."""
    for path in paths:
        try:
            with open(os.path.join(path, "torch", "version.py"), encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST)
        except OSError:
            continue
        return next((_value(line) for line in text.splitlines() if line.startswith("__version__")), "")
    return ""


def _value(line: str) -> str:
    return line.partition("=")[2].strip().strip("'\"")
