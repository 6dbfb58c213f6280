"""Find a program as the system will when it executes it, and the directory that denies the way to it."""

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


def name_denier(path: str) -> str:
    """Name the directory that keeps this process from reaching a file.

    Args:
        path: Path of the file.

    Returns:
        A clause that begins with a colon, for the end of a message; "" where every directory on the way may be entered.
    """
    place, parents = os.path.realpath(path), []
    while (parent := os.path.dirname(place)) != place:
        parents.append(parent)
        place = parent
    for parent in reversed(parents):
        if os.path.isdir(parent) and not os.access(parent, os.X_OK):
            return f": the directory {parent!r} denies access (ls -ld shows who may enter it)"
    return ""
