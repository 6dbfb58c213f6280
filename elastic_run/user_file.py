"""Opens and reads a file that the user names, and gives up a named pipe that no process opens for writing.

A shell's `<(command)` is a pipe as well. The wait for its command has no limit.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import BufferedReader

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
    with open_user_file(path) as file:
        return file.read(most)


def open_user_file(path: str) -> BufferedReader:
    """Open a file for reading; if it is a pipe, wait for the first byte.

    Raises:
        OSError: It can't be opened, or it is a pipe to which nothing was written.
    """
    file = open(path, "rb", opener=_open_without_wait)  # noqa: SIM115 - the caller closes it
    try:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            _wait_content(file)
        os.set_blocking(file.fileno(), True)
    except BaseException:
        file.close()
        raise
    return file


def _wait_content(file: BufferedReader) -> None:
    import select  # noqa: PLC0415 - a shared library, and most files are no pipes

    poll = select.poll()
    poll.register(file, select.POLLIN)
    poll.poll(_WRITER_WAIT * 1000)
    # From here on, a writer that has the pipe open may take any time. A pipe without a writer is at its end.
    os.set_blocking(file.fileno(), True)
    if not file.peek(1):
        raise OSError(errno.ENODATA, "nothing was written to this pipe")


def _open_without_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
