"""What the kernel's log says of a worker that failed: the OOM killer, a crash of native code, a defect of a GPU. Pure.

Sources: the kernel's mm/oom_kill.c, arch/x86/mm/fault.c, arch/x86/kernel/traps.c and arch/arm64/kernel/traps.c, and
NVIDIA's list of Xid errors. A crash is logged with the number of its thread, which is the pid in the main thread only.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.failure.root_cause import WorkerEnd

#: ILL, TRAP, ABRT, BUS, FPE, KILL, SEGV.
_SIGNALS = frozenset((4, 5, 6, 7, 8, 9, 11))
#: Xid errors of a GPU, its memory or its link: double-bit errors, failed repairs, NVLink errors, a GPU that fell off
#: the bus, no answer of its GSP. Others, such as 13, 31 and 43, are mostly errors of the program.
_DEFECTS = frozenset((48, 63, 64, 74, 79, 94, 95, 110, 119, 120, 140))
_OOM_KILL = re.compile(r"\bKilled process (\d+)\b")
_CRASH = re.compile(r"\[(\d+)\]:? (?:segfault at|trap |general protection|unhandled )")
_XID = re.compile(r"\bNVRM: Xid \([^)]*\): (\d+),")
_GPU = re.compile(r"CUDA|NCCL|cuDNN|NVML|\bGPU\b", re.IGNORECASE)
#: A process of the worker whose death the worker tells: `DataLoader worker (pid 4711) is killed by signal: Killed`.
_CHILD = re.compile(r"\bpid(?:\(s\))?:? (\d+)")


def may_tell(end: WorkerEnd, words: str) -> bool:
    """Whether the kernel's log may say something of a worker's failure.

    Args:
        end: The worker.
        words: What it said last.
    """
    return end.signal in _SIGNALS or _GPU.search(words) is not None or _CHILD.search(words) is not None


def find_line(end: WorkerEnd, words: str, lines: Sequence[str], *, has_own_pids: bool) -> str:
    """Return the line that tells the cause of a worker's failure, or "".

    Args:
        end: The worker.
        words: What it said last.
        lines: Of the kernel's log since the worker's start.
        has_own_pids: Whether the log's pids are those that this launcher sees, as in no container.
    """
    pids = {str(end.pid), *_CHILD.findall(words)} if has_own_pids else frozenset[str]()
    for pattern in (_OOM_KILL, _CRASH):
        for line in lines:
            found = pattern.search(line)
            if found is not None and found[1] in pids:
                return line
    is_of_gpu = end.signal in _SIGNALS or _GPU.search(words) is not None
    return next(filter(is_gpu_defect, lines), "") if is_of_gpu else ""


def is_oom_kill(line: str) -> bool:
    """Whether a line tells a kill by the OOM killer."""
    return _OOM_KILL.search(line) is not None


def is_gpu_defect(line: str) -> bool:
    """Whether a line tells a defect of a GPU, rather than an error of the program that used it."""
    found = _XID.search(line)
    return found is not None and int(found[1]) in _DEFECTS
