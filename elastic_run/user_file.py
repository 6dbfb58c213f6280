"""A file that the user names in a flag: read whole, and without a wait for a pipe to which nobody writes.

A shell's `<(command)` is a pipe as well, and its command may take its time.
"""

from __future__ import annotations

import errno
import os
import stat

#: Seconds in which a writer has to open a named pipe.
_WRITER_WAIT = 5.0


def read_user_file(path: str, most: int) -> bytes:
    """Read a file.

    Args:
        path: The file.
        most: Bytes to read at most.

    Returns:
        Its content, and no more than `most` bytes of it.

    Raises:
        OSError: It can't be read, or it is a pipe to which nothing was written.
    """
    with open(path, "rb", opener=_open_without_wait) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        if is_pipe:
            import select  # noqa: PLC0415 - a shared library, and most files are no pipes

            poll = select.poll()
            poll.register(file, select.POLLIN)
            poll.poll(_WRITER_WAIT * 1000)
        content: bytes | None = file.read(most)  # None if there is a writer that has written nothing yet
        if content != b"":
            os.set_blocking(file.fileno(), True)
            content = content or b""
            content += file.read(most - len(content))
    if is_pipe and not content:
        raise OSError(errno.ENODATA, "nothing was written to this pipe")
    return content


def _open_without_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
