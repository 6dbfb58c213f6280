"""A process as the kernel shows it without ptrace and without root: signals, and where its threads sleep.

psutil tells neither the masks of signals, nor the state of a thread, nor the kernel's function.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.core.failure.stacks import IGNORES, STOPPED
from elastic_run.multiprocessing.fork_exec import is_interpreters_name, read_name
from elastic_run.multiprocessing.process_table import read_stat, wait_channel
from elastic_run.signals import LOCK_STACK_SIGNAL, MAIN_STACK_SIGNAL, PYTHON_STACK_SIGNAL, STACK_SIGNAL, call_libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.multiprocessing.fork_exec import StackPipe

#: Meaning of a state's letter for a user who waits for the process.
_STATES = {b"T": STOPPED, b"t": "is stopped by a debugger", b"Z": "has ended"}
#: The bits of the signals for stacks in the kernel's masks.
_NUMBERS = (STACK_SIGNAL, MAIN_STACK_SIGNAL, PYTHON_STACK_SIGNAL, LOCK_STACK_SIGNAL)
_BITS = sum(1 << (number - 1) for number in _NUMBERS if number > 0)
#: A process of one thread that waits for a signal.
PAUSED = "waits for a signal (pause, sigsuspend), so none was sent for its stacks"
#: A process whose threads hold the signal back.
BLOCKS = f"blocks signal {STACK_SIGNAL}"
#: Threads of which the details tell.
_MOST_THREADS = 200


def find_obstacle(pid: int, pipe: StackPipe | None) -> str:
    """Return why a process must not get the signal for its stacks, as a predicate such as `has ended`; or ""."""
    stat = read_stat(pid)
    if stat is None or stat.state in _STATES:
        return "has ended" if stat is None else _STATES[stat.state]
    masks = read_masks(f"{pid}")
    if masks.get("SigIgn", 0) & _BITS:
        return f"{IGNORES}{STACK_SIGNAL}: its Python has ended, or the program asked for that"
    has_pipe = False
    if pipe is not None:
        try:
            has_pipe = os.path.samestat(os.stat(f"/proc/{pid}/fd/{pipe.number}"), os.fstat(pipe.reading))
        except OSError:
            pass
    if masks.get("SigCgt", 0) & _BITS != _BITS:
        reason = f"shows no Python stacks: {_explain_missing(pid)}"
    elif has_pipe:
        return ""
    elif (stat := read_stat(pid)) is None or stat.is_exiting:  # it may have begun to end
        return "has ended"
    else:
        reason = "has closed the descriptor for its stacks"
    where = wait_channel(pid)
    return f"{reason} ({read_name(pid)}{f', in {where}' if where else ''})"


def _explain_missing(pid: int) -> str:
    """Return why a process has no handler for the signal."""
    if os.environ.get(contract.ENV_STACKS) == "0":
        return f"{contract.ENV_STACKS}=0"
    try:
        if not is_interpreters_name(os.path.basename(os.readlink(f"/proc/{pid}/exe"))):
            return "it is not a Python program"
    except OSError:
        pass  # it has ended, or is another user's
    return (
        "its Python does not read elastic-run-compat.pth: it has just been started or executed another Python, "
        "elastic-run is not installed there, it runs with -S, or there were too few descriptors (ulimit -n)"
    )


def read_masks(task: str) -> dict[str, int]:
    """Return the signal masks of a process (`12`) or of one thread (`12/task/13`) by the kernel's names."""
    try:
        with open(f"/proc/{task}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    found = (line.partition(b":") for line in lines if line.startswith((b"Sig", b"ShdPnd")))
    return {name.decode(): int(value, 16) for name, _, value in found if b"/" not in value}


def threads_that_block(pid: int) -> frozenset[str]:
    """Return the threads that block the signal for stacks; a thread that runs its handler is among them."""
    return frozenset(thread for thread in _threads(pid) if read_masks(f"{pid}/task/{thread}").get("SigBlk", 0) & _BITS)


def takes_signal(pid: int, number: int) -> bool:
    """Whether a thread of a process takes a signal at once; some signals are for the main thread alone."""
    threads = [str(pid)] if number in (MAIN_STACK_SIGNAL, LOCK_STACK_SIGNAL) else _threads(pid)
    masks = (read_masks(f"{pid}/task/{thread}") for thread in threads)
    return any(not mask.get("SigBlk", ~0) >> (number - 1) & 1 for mask in masks)


def is_calm(pid: int) -> bool:
    """Whether no thread of a process but the first has a processor, or waits for one."""
    stats = (read_stat(f"{pid}/task/{thread}") for thread in _threads(pid) if thread != str(pid))
    return not any(stat is not None and stat.state == b"R" for stat in stats)


def waits_for_lock(pid: int) -> bool:
    """Whether the first thread of a process waits for a lock, of Python or of C."""
    return "futex" in wait_channel(pid)


def waits_for_signal(pid: int) -> bool:
    """Whether the first thread of a process waits for a signal, whichever comes: C code goes on after it."""
    return any(call in wait_channel(pid) for call in ("sys_pause", "sigsuspend"))


def send_beside_main(pid: int, number: int) -> bool:
    """Send a signal to a thread of a process that is not the first one; return whether there is one that takes it."""
    for thread in _threads(pid):
        if thread != str(pid) and not read_masks(f"{pid}/task/{thread}").get("SigBlk", ~0) >> (number - 1) & 1:
            try:
                return call_libc("tgkill", pid, int(thread), number) == 0
            except (ImportError, AttributeError, OSError):  # no ctypes, or an old C library
                return False
    return False


def is_main_running(pid: int) -> bool:
    """Whether the first thread of a process has a processor, or waits for one."""
    stat = read_stat(f"{pid}/task/{pid}")
    return stat is not None and stat.state == b"R"


def is_pending(pid: int) -> bool:
    """Whether the signal for stacks has been sent to a process and no thread has taken it."""
    return bool(read_masks(str(pid)).get("ShdPnd", 0) & _BITS)


def explain_silence(pid: int) -> str:
    """Return why a process that got the signal has written nothing, as a predicate such as `has ended`."""
    stat = read_stat(pid)
    if stat is None or stat.state in _STATES:
        return "has ended" if stat is None else _STATES[stat.state]
    where = wait_channel(pid)
    if stat.state == b"D":
        return f"is in uninterruptible sleep in the kernel{f' ({where})' if where else ''}"
    if is_pending(pid):
        is_busy = stat.state == b"R"
        return "has got no processor time to write its stacks" if is_busy else BLOCKS
    return f"has a handler of its own for signal {STACK_SIGNAL}"


def describe_threads(pid: int) -> str:
    """Return one line for each thread: its name, state, and where it is in the kernel; the stack there for root."""
    lines = []
    for thread in _threads(pid)[:_MOST_THREADS]:
        task = f"{pid}/task/{thread}"
        stat = read_stat(task)
        if stat is not None:
            call, stack = _read(task, "syscall").partition(" ")[0], _read(task, "stack")
            call = f"syscall {call}" if call.isdecimal() else call
            where = f"{call} {_read(task, 'wchan')}".strip()
            lines.append(f"thread {thread} ({_read(task, 'comm')}) state {stat.state.decode()} {where}".rstrip())
            lines += [f"    {line.partition('] ')[2] or line}" for line in stack.splitlines()]
    return "\n".join(lines)


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _read(task: str, name: str) -> str:
    try:
        with open(f"/proc/{task}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
