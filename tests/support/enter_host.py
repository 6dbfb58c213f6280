"""Run a command inside the namespaces of a running process; a program of its own, started by `tests.support.hosts`.

    enter_host.py PID COMMAND…

nsenter does nearly this. It also stops itself when its child is stopped, so a child that is sent SIGSTOP and SIGCONT by
a test may leave a stopped nsenter for ever. This one only waits, and ends as the command ended: same code, same signal.
Killed, it takes the command with it. It is started with ``-I -S``: no module but these.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: The mount namespace last: the others are found through /proc, which changes with it.
NAMESPACES = ("time_for_children", "uts", "ipc", "net", "pid", "mnt")
_PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: int) -> None:
    """Move this process into the namespaces of another (pid and time namespace: its children)."""
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in NAMESPACES]
    for descriptor in opened:
        if libc.setns(descriptor, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        os.close(descriptor)


def execute(command: list[str], directory: str) -> None:
    """Become the command, in a session of its own."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(directory)
    os.execvp(command[0], command)  # noqa: S606 - this is what the program is for


def main() -> None:
    """Enter, run, end in the same way."""
    directory = os.getcwd()  # noqa: PTH109 - pathlib takes longer to import than all of this takes to run
    enter(int(sys.argv[1]))
    child = os.fork()
    if child == 0:
        try:
            execute(sys.argv[2:], directory)
        except OSError as error:
            os.write(2, f"{sys.argv[2]}: {error}\n".encode())
        os._exit(127)
    devnull = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):  # the pipes end with the command, not with this process
        os.dup2(devnull, descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    libc.prctl(4, 0)  # PR_SET_DUMPABLE: one core file is enough
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main()
