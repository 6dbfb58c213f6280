"""Files in directories to which other users may write: a link or a file that one of them has put there leads nowhere.

Files are made anew or replaced by a rename, so that the write never goes through a link to a file elsewhere. What this
user or root has put there is taken: a program may name a device, a named pipe or a file that is to be appended to.
"""

from __future__ import annotations

import errno
import os

__all__ = ["open_own", "replace_file"]


def open_own(path: str, flags: int) -> int:
    """Open a file, made anew if nothing has its name.

    Args:
        path: The file.
        flags: How it is opened, such as `os.O_WRONLY | os.O_APPEND`.

    Returns:
        The descriptor, closed on exec.

    Raises:
        OSError: It can't be opened, or belongs to another user than this one and root.
    """
    flags |= os.O_CLOEXEC | os.O_NOCTTY
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        owner = os.lstat(path).st_uid
        if owner in (0, os.geteuid()):
            return os.open(path, flags)
    raise PermissionError(errno.EPERM, f"it belongs to another user (uid {owner})", path)


def replace_file(path: str, data: bytes) -> None:
    """Write beside the file and rename, so that a reader never sees a part of it; a link is replaced, not followed.

    Raises:
        OSError: It can't be written.
    """
    draft = f"{path}.{os.urandom(4).hex()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise
