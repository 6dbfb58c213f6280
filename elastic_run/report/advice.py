"""What to do about failures that many users meet.

What a worker says is compared with the rules of the user and then with those of `failure_rules.toml`; the first that
fits is shown. How a worker ends, without words, is looked up here.
"""

from __future__ import annotations

from elastic_run.report.failure_rules import built_in_rules, find_rule
from elastic_run.report.wording import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.report.failure_rules import Rule
    from elastic_run.report.job_result import JobResult
    from elastic_run.report.memory import OomKills

SIGHUP, SIGINT, SIGILL, SIGABRT, SIGBUS, SIGKILL, SIGSEGV, SIGPIPE, SIGTERM = 1, 2, 4, 6, 7, 9, 11, 13, 15
SIGUSR1, SIGUSR2 = 10, 12
SIGXCPU, SIGXFSZ, SIGSYS = 24, 25, 31
#: Lines of stderr in which a text is looked for, where there is no exception.
_TAIL = 20

_SIGNALS: dict[int, str] = {
    SIGBUS: (
        "SIGBUS most often means that /dev/shm is full: run the container with --ipc=host or a larger "
        "--shm-size, or use fewer DataLoader workers. A file that was cut short while mapped is another cause."
    ),
    SIGSEGV: (
        "Native code crashed. PYTHONFAULTHANDLER=1 makes Python show where; a library built for another "
        "version of PyTorch or CUDA is the usual reason."
    ),
    SIGABRT: "Native code gave up; its last words are above. PYTHONFAULTHANDLER=1 makes Python show where.",
    SIGILL: "The program was built for another CPU: install a build for this machine.",
    SIGTERM: "Somebody else sent SIGTERM, not elastic-run: the scheduler (preemption, time limit) or a person.",
    SIGINT: "Somebody else sent SIGINT, not elastic-run.",
    SIGHUP: "Somebody else sent SIGHUP, not elastic-run: a terminal was closed, or the scheduler did it.",
    SIGPIPE: "It wrote to a pipe that nobody reads any longer.",
    SIGXCPU: "Its limit of CPU time is used up: look at `ulimit -t` and the scheduler's limits.",
    SIGXFSZ: "It wrote a file larger than allowed: look at `ulimit -f`.",
    SIGSYS: "It made a system call that the sandbox forbids: look at the container's seccomp profile.",
}
_WARNINGS = (SIGUSR1, SIGUSR2)
_PASSED_ON = (
    "The script has no handler for it: install one, or leave the signal out of --forward-signals and --scale-up-signal."
)
_WARNED = (
    "Somebody else sent {name}, not elastic-run, and the script has no handler for it: the scheduler, as a warning "
    "before a limit (Slurm: --signal=B:… tells the batch script alone), or a person."
)
_VERDICTS: dict[str, str] = {
    "not_executable": (
        "Make it executable with `chmod +x`, let the job's user into the directories above it, leave --no-python away "
        "for a Python script, or see whether its file system is mounted noexec."
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
    "internal_error": "Please report this, with the lines above and the command line.",
}

_LOG_DISK_FULL = (
    "The disk of the log directory is full, and a worker whose output is redirected there fails when it prints: "
    "`df -h` shows the disk, --log-dir chooses another."
)


def advice(result: JobResult, *, oom_kills: OomKills | None = None) -> str | None:
    """Return advice against a well-known cause.

    Args:
        result: The end of the job.
        oom_kills: What the OOM killer did meanwhile; None for what the ending says of it.
    """
    if result.root is None:
        return None if result.signal is not None else _VERDICTS.get(result.verdict)
    if result.verdict == "unkillable_worker":
        return _VERDICTS[result.verdict]
    if result.is_log_disk_full:
        return _LOG_DISK_FULL
    return _text_advice(result.root, result.rules) or _end_advice(result.root, oom_kills or result.oom_kills)


def _text_advice(root: WorkerEnd, own: tuple[Rule, ...]) -> str | None:
    exception = root.certain_exception
    said = "\n".join(root.stderr_tail[-_TAIL:])[-_MOST:]
    if exception is not None:
        said = f"{exception.type}: {exception.message[:_MOST]}\n{exception.cause}"
    rule = find_rule(own, said) or find_rule(built_in_rules(), said)
    return None if rule is None else rule.help


def _end_advice(root: WorkerEnd, oom_kills: OomKills | None) -> str | None:
    if root.signal == SIGKILL:
        return _kill_advice(oom_kills)
    if root.signal == SIGSEGV and root.certain_exception is not None:
        return "Native code crashed below that line: a library built for another PyTorch or CUDA is the usual reason."
    if root.signal in _WARNINGS:
        return _PASSED_ON if root.remark else _WARNED.format(name=signal_name(root.signal))
    if root.signal is not None:
        return _SIGNALS.get(root.signal)
    return _CODES.get(root.exitcode)


def _kill_advice(oom_kills: OomKills | None) -> str:
    if oom_kills is not None and oom_kills.group:
        return (
            "The kernel's OOM killer ended it: the job's memory limit is reached. Use a smaller batch or fewer "
            "DataLoader workers, or ask for more memory."
        )
    if oom_kills is not None and oom_kills.machine:
        return (
            "The kernel's OOM killer was at work on this machine meanwhile, so memory ran out most likely: use "
            "less, or ask for more. To be sure: `dmesg | grep -i oom`"
        )
    if oom_kills is not None and oom_kills.machine == 0:
        return "Not the kernel's OOM killer: the scheduler, the container's runtime or a person sent SIGKILL."
    return (
        "Most often the kernel's OOM killer: `dmesg | grep -i oom` tells. Else the scheduler or a person sent SIGKILL."
    )


_MOST = 8 * 1024
_CODES: dict[int, str] = {
    126: "A program that the worker ran may not be executed: `chmod +x`, or a file system that is mounted noexec.",
    127: "A program that the worker ran was not found: check PATH and the names in the script.",
}
