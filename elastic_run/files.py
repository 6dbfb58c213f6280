"""Files and programs that the user names, and files and directories below directories to which others may write.

A named pipe to which nothing is written is given up; a shell's `<(command)` is a pipe as well, and may take any time.
Files are made anew or replaced by a rename, so that a write never goes through a link of another user's to a file
elsewhere. A file, a named pipe or a device that belongs to this user or to root is used as it is.

Directories are made and removed without tempfile and shutil: workers would wait for these imports. A message
names the part of a path that denies access: of a long path, users look at the wrong part first.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from io import BufferedReader
    from typing import Any

#: Seconds in which a writer has to open a named pipe.
_WRITER_WAIT = 5.0
#: Bytes of a file of TOML, and dots of a line in it, at most.
_LONGEST_TOML, _MOST_DOTS = 256 << 10, 100
#: Where temporary directories are made: places that the environment names, and others. /dev/shm is there when the disk
#: is full.
_TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_TEMPORARY_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - names are random, directories private
_GROUP_READS = stat.S_IRGRP | stat.S_IXGRP
_OTHERS_READ = stat.S_IROTH | stat.S_IXOTH


def read_user_file(path: str, most: int) -> bytes:
    """Return the content of a file, and no more than `most` bytes of it; see `open_user_file`."""
    with open_user_file(path) as file:
        return file.read(most)


def open_user_file(path: str) -> BufferedReader:
    """Open a file for reading; if it is a pipe, wait for the first byte. A pipe without one is an OSError, too."""
    file = open(path, "rb", opener=_open_without_wait)  # noqa: SIM115 - the caller closes it
    try:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            import select

            poll = select.poll()
            poll.register(file, select.POLLIN)
            poll.poll(_WRITER_WAIT * 1000)
            # From here on, a writer that has the pipe open may take any time. A pipe without a writer is at its end.
            os.set_blocking(file.fileno(), True)
            if not file.peek(1):
                raise OSError(errno.ENODATA, "nothing was written to this pipe")  # noqa: TRY301 - closes the file
        os.set_blocking(file.fileno(), True)
    except BaseException:
        file.close()
        raise
    return file


def _open_without_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_toml(path: str) -> dict[str, Any]:
    """Return what stands in a file of TOML, or raise a ValueError whose message, one line, names the file.

    Python's parser takes a time that grows with the square of a key's parts (`a.a.a…`): 30 s for 200 KB. No line of a
    sensible file has a hundred dots, so a longer one is refused before it is parsed.
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
        document: dict[str, Any] = toml.loads(text)
    except ValueError as error:
        message = f"{path}: is not TOML: {' '.join(str(error).split())}"
    except RecursionError:
        message = f"{path}: its lists or tables are nested too deeply"
    else:
        return document
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


def open_own(path: str, flags: int) -> int:
    """Open a file with flags such as `os.O_WRONLY | os.O_APPEND`, made anew if nothing has its name; closed on exec.

    A file that belongs to another user than this one and root is a PermissionError.
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
    """Write beside the file and rename, so that a reader never sees a part of it; a link is replaced, not followed."""
    draft = f"{path}.{os.urandom(4).hex()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError:
        os.unlink(draft)
        raise


# --- directories ------------------------------------------------------------------------------------------------------
def random_name() -> str:
    """Return eight hexadecimal digits."""
    return os.urandom(4).hex()


def make_directory(path: str) -> None:
    """Make a directory which others may read as far as they may read the directory above, and never write to.

    Where others may write to the directory above, it is for this user alone; for its group, too, if files there get the
    directory's group (setgid): such a directory was made for a group on purpose.
    """
    above = os.stat(os.path.dirname(path.rstrip("/")) or ".").st_mode
    readers = above & (_GROUP_READS | _OTHERS_READ)
    if above & (stat.S_IWGRP | stat.S_IWOTH):
        readers &= _GROUP_READS if above & stat.S_ISGID else 0
    os.mkdir(path, stat.S_IRWXU | readers)


def make_new(directory: str, name: str) -> str:
    """Make a directory that wasn't there, and return its path; if the name is taken, ``.1``, ``.2`` … follow it."""
    number = 0
    while True:
        path = os.path.join(directory, f"{name}.{number}" if number else name)
        try:
            make_directory(path)
        except FileExistsError:
            number += 1
        else:
            return path


def make_directories(path: str) -> None:
    """Make a directory and those above it, as far as they are missing.

    If a file stands in the place of a directory, the error names this file.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path.rstrip("/"))
    if parent:
        make_directories(parent)
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        if not os.path.isdir(path):  # else another launcher was faster
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error


def make_temporary(prefix: str) -> str | None:
    """Make a private directory, and return its path; None where temporary directories are read-only, or full."""
    places = (os.environ.get(variable) for variable in _TEMPORARY_VARIABLES)
    for place in (*filter(None, places), *_TEMPORARY_PLACES):
        try:
            path = os.path.join(os.path.abspath(place), prefix + random_name())
            os.mkdir(path, 0o700)
        except OSError:
            continue
        return path
    return None


def remove_tree(directory: str) -> None:
    """Remove a directory with all that is in it, as far as that is possible; links in it are removed, not followed."""
    for place, directories, files in os.walk(directory, topdown=False):
        for name in files:
            attempt(os.unlink, os.path.join(place, name))
        for name in directories:
            path = os.path.join(place, name)
            attempt(os.unlink if os.path.islink(path) else os.rmdir, path)
    attempt(os.rmdir, directory)


def attempt(action: Callable[[str], None], path: str) -> None:
    """Do something to a path; harmless where that can't be done."""
    try:
        action(path)
    except OSError:
        pass


# --- programs, and what denies access to a path -----------------------------------------------------------------------
def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of a program that may be executed, or None; PATH is searched as by shutil.which."""
    if os.path.dirname(name):
        return name if is_executable(name) else None
    paths = (os.path.join(part or os.curdir, name) for part in environ.get("PATH", os.defpath).split(os.pathsep))
    return next((path for path in paths if is_executable(path)), None)


def is_executable(path: str) -> bool:
    """Whether a path is a file that this process may execute."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _find_closed_directory(path: str, access: Callable[[str, int], bool]) -> str:
    """Return the first directory on the way to a path that this process may not enter, or ""."""
    parts = path.split(os.sep)
    parents = (os.sep.join(parts[:count]) or os.sep for count in range(1, len(parts)))
    return next((parent for parent in parents if os.path.isdir(parent) and not access(parent, os.X_OK)), "")


def name_denier(path: str) -> str:
    """Return a clause that names the directory which keeps this process from a file, or "" if none does.

    The clause begins with a colon, for the end of a message.
    """
    closed = _find_closed_directory(os.path.realpath(path), os.access)
    return f": the directory {closed!r} denies access (ls -ld shows who may enter it)" if closed else ""


def explain_denial(message: str, access: Callable[[str, int], bool] = os.access) -> str:
    """Return a clause such as `a directory (drwx------ root) may not be entered: '/data'`, or "".

    `message` is that of a PermissionError. The path comes last, so that it gets a line of its own if it is long.
    """
    import re

    # Python names the path: `[Errno 13] Permission denied: '/data/ckpt'`; of a rename the first of two.
    found = re.search(r"Permission denied: ('(?:[^'\\]|\\.)+')", message)
    if found is None:
        return ""
    path = os.path.abspath(found[1][1:-1])
    if closed := _find_closed_directory(path, access):
        return f"a directory {_describe_owner(closed)}may not be entered: {closed!r}"
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        return ""
    if not os.path.exists(path):
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
