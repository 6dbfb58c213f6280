"""Directories that a job writes to: for logs and for temporary files. A file is written there, and removed."""

from __future__ import annotations

import os

from elastic_run.diagnosis.doctor.finding import problem, warning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_MIB = 1 << 20
_LEAST_FREE, _FEW_FREE = 64 * _MIB, 1024 * _MIB
_LEAST_FILES = 100
#: Bytes of the file: more than a block, so that a full disk or a used-up quota refuses it.
_PROBE = bytes(1 << 16)


def check(subject: Subject) -> list[Finding]:
    """Try each directory, or the nearest above it that exists."""
    temporary = subject.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - where programs put temporary files
    places = dict.fromkeys(os.path.abspath(path) for path in (*subject.directories, temporary))
    return [found for place in places for found in _check_directory(place)]


def _check_directory(path: str) -> list[Finding]:
    place = path
    while not os.path.isdir(place) and not os.path.lexists(place):
        place = os.path.dirname(place)
    failure = _write_probe(place)
    if failure is not None:
        return [judge_failure(path, failure)]
    state = os.statvfs(place)
    files = state.f_favail if state.f_files else _LEAST_FILES
    return judge_room(path, state.f_bavail * state.f_frsize, files)


def _write_probe(place: str) -> OSError | None:
    name = os.path.join(place, f".elastic-run-{os.urandom(8).hex()}")
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return error
    try:
        if os.write(descriptor, _PROBE) < len(_PROBE):
            os.write(descriptor, _PROBE)  # tells why
        os.fsync(descriptor)
    except OSError as error:
        return error
    finally:
        os.close(descriptor)
        os.unlink(name)
    return None


def judge_failure(path: str, error: OSError) -> Finding:
    """Return the finding about a failed attempt to write."""
    import errno

    remedies = {
        errno.EROFS: "mount -o remount,rw, or name another directory (--log-dir, TMPDIR)",
        errno.ENOSPC: f"remove files there (du -x -d1 {path}), or name another directory (--log-dir, TMPDIR)",
        errno.EDQUOT: "remove files of yours (quota -s), or name another directory (--log-dir, TMPDIR)",
        errno.ENOTDIR: "it is a file: name another directory (--log-dir, TMPDIR)",
    }
    texts = {errno.EROFS: "is read-only", errno.ENOSPC: "is full", errno.EDQUOT: "is over your quota"}
    number = error.errno or 0
    what = f"the directory {path} {texts.get(number, 'cannot be written')}"
    default = f"chmod or chown it, or name another directory (--log-dir, TMPDIR); ls -ld {path}"
    return problem(what, error.strerror or str(error), remedies.get(number, default))


def judge_room(path: str, free: int, files: int) -> list[Finding]:
    """Return the findings about a directory whose file system has so many bytes and files free."""
    remedy = f"remove files there (du -x -d1 {path}), or name another directory (--log-dir, TMPDIR)"
    if files < _LEAST_FILES:
        what = f"the file system of {path} is full: it has room for {files} more files"
        return [problem(what, f"{free // _MIB} MiB are free", f"remove files: df -i {path} counts them")]
    if free < _FEW_FREE:
        what = f"the file system of {path} is {'' if free < _LEAST_FREE else 'almost '}full"
        return [(problem if free < _LEAST_FREE else warning)(what, f"{free // _MIB} MiB are free", remedy)]
    return []
