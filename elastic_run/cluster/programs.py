"""Find a program as the system will when it executes it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """Find a program's file; a name without a slash is looked for on PATH, as shutil.which does.

    Args:
        name: Name or path.
        environ: Environment, for PATH.

    Returns:
        Path of a file that may be executed, or None.
    """
    if os.path.dirname(name):
        return name if is_executable(name) else None
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory or os.curdir, name)
        if is_executable(path):
            return path
    return None


def is_executable(path: str) -> bool:
    """Whether a path is a file that this process may execute."""
    return os.path.isfile(path) and os.access(path, os.X_OK)
