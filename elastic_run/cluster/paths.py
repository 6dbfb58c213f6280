"""Programs and files by their paths: what the system will execute, and which part of a path denies access to it.

Of a long path, users look at the wrong part first, so a message names the part.
"""

from __future__ import annotations

import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of a program that may be executed, or None; PATH is searched as by shutil.which."""
    if os.path.dirname(name):
        return name if is_executable(name) else None
    paths = (os.path.join(part or os.curdir, name) for part in environ.get("PATH", os.defpath).split(os.pathsep))
    return next((path for path in paths if is_executable(path)), None)


def is_executable(path: str) -> bool:
    """Whether a path is a file that this process may execute."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


def name_denier(path: str) -> str:
    """Return a clause that names the directory which keeps this process from a file, or "" if none does.

    The clause begins with a colon, for the end of a message.
    """
    place, parents = os.path.realpath(path), []
    while (parent := os.path.dirname(place)) != place:
        parents.append(parent)
        place = parent
    for parent in reversed(parents):
        if os.path.isdir(parent) and not os.access(parent, os.X_OK):
            return f": the directory {parent!r} denies access (ls -ld shows who may enter it)"
    return ""


def explain_denial(message: str, access: Callable[[str, int], bool] = os.access) -> str:
    """Return a clause such as `a directory (drwx------ root) may not be entered: '/data'`, or "".

    The path comes last, so that it gets a line of its own if it is long.

    Args:
        message: The message of a PermissionError; a relative path counts from this process's directory.
        access: As `os.access`.
    """
    # Python names the path: `[Errno 13] Permission denied: '/data/ckpt'`; of a rename the first of two.
    found = re.search(r"Permission denied: ('(?:[^'\\]|\\.)+')", message)
    if found is None:
        return ""
    path = os.path.abspath(found[1][1:-1])
    parts = path.split(os.sep)
    for count in range(1, len(parts)):
        directory = os.sep.join(parts[:count]) or os.sep
        if not os.path.isdir(directory):
            return ""
        if not access(directory, os.X_OK):
            return f"a directory {_describe_owner(directory)}may not be entered: {directory!r}"
    if not os.path.exists(path):
        parent = os.path.dirname(path)
        owner = _describe_owner(parent).strip()
        return "" if access(parent, os.W_OK) else f"nothing may be created in a directory {owner}: {parent!r}"
    denied = [verb for verb, mode in (("read", os.R_OK), ("written", os.W_OK)) if not access(path, mode)]
    return f"the file {_describe_owner(path)}may not be {' or '.join(denied)}: {path!r}" if denied else ""


def _describe_owner(path: str) -> str:
    """Return mode and owner in brackets."""
    import pwd

    try:
        status = os.stat(path)
    except OSError:
        return ""
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = f"uid {status.st_uid}"
    return f"({stat.filemode(status.st_mode)} {owner}) "
