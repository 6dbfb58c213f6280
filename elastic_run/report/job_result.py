"""How a job ended: the record that report, failure.json and error file are made of, with its causes and a hint.

Rules on failures are data: the signs of a failure, and the hint for it. The rules of elastic-run stand in
`failure_hints.toml`; --failure-rules adds a file of the same form, which is checked as a whole before anything starts.
"""

from __future__ import annotations

import errno
import os
import re

from elastic_run.core.job.restart_policy import RULE_DECISIONS
from elastic_run.files import read_toml
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from elastic_run.core.failure.diagnose import Cause, RecorderFinding, Rule
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.core.failure.stacks import Place
    from elastic_run.core.job.documents import EqualErrors

#: Verdicts whose detail says which nodes are lost, or why this node has to go.
_OF_NODES = frozenset(("nodes_lost", "excluded", "unhealthy"))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failure that was tried again."""

    restart_count: int  # Number of the attempt, the first is 0
    root: WorkerEnd | None  # The worker that failed first, or None
    started_at: float  # Wall clock, seconds since the epoch
    uptime: float  # Seconds until the first failure
    kept_state: str | None = None  # The step of the state that was kept by then, with --keep-state


@dataclass(slots=True)
class JobResult:
    """The end of a job."""

    verdict: str  # A name from `contract.EXIT_CODES`
    exit_code: int  # The launcher's exit code
    entrypoint: str = ""  # The workers' program, such as `train.py`
    role: str = "default"  # Name of the workers' role
    run_id: str = ""  # The job's id
    root: WorkerEnd | None = None  # The worker that failed first in the last attempt, or None
    ends: tuple[WorkerEnd, ...] = ()  # The ends of the last attempt's workers
    #: Where the ranks of a job of several nodes were that did not stop; None if this node knows only its own
    stuck: Mapping[int, Place] | None = None
    equal_errors: EqualErrors | None = None  # Which workers of a job of several nodes had the error of `root`, or None
    attempts: tuple[Attempt, ...] = ()  # The failures before it, oldest first
    restarts_used: int = 0  # Restarts that were made
    max_restarts: int = 0  # Restarts that were allowed
    log_dir: str = ""  # Directory of this run's logs, or ""
    detail: str = ""  # One sentence on a verdict of the launcher, or ""
    #: The finding from the flight recorder's dumps, such as a rank that did not join a collective, or None
    recorder: RecorderFinding | None = None
    versions: str = ""  # The nodes of each version of torch; "" if all have the same
    rule: Rule | None = None  # The user's own rule on the failure of `root`, or None
    store_port: int | None = None  # Port of the workers' store in the last attempt if an agent serves it, or None
    signal: int | None = None  # The signal that stopped the launcher, or None
    world_size: int = 1  # Workers in the job
    nnodes: int = 1  # Nodes in the job
    #: Pid and kernel wait channel of each process that SIGKILL could not end
    survivors: tuple[tuple[int, str], ...] = ()
    ended_at: float = 0.0  # Wall clock, seconds since the epoch
    failure_file: str = ""  # Path of the failure.json that was written, or ""
    is_log_disk_full: bool = False  # Whether the disk of the logs is full
    #: Whether this node shows one line in place of the whole report, which the host of `root` shows
    is_brief: bool = False

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the failure, the likeliest first."""
        from elastic_run.core.failure.diagnose import Evidence, diagnose  # a success needs no expressions

        return diagnose(
            Evidence(
                root=self.root,
                ends=self.ends,
                stuck=self.stuck,
                recorder=self.recorder,
                node_event=self.detail if self.verdict in _OF_NODES else "",
                versions=self.versions,
                is_log_disk_full=self.is_log_disk_full,
                rule=self.rule,
                rules=built_in_rules(),
                store_port=self.store_port,
            )
        )


_KEYS, _OPTIONAL = ("match", "help"), ("decision",)
_BUILT_IN = os.path.join(os.path.dirname(__file__), "failure_hints.toml")


def built_in_rules() -> tuple[Rule, ...]:
    """Return the rules of elastic-run; none if this Python can't read TOML (3.10 without tomli)."""
    try:
        return read_rules(_BUILT_IN, keys=(*_OPTIONAL, "cause"))
    except ValueError:
        return ()


def read_rules(path: str, *, keys: Sequence[str] = _OPTIONAL) -> tuple[Rule, ...]:
    """Read a file of rules.

    Raises:
        ValueError: The file can't be read, or a rule is wrong; the message names the file and the rule.
    """
    document = read_toml(path)
    if unknown := sorted(set(document) - {"rule"}):
        message = f"{path}: {unknown[0]!r} is not a key outside of rules; each rule begins with [[rule]]"
        raise ValueError(message)
    entries = document.get("rule")
    if not isinstance(entries, list) or not entries:
        message = f"{path}: there is no [[rule]], a table with match and help"
        raise ValueError(message)
    return tuple(_rule(entry, f"{path}, rule {number}", keys) for number, entry in enumerate(entries, 1))


def _rule(entry: Any, place: str, keys: Sequence[str]) -> Rule:
    if not isinstance(entry, dict):
        message = f"{place}: a rule is a table: [[rule]]"
        raise ValueError(message)  # noqa: TRY004 - as the other errors of a file
    if unknown := sorted(set(entry) - {*_KEYS, *keys}):
        message = f"{place}: {unknown[0]!r} is not a key of a rule, which has {', '.join((*_KEYS, *keys))}"
        raise ValueError(message)
    for key in sorted({*_KEYS, *entry}):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            message = f"{place}: the rule's {key} is missing, empty or not a text"
            raise ValueError(message)
    try:
        re.compile(entry["match"])
    except (re.error, OverflowError, RecursionError) as error:
        message = f"{place}: match is not a regular expression: {error}"
        raise ValueError(message) from None
    decision = entry.get("decision", "")
    if decision and decision not in RULE_DECISIONS:
        message = f"{place}: the rule's decision is {decision!r}, which is none of {', '.join(RULE_DECISIONS)}"
        raise ValueError(message)
    from elastic_run.core.failure.diagnose import Rule

    return Rule(entry["match"], entry["help"], decision, entry.get("cause", ""))


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
    """Return advice against a well-known cause, or None."""
    if result.verdict == "cannot_start" and result.signal is None:
        return _advise_start(result.detail)
    if result.root is None:
        return None if result.signal is not None else _advise_verdict(result)
    if result.verdict == "unkillable_worker":
        return _VERDICTS[result.verdict]
    from elastic_run.core.failure.diagnose import LOG_DISK_FULL

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
