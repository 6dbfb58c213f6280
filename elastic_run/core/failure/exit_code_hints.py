"""The hint for a worker's end that says nothing but its number: a signal, an exit code. Pure."""

from __future__ import annotations

from elastic_run.core.failure.exception_text import FATAL_ERROR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.oom_kills import OomKills
    from elastic_run.core.failure.root_cause import WorkerEnd

SIGHUP, SIGINT, SIGILL, SIGABRT, SIGBUS, SIGKILL, SIGSEGV, SIGPIPE, SIGTERM = 1, 2, 4, 6, 7, 9, 11, 13, 15
SIGUSR1, SIGUSR2 = 10, 12
SIGXCPU, SIGXFSZ, SIGSYS = 24, 25, 31

_SIGNALS: dict[int, str] = {
    SIGBUS: (
        "SIGBUS most often means that /dev/shm is full: run the container with --ipc=host or a larger "
        "--shm-size, or use fewer DataLoader workers. Another cause is that a mapped file was truncated."
    ),
    SIGSEGV: (
        "Native code crashed. PYTHONFAULTHANDLER=1 makes Python show where; a library built for another "
        "version of PyTorch or CUDA is the usual reason."
    ),
    SIGABRT: "Native code aborted; its last lines are above. PYTHONFAULTHANDLER=1 makes Python show where.",
    SIGILL: "The program was built for another CPU: install a build for this machine.",
    SIGTERM: "elastic-run did not send SIGTERM: the scheduler (preemption, time limit) or a person did.",
    SIGINT: "elastic-run did not send SIGINT: another program or a person did.",
    SIGHUP: "elastic-run did not send SIGHUP: a terminal was closed, or the scheduler sent it.",
    SIGPIPE: "The worker wrote to a pipe whose reader has ended.",
    SIGXCPU: "The worker's limit of CPU time is used up: look at `ulimit -t` and the scheduler's limits.",
    SIGXFSZ: "The worker wrote a file larger than allowed: look at `ulimit -f`.",
    SIGSYS: "The worker made a system call that the sandbox forbids: look at the container's seccomp profile.",
}
_WARNINGS = {SIGUSR1: "SIGUSR1", SIGUSR2: "SIGUSR2"}
_PASSED_ON = (
    "The script has no handler for this signal: install one, or leave the signal out of --forward-signals and "
    "--scale-up-signal."
)
_WARNED = (
    "elastic-run did not send {name}, and the script has no handler for it: the scheduler sent it as a warning before "
    "a limit (Slurm: --signal=B:… warns only the batch script), or a person did."
)
_CODES: dict[int, str] = {
    126: (
        "The system refused to execute a program that the worker ran: make it executable with `chmod +x`, or check "
        "whether its file system is mounted noexec."
    ),
    127: "A program that the worker ran was not found: check PATH and the names in the script.",
}


def help_against_end(end: WorkerEnd) -> str:
    """Return what helps against the way in which a worker ended.

    Args:
        end: The worker.

    Returns:
        A sentence or two, or "" where there is nothing to say.
    """
    if end.signal == SIGKILL:
        return _help_against_kill(end.oom_kills)
    if end.signal == SIGSEGV and end.exception is not None and end.exception.type == FATAL_ERROR:
        return "Native code crashed below that line: a library built for another PyTorch or CUDA is the usual reason."
    if end.signal in _WARNINGS:
        return _PASSED_ON if end.remark else _WARNED.format(name=_WARNINGS[end.signal])
    if end.signal is not None:
        return _SIGNALS.get(end.signal, "")
    return _CODES.get(end.exitcode, "")


def _help_against_kill(oom_kills: OomKills | None) -> str:
    if oom_kills is not None and oom_kills.group:
        return "Use a smaller batch or fewer DataLoader workers, or ask for more memory."
    if oom_kills is not None and oom_kills.machine:
        return "Use less memory, or ask for more. To be sure: `dmesg | grep -i oom`"
    if oom_kills is not None and oom_kills.machine == 0:
        return (
            "The kernel's OOM killer did not do this: the scheduler, the container's runtime, a limit of CPU time "
            "(`ulimit -Ht`) or a person sent SIGKILL."
        )
    return (
        "The kernel's OOM killer, the scheduler or a person sent SIGKILL: `dmesg | grep -i oom` shows whether it was "
        "the kernel."
    )
