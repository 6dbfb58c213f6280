"""What to do about failures that many users meet: a table of how each looks and what helps.

The first row that fits is shown. A row describes one cause and names the command, flag or variable that helps. A
failure without a well-known cause gets no advice, rather than a guess.
"""

from __future__ import annotations

import re

from elastic_run.report.wording import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.report.job_result import JobResult
    from elastic_run.report.memory import OomKills

SIGHUP, SIGINT, SIGILL, SIGABRT, SIGBUS, SIGKILL, SIGSEGV, SIGPIPE, SIGTERM = 1, 2, 4, 6, 7, 9, 11, 13, 15
SIGUSR1, SIGUSR2 = 10, 12
SIGXCPU, SIGXFSZ, SIGSYS = 24, 25, 31
#: Lines of stderr in which a text is looked for, where there is no exception.
_TAIL = 20

#: What a failure says, and what helps. The exception's type, message and cause are searched, or the end of stderr.
_TEXTS: tuple[tuple[str, str], ...] = (
    (
        r"insufficient shared memory \(shm\)|DataLoader worker .*Bus error|out of shared memory",
        (
            "Shared memory (/dev/shm) is full: run the container with --ipc=host or a larger --shm-size "
            "(Kubernetes: an emptyDir with medium Memory), or use fewer DataLoader workers."
        ),
    ),
    (
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|HIP out of memory",
        (
            "The GPU's memory is full: a smaller batch or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            "helps; nvidia-smi shows whether another process still holds some."
        ),
    ),
    (
        r"DataLoader worker \(pid.*\) is killed by signal: Killed|DataLoader worker .*exited unexpectedly",
        (
            "A DataLoader process died, most often for lack of memory: use fewer DataLoader workers "
            "(num_workers), and look for the OOM killer with: `dmesg | grep -i oom`"
        ),
    ),
    (
        r"invalid device ordinal",
        (
            "There are more workers than visible GPUs: compare --nproc-per-node (gpu counts them) and "
            "CUDA_VISIBLE_DEVICES with what `nvidia-smi -L` lists."
        ),
    ),
    (
        r"Duplicate GPU detected",
        (
            "Two ranks use one GPU: call `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before anything "
            "else on CUDA, or use --virtual-local-rank."
        ),
    ),
    (
        r"device-side assert triggered|CUDA error: an illegal memory access",
        (
            "A CUDA kernel failed earlier than this line: CUDA_LAUNCH_BLOCKING=1 shows where. An index out of "
            "range is the usual reason."
        ),
    ),
    (
        r"no kernel image is available|CUDA driver version is insufficient|driver on your system is too old",
        "PyTorch's CUDA build doesn't fit this GPU or its driver: compare torch.version.cuda with nvidia-smi.",
    ),
    (
        r"^TimerExpired: ",
        (
            "The script set that deadline itself (timer.expires). A timer with signal=SIGABRT makes faulthandler show "
            "where the worker hung; `py-spy dump --pid` shows it while it hangs."
        ),
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was used before a fork: give the DataLoader `multiprocessing_context='spawn'`, or use CUDA later.",
    ),
    (
        r"NCCL.*unhandled cuda error|NCCL.*unhandled system error|ncclSystemError|ncclUnhandledCudaError",
        "NCCL_DEBUG=INFO makes NCCL say what went wrong; NCCL_SOCKET_IFNAME names the right one of several networks.",
    ),
    (
        r"caught collective operation timeout",
        (
            "A rank came late to a collective, or never: look for the rank that did not time out. "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL finds ranks that call different collectives."
        ),
    ),
    (
        # Aborts 6 of 12 jobs of 4 gloo workers on 2 busy cores: a thread of the group wants Python while it ends.
        r"terminate called without an active exception",
        (
            "The process group most likely outlived destroy_process_group(), as after DistributedDataParallel "
            "(torch 2.13): import torch.distributed.nn before init_process_group(), and let the model go first."
        ),
    ),
    (
        r"EADDRINUSE|[Aa]ddress already in use",
        (
            "Another process has this port (`ss -ltnp` shows which). Leave --master-port away and a free one is "
            "taken; for a port of the program's own, choose another."
        ),
    ),
    (
        r"Connection closed by peer|Connection reset by peer|Connection was likely closed|ncclRemoteError",
        "This rank lost a peer, so the cause is elsewhere: look at what the other ranks and nodes said last.",
    ),
    (
        r"waiting for clients\. \d+/\d+ clients joined|client socket has timed out",
        (
            "Not all ranks came together: every rank has to call init_process_group, and they have to be able "
            "to reach MASTER_ADDR:MASTER_PORT (firewall, wrong interface)."
        ),
    ),
    (
        r"unrecognized arguments:.*--local[-_]rank",
        (
            "The script doesn't take --local-rank, which the legacy front door adds: start it with elastic-run "
            "itself, or add --use-env; LOCAL_RANK stands in the environment."
        ),
    ),
    (
        r"cannot open shared object file|undefined symbol|GLIBC(?:XX)?_[\d.]+' not found",
        (
            "A native library is missing or of another version: check LD_LIBRARY_PATH and that this "
            "environment was built for this machine."
        ),
    ),
    (
        r"ModuleNotFoundError|: No module named ",
        (
            "The workers' Python can't find that module: activate the environment that has it (PYTHON_EXEC "
            "names another interpreter), or add its directory to PYTHONPATH."
        ),
    ),
    (
        r"^ImportError.*(?:circular import|partially initialized module)",
        "Often a file of yours has the name of a library's module: rename it.",
    ),
    (
        r"^ImportError",
        (
            "The module is there but not in the version that is expected: compare the versions (pip list) with "
            "those that the program needs."
        ),
    ),
    (
        r"can't open file '.*No such file",
        "The script is not there: a relative path counts from the directory in which elastic-run was started.",
    ),
    (
        r"No space left on device|Errno 28\b",
        (
            "A disk is full: `df -h` shows which (also /tmp and /dev/shm; `df -i` for inodes). TMPDIR moves "
            "temporary files."
        ),
    ),
    (r"Disk quota exceeded|Errno 122\b", "Your disk quota is used up: `quota -s` shows which."),
    (
        r"Too many open files|Errno 24\b",
        (
            "The limit of open files is reached: raise it with `ulimit -n`, or call "
            "`torch.multiprocessing.set_sharing_strategy('file_system')`."
        ),
    ),
    (
        r"can't start new thread|Resource temporarily unavailable",
        (
            "The limit of processes and threads is reached: look at `ulimit -u` and the container's pids limit, "
            "or use fewer DataLoader workers."
        ),
    ),
    (
        r"Cannot allocate memory|Errno 12\b|\bMemoryError\b|DefaultCPUAllocator: can't allocate memory",
        "The machine's memory is full: use a smaller batch or fewer DataLoader workers, or ask for more memory.",
    ),
    (
        r"before the\s+current process has finished its bootstrapping",
        "The script starts processes while it is imported: put its code under `if __name__ == '__main__':`",
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        "Some parameters got no gradient: `DistributedDataParallel(..., find_unused_parameters=True)` allows that.",
    ),
    (
        r"Default process group has not been initialized",
        "Call torch.distributed.init_process_group() before this line.",
    ),
    (
        r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected",
        "Something took the launcher's variables out of the environment: hand it on whole.",
    ),
    (r"^RecursionError", "A function calls itself without end: the trace shows which."),
    (r"Permission denied|Errno 13\b", "The user that runs the job may not use that file: `ls -l` shows who may."),
)
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
    return _text_advice(result.root) or _end_advice(result.root, oom_kills or result.oom_kills)


def _text_advice(root: WorkerEnd) -> str | None:
    exception = root.certain_exception
    said = "\n".join(root.stderr_tail[-_TAIL:])[-_MOST:]
    if exception is not None:
        said = f"{exception.type}: {exception.message[:_MOST]}\n{exception.cause}"
    return next((text for pattern, text in _TEXTS if re.search(pattern, said)), None)


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
