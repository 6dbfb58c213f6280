"""Lets a child process read files of strangers, within bounds of time and memory.

A crafted pickle may keep one call of the interpreter's own busy for ever (a tuple that holds another one twice, 60
levels deep, as the key of a dict), or let it take all memory. No handler of a signal interrupts such a call, so the
kernel bounds the process: the time of its CPU, since a pipe may be slow, and its address space.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback

from elastic_run import contract, libc
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds of CPU time and bytes of memory for one file, and more for each byte of it: Python's objects are larger.
_CPU_TIME, _CPU_TIME_FOR_BYTE = 5.0, 1 / (1 << 20)
_MEMORY, _MEMORY_FOR_BYTE = 1 << 30, 64
_PR_SET_PDEATHSIG = 1


def run_bounded(work: Callable[[Callable[[str, int], None]], int]) -> int:
    """Do something in a child process, and return its exit code.

    Args:
        work: Gets a function that it calls before each file, with the path and the size of what it begins with.

    Raises:
        UsageError: The work raised it, or a file took too much.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = contract.EXIT_FAILURE
        try:
            code = _work(work, writer)
        finally:
            os._exit(code)
    os.close(writer)
    try:
        with open(reader, encoding="utf-8", errors="surrogateescape") as told:
            *paths, error = ["", *told.read().split("\0")]
        status = os.waitpid(child, 0)[1]
    except BaseException:  # Ctrl-C, which the child may not hear
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        ended = "it took too long" if -code == signal.SIGVTALRM else f"signal {-code}"
        error = f"{paths[-1]!r}: reading it was ended: {ended}"
    if error:
        raise UsageError(error)
    return code


def _work(work: Callable[[Callable[[str, int], None]], int], writer: int) -> int:
    """Do the work, and tell each path, and behind them the error that the user gets."""
    libc.call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)

    def tell(text: str) -> None:
        os.write(writer, text.encode("utf-8", "surrogateescape"))

    def begin(path: str, size: int) -> None:
        tell(f"{path}\0")
        signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_TIME + _CPU_TIME_FOR_BYTE * size)
        _bound_memory(_MEMORY + _MEMORY_FOR_BYTE * size)

    try:
        return work(begin)
    except UsageError as error:
        tell(str(error))
        return contract.EXIT_USAGE
    except KeyboardInterrupt:  # the parent has it as well
        return contract.EXIT_SIGNAL_BASE + signal.SIGINT
    except BaseException:  # noqa: BLE001 - a defect is shown as it is in a process of its own
        traceback.print_exc(file=sys.stderr)
        return contract.EXIT_FAILURE


def _bound_memory(more: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
