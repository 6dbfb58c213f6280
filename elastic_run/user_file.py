"""Opens and reads a file that the user names, also of TOML, and gives up a named pipe that no process opens to write.

A shell's `<(command)` is a pipe as well. The wait for its command has no limit.

Python's parser of TOML takes a time that grows with the square of a key's parts (`a.a.a…`): 30 s for 200 KB. No line of
a sensible file has a hundred dots, so a longer one is refused before it is parsed.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Any

#: Seconds in which a writer has to open a named pipe.
_WRITER_WAIT = 5.0
#: Bytes of a file of TOML, and dots of a line in it, at most.
_LONGEST_TOML, _MOST_DOTS = 256 << 10, 100


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
    import select

    poll = select.poll()
    poll.register(file, select.POLLIN)
    poll.poll(_WRITER_WAIT * 1000)
    # From here on, a writer that has the pipe open may take any time. A pipe without a writer is at its end.
    os.set_blocking(file.fileno(), True)
    if not file.peek(1):
        raise OSError(errno.ENODATA, "nothing was written to this pipe")


def _open_without_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_toml(path: str) -> tuple[dict[str, Any], str]:
    """Read a file.

    Args:
        path: The file.

    Returns:
        What stands in it, and its text.

    Raises:
        ValueError: The file can't be read, or is not TOML; the message, one line, names the file.
    """
    import importlib

    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        message = "Python 3.10 reads TOML with the package tomli, which is missing (pip install tomli)"
        raise ValueError(message) from None
    text = _read_text(path)
    dots = (f"{path}:{number}" for number, line in enumerate(text.split("\n"), 1) if line.count(".") > _MOST_DOTS)
    if place := next(dots, ""):
        message = f"{place}: the line has more than {_MOST_DOTS} dots"
        raise ValueError(message)
    try:
        return toml.loads(text), text
    except ValueError as error:
        message = f"{path}: is not TOML: {' '.join(str(error).split())}"
    except RecursionError:
        message = f"{path}: its lists or tables are nested too deeply"
    raise ValueError(message)


def _read_text(path: str) -> str:
    try:
        content = read_user_file(path, _LONGEST_TOML + 1)
    except OSError as error:
        message = f"{path!r} can't be read: {(error.strerror or str(error)).lower()}"
        raise ValueError(message) from None
    if len(content) > _LONGEST_TOML:
        message = f"{path!r} is longer than {_LONGEST_TOML >> 10} KiB"
        raise ValueError(message)
    try:
        return content.decode()
    except UnicodeDecodeError:
        message = f"{path}: is not TOML: it is not UTF-8"
        raise ValueError(message) from None
