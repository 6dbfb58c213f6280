"""The hint of the report: for a verdict of the launcher, otherwise for the likeliest cause."""

from __future__ import annotations

import errno
import os

from elastic_run.core.failure.diagnose import LOG_DISK_FULL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.report.job_result import JobResult

_VERDICTS: dict[str, str] = {
    "not_executable": (
        "Make it executable with `chmod +x`, give the job's user access to the directories above it, leave out "
        "--no-python for a Python script, or check whether its file system is mounted noexec."
    ),
    "not_found": (
        "Check the program's name, and the interpreter in its first line; a relative path counts from the directory in "
        "which elastic-run was started."
    ),
    "unkillable_worker": (
        "Such a process waits for a disk, a network file system or a GPU driver: look at dmesg, and take this "
        "node out of use until it is rebooted."
    ),
    "cannot_start": (
        "Look at the limits of processes, open files and memory: `ulimit -a`, and the container's or scheduler's."
    ),
    "rendezvous": (
        "Every node needs the same --rdzv-id and the same --rdzv-endpoint (or --master-addr and --master-port). "
        "`elastic-run doctor` on every node, with the same --nnodes and --rdzv-endpoint, checks the network."
    ),
    "nodes_lost": "Look at the last lines of elastic-run on the lost nodes, and at their kernel log (dmesg).",
    "refused": "All nodes of a job need the same flags, script, token and release of elastic-run.",
    "internal_error": "Please report this, with the lines above and the command line.",
}

_FULL_DISK = "`df -h` and `df -i` show what is full; --log-dir, or TMPDIR without that flag, names another place."
#: The advice for errors of the system that end with `cannot_start`, by error number; other errors have a general one.
_ERRORS: dict[int, str] = {
    errno.ENOSPC: _FULL_DISK,
    errno.EDQUOT: f"The quota of this user on that file system is used up (`quota`); {_FULL_DISK}",
    errno.EROFS: "That file system is mounted read-only; --log-dir, or TMPDIR without that flag, names another place.",
    errno.EACCES: "The job's user has no permission there: `ls -ld` shows the owner of the file and of its directory.",
    errno.ENOTDIR: "A file stands where a directory is needed: remove it; --log-dir names another place for log files.",
    errno.E2BIG: "The command line and the environment are too long together: put them into a file.",
    # Before EMFILE, whose words are the beginning of these.
    errno.ENFILE: "The machine's limit of open files is reached: `sysctl fs.file-max` shows it.",
    errno.EMFILE: "Raise the limit of open files of a process: `ulimit -n` shows it.",
    errno.ENOMEM: "Too little memory: `free -h`, `ulimit -v`, and the container's or scheduler's limit show it.",
    errno.EADDRNOTAVAIL: (
        "No network interface of this machine has that address, or not any more: `ip addr` shows the addresses, "
        "--local-addr chooses one."
    ),
    errno.EAGAIN: "Raise the limit of processes and threads: `ulimit -u`, and pids.max of the control group.",
}
#: What the detail says where a directory for temporary files is needed and none was found.
_NO_TEMPORARY = "no directory for temporary files"
_TEMPORARY_PLACES = (
    "TMPDIR, /tmp and /var/tmp are full, read-only, or this user may not write there: `df -h` and `ls -ld` show it; "
    "TMPDIR or --log-dir names another place."
)
#: Advice for details that need another advice than their verdict has in general: verdict, words of the detail, advice.
_BY_DETAIL = (
    (
        "not_executable",
        "not in a format that can be executed",
        "If it is a binary, it was built for another processor: compare `file PROGRAM` with `uname -m`.",
    ),
    ("refused", " was given to two nodes: ", "Give each node a --node-rank of its own, from 0 on."),
    (
        "rendezvous",
        "etcd at ",
        (
            "etcd answers, but does not serve this node. Check its space (`etcdctl endpoint status`, `etcdctl alarm "
            "list`), its log, and user, password and certificates in --rdzv-conf."
        ),
    ),
)
_LOG_DISK_FULL = (
    "The disk of the log directory is full, and a worker whose output is redirected there fails when it prints: "
    "`df -h` shows the disk, --log-dir chooses another."
)


def advice(result: JobResult) -> str | None:
    """Return advice against a well-known cause, or None.

    Args:
        result: The end of the job.
    """
    if result.verdict == "cannot_start" and result.signal is None:
        return _advise_start(result.detail)
    if result.root is None:
        return None if result.signal is not None else _advise_verdict(result)
    if result.verdict == "unkillable_worker":
        return _VERDICTS[result.verdict]
    if result.causes[0].kind == LOG_DISK_FULL:
        return _LOG_DISK_FULL
    return result.causes[0].help or None


def _advise_verdict(result: JobResult) -> str | None:
    found = (text for verdict, words, text in _BY_DETAIL if verdict == result.verdict and words in result.detail)
    return next(found, _VERDICTS.get(result.verdict))


def _advise_start(detail: str) -> str:
    if _NO_TEMPORARY in detail:
        return _TEMPORARY_PLACES
    known = (
        advice for number, advice in _ERRORS.items() if os.strerror(number) in detail or f"[Errno {number}]" in detail
    )
    return next(known, _VERDICTS["cannot_start"])
