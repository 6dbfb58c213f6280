"""Which part of a path denies access to it: of a long path, users look at the wrong part first."""

from __future__ import annotations

import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: How Python names the path: `[Errno 13] Permission denied: '/data/ckpt'`; of a rename the first of two.
_PATH = re.compile(r"Permission denied: ('(?:[^'\\]|\\.)+')")


def explain_denial(message: str, access: Callable[[str, int], bool] = os.access) -> str:
    """Name the part of a path that denies access to it.

    Args:
        message: The message of a PermissionError; a relative path counts from this process's directory.
        access: As `os.access`.

    Returns:
        A clause such as `a directory (drwx------ root) may not be entered: '/data'`, or "" if nothing is denied here.
        The path comes last, so that it gets a line of its own if it is long.
    """
    found = _PATH.search(message)
    if found is None:
        return ""
    path = os.path.abspath(found[1][1:-1])
    parts = path.split(os.sep)
    for count in range(1, len(parts)):
        directory = os.sep.join(parts[:count]) or os.sep
        if not os.path.isdir(directory):
            return ""
        if not access(directory, os.X_OK):
            return f"a directory {_owner(directory)}may not be entered: {directory!r}"
    if not os.path.exists(path):
        parent = os.path.dirname(path)
        return (
            ""
            if access(parent, os.W_OK)
            else f"nothing may be created in a directory {_owner(parent).strip()}: {parent!r}"
        )
    denied = [verb for verb, mode in (("read", os.R_OK), ("written", os.W_OK)) if not access(path, mode)]
    return f"the file {_owner(path)}may not be {' or '.join(denied)}: {path!r}" if denied else ""


def _owner(path: str) -> str:
    """Return mode and owner in brackets."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"({stat.filemode(status.st_mode)} {_name_user(status.st_uid)}) "


def _name_user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"
