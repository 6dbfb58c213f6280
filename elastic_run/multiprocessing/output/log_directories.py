"""Making and removing the directories of log files, without tempfile and shutil, which workers would wait for."""

from __future__ import annotations

import errno
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Where temporary directories are made, after what the environment says. /dev/shm is there when the disk is full.
_TEMPORARY_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - names are random, directories private
#: Bytes of a job's name in the name of a directory, which may have 255 bytes.
_NAME_LENGTH = 200
_GROUP_READS = stat.S_IRGRP | stat.S_IXGRP
_OTHERS_READ = stat.S_IROTH | stat.S_IXOTH
_TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")


def random_name() -> str:
    """Return eight hexadecimal digits."""
    return os.urandom(4).hex()


def name_run(run_id: str, *, program: str, host: str) -> str:
    """Return the name of a run's directory without its random part: `job7_20261122-0917` or `20261122-0917_train`.

    The job's id stands first, as under torchrun. A program's name, unless it is "", takes the place of the id, behind
    the moment. `host` is the node's name where several nodes write to one directory, or "".
    """
    end = name_host(host)
    text = (program or run_id).replace("/", "_").encode(errors="surrogateescape")
    # Valid UTF-8 also where the file system's names have another encoding: in the locale C of an old configuration.
    name = os.fsdecode(text[: _NAME_LENGTH - len(end.encode())].decode(errors="ignore").encode())
    moment = time.strftime("%Y%m%d-%H%M")
    return "_".join((moment, name) if program else (name, moment)) + end


def name_host(host: str) -> str:
    """Return the part of a name that tells nodes apart, or an empty string."""
    return f"_{host.replace('/', '_')}" if host else ""


def link_latest(directory: str, name: str, link: str) -> str:
    """Let a link in a directory point to the newest of the directories beside it; harmless where that can't be done.

    A file or directory of the link's name that is no link is left alone. Returns a line for the user if another user's
    link has that name, else an empty string.
    """
    path = os.path.join(directory, link)
    try:
        status = os.lstat(path)
    except OSError:
        status = None
    if status is not None and not stat.S_ISLNK(status.st_mode):
        return ""
    if status is not None and status.st_uid != os.geteuid():
        return f"the link {path} belongs to another user (uid {status.st_uid}), and does not lead to this run: {name}"
    temporary = f"{path}.{random_name()}"
    _attempt(lambda new: os.symlink(name, new), temporary)
    _attempt(lambda new: os.replace(new, path), temporary)
    return ""


def make_directory(path: str) -> None:
    """Make a directory which others may read as far as they may read the directory above, and never write to.

    Where others may write to the directory above, it is for this user alone; for its group, too, if files there get the
    directory's group (setgid): such a directory was made for a group on purpose.

    Raises:
        OSError: It can't be made.
    """
    above = os.stat(os.path.dirname(path.rstrip("/")) or ".").st_mode
    readers = above & (_GROUP_READS | _OTHERS_READ)
    if above & (stat.S_IWGRP | stat.S_IWOTH):
        readers &= _GROUP_READS if above & stat.S_ISGID else 0
    os.mkdir(path, stat.S_IRWXU | readers)


def remove_empty(directory: str, link: str) -> None:
    """Remove a directory and those below it, as far as they hold nothing, and a link that points to nothing then."""
    for place, _, _ in os.walk(directory, topdown=False):
        _attempt(os.rmdir, place)
    if os.path.islink(link) and not os.path.exists(link):
        _attempt(os.unlink, link)


def make_new(directory: str, name: str) -> str:
    """Make a directory that wasn't there, and return its path; if the name is taken, ``.1``, ``.2`` … follow it.

    Raises:
        OSError: It can't be made.
    """
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

    Raises:
        OSError: It can't be made. If a file stands in the place of a directory, the error names this file.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path.rstrip("/"))
    if parent:
        make_directories(parent)
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        if os.path.isdir(path):  # another launcher was faster
            return
        obstacle = path
        while obstacle and not os.path.lexists(obstacle):
            obstacle = os.path.dirname(obstacle)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), obstacle) from error


def make_temporary(prefix: str) -> str | None:
    """Make a private directory in which a file can be written, and return its path.

    None where there is no such place: temporary directories may be read-only, or full.
    """
    places = (os.environ.get(variable) for variable in _TEMPORARY_VARIABLES)
    for place in (*filter(None, places), *_TEMPORARY_PLACES):
        try:
            path = os.path.join(os.path.abspath(place), prefix + random_name())
            os.mkdir(path, 0o700)
        except OSError:
            continue
        if _has_room(path):
            return path
        os.rmdir(path)
    return None


def _has_room(directory: str) -> bool:
    path = os.path.join(directory, "room")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return os.write(fd, bytes(1 << 14)) == 1 << 14
    except OSError:
        return False
    finally:
        os.close(fd)
        os.unlink(path)


def remove_tree(directory: str) -> None:
    """Remove a directory with all that is in it, as far as that is possible; links in it are removed, not followed."""
    for place, directories, files in os.walk(directory, topdown=False):
        for name in files:
            _attempt(os.unlink, os.path.join(place, name))
        for name in directories:
            path = os.path.join(place, name)
            _attempt(os.unlink if os.path.islink(path) else os.rmdir, path)
    _attempt(os.rmdir, directory)


def _attempt(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except OSError:
        pass
