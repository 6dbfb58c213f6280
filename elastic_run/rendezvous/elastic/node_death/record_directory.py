"""The directory of the agents' seat records on this machine, and the locks that tell which of them are alive.

Rules
- An agent holds a shared lock (flock) on its record as long as it lives, and its guardian another until the workers are
  gone. So a process that gets the exclusive lock knows that both are dead. A pid with a start time is no such proof: in
  another pid namespace a living process looks gone.
- flock is trusted only on file systems that one kernel mounts at a time. On NFS, 9p, virtiofs and FUSE there are no
  records: two machines, or two virtual machines, might not see each other's locks.
- /dev/shm comes first. It is memory, so a record that is found there is never older than what its agent wrote last; all
  containers of a Kubernetes pod share it, and it is empty after a reboot.
- A machine on which many agents were killed has thousands of records. So one agent an hour looks for old ones, and the
  time of change of a file says when that was.
- The directory belongs to one user, and nobody else may enter it. Symbolic connections are not followed.
- Nothing here is fatal: where there is no such directory the node has no record, and its death is not proved.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time

from elastic_run.contract import ENV_RECORD_DIR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

__all__ = ["RecordDirectory", "lock_alone"]

_PLACES = ("/dev/shm", "/tmp")  # noqa: S108 - the directory in it is private
_LOCAL = frozenset(("tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "bcachefs", "f2fs", "zfs", "overlay"))
_PRIVATE = 0o700
_OTHERS = 0o077
_NEW = "new-"
#: Seconds after which a record that no process holds is removed, whichever job it was of.
_KEPT = 86400.0
#: Its time of change says when old records were last looked for; and seconds until the next time.
_SWEPT = "swept"
_SWEEP_AGAIN = 3600.0


class RecordDirectory:
    """The open directory.

    Args:
        path: Where it is.
        fd: Its descriptor, which this object owns.
    """

    __slots__ = ("_fd", "path")

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, environment: dict[str, str] | os._Environ[str]) -> RecordDirectory | None:
        """Open the directory, made now if it is missing.

        Args:
            environment: The process's; `ENV_RECORD_DIR` names another place than /dev/shm.

        Returns:
            The directory, or None where no place is fit for it.
        """
        given = environment.get(ENV_RECORD_DIR)
        for place in (given,) if given else _PLACES:
            path = os.path.join(os.path.abspath(place), f"elastic-run-{os.geteuid()}")
            try:
                return cls(path, _open_private(path))
            except OSError as error:
                _log.debug("elastic-run: no seat records in %s: %s", path, error)
        return None

    def create(self, name: str, content: bytes) -> int:
        """Make a file that this process holds a shared lock on from the first moment that others can see it.

        Args:
            name: Its name.
            content: What is in it.

        Returns:
            Its descriptor.

        Raises:
            OSError: The system refuses.
        """
        temporary = _NEW + os.urandom(8).hex()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.pwrite(fd, content, 0)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            os.close(fd)
            self.remove(temporary)
            raise
        return fd

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except OSError as error:
            _log.debug("elastic-run: %s in %s: %s", name, self.path, error)

    def take_dead(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Take the exclusive lock on each file that no process holds.

        Args:
            prefix: The beginning of the files' names.

        Yields:
            A file's name and its descriptor, which the caller owns and which holds the lock.
        """
        for name in sorted(name for name in os.listdir(self._fd) if name.startswith(prefix)):
            if (fd := self._lock(name)) is not None:
                yield name, fd

    def sweep(self) -> None:
        """Remove what no process has held for a day, unless an agent has looked for that within the last hour."""
        now = time.time()
        if self._is_swept(now):
            return
        before = now - _KEPT
        for name in os.listdir(self._fd):
            try:
                is_old = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime < before
            except OSError:
                continue
            if is_old and (fd := self._lock(name)) is not None:
                self.remove(name)
                os.close(fd)

    def _is_swept(self, now: float) -> bool:
        """Whether old records were looked for a short time ago; if not, note that they are from now on."""
        try:
            since = now - os.stat(_SWEPT, dir_fd=self._fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            since = _SWEEP_AGAIN
        if 0 <= since < _SWEEP_AGAIN:
            return True
        try:
            os.close(os.open(_SWEPT, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd))
            os.utime(_SWEPT, (now, now), dir_fd=self._fd, follow_symlinks=False)
        except OSError as error:
            _log.debug("elastic-run: %s in %s: %s", _SWEPT, self.path, error)
        return False

    def close(self) -> None:
        """Close the directory."""
        os.close(self._fd)

    def _lock(self, name: str) -> int | None:
        try:
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        if lock_alone(fd) and self._is_still(name, fd):
            return fd
        os.close(fd)
        return None

    def _is_still(self, name: str, fd: int) -> bool:
        """Whether a file is a regular one that still has its name: another process may have removed it meanwhile."""
        own = os.fstat(fd)
        try:
            there = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(own.st_mode) and own.st_uid == os.geteuid() and os.path.samestat(own, there)


def lock_alone(fd: int) -> bool:
    """Take the exclusive lock on an open file without waiting; returns whether no other process holds one."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _open_private(path: str) -> int:
    try:
        os.mkdir(path, _PRIVATE)
    except FileExistsError:
        pass
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_private(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_private(fd: int, path: str) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        message = "another user owns it, or others may enter it"
        raise PermissionError(message)
    kind = _find_file_system(fd)
    if kind not in _LOCAL:
        message = f"{path} is on {kind or 'an unknown file system'}, where locks of other machines may not be seen"
        raise OSError(message)


def _find_file_system(fd: int) -> str:
    """Return the type of the file system that an open directory is on, "" where the kernel does not say."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        mount = next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        found = next((line for line in lines if line.partition(" ")[0] == mount), "")
    return found.partition(" - ")[2].partition(" ")[0]
