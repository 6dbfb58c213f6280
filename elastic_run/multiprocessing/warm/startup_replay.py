"""Finds the variables that were read at Python's own start before the line of our .pth file, in another process.

Python reads the .pth files of a directory by name, and the user's own directory before ours. Afterwards nothing shows
which variables their lines have read. So a process with the template's options and environment, and with -S, begins an
`EnvironmentWatch` and then repeats Python's own start. It reports the reads, and runs no program.

It is started only if a line of another package has run before ours, and works while the template starts.
"""

from __future__ import annotations

import os
import sys

from elastic_run import contract
from elastic_run.multiprocessing.warm import messages
from elastic_run.multiprocessing.warm.environment_watch import EnvironmentWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_EXECUTED = (b"import ", b"import\t")
#: The package is found as it was in the template, whatever the path is before Python's own start.
_PROGRAM = (
    "import sys; sys.flags.isolated or getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "sys.path.append({root!r}); from elastic_run.multiprocessing.warm.startup_replay import replay_startup; "
    "sys.path.pop(); replay_startup({descriptor})"
)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


class StartupReplay:
    """The process that runs Python's own start again; made in the line of our .pth file."""

    def __init__(self) -> None:
        self._channel, theirs = reversed(messages.open_pair())
        os.set_inheritable(theirs.fileno(), True)
        program = _PROGRAM.format(root=_ROOT, descriptor=theirs.fileno())
        argv = [*sys.orig_argv[: _count_options() + 1], "-S", "-c", program]
        null = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in range(3)]
        self._pid = os.posix_spawn(sys.executable, argv, os.environ, file_actions=null)
        theirs.close()

    def report(self) -> dict[str, Any] | None:
        """Wait for what it has seen; None where it has failed."""
        found = messages.receive(self._channel)
        self._channel.close()
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            pass  # SIGCHLD was inherited as ignored
        return found and found[0]


def _count_options() -> int:
    """Return how many words of the command line are Python's own options."""
    program = 2 if sys.argv[0] in ("-m", "-c") else 1
    return len(sys.orig_argv) - len(sys.argv) - program


def replay_startup(descriptor: int) -> None:
    """Go through Python's own start under watch, and end."""
    import site

    channel = messages.adopt(descriptor)
    os.set_inheritable(descriptor, False)
    watch = EnvironmentWatch()
    try:
        site.main()
    except BaseException:  # noqa: BLE001, S110 - whatever others' code raises: Python goes on or ends, and so would the template
        pass
    messages.send(channel, watch.report())
    os._exit(0)


def has_earlier_lines() -> bool:
    """Whether code of others may have run before our .pth file, at this moment of Python's own start."""
    import site

    # The environment's own directory comes first, and is among the others only afterwards.
    directories = {
        *site.getsitepackages([sys.prefix, *site.PREFIXES]),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else ()),
    }
    return any(_has_code(directory) for directory in directories.intersection(sys.path))


def _has_code(directory: str) -> bool:
    """Whether a directory has lines that are executed, before our own file where that is there."""
    for name in sorted(os.listdir(directory)):
        if name.endswith(".pth"):
            with open(os.path.join(directory, name), "rb") as file:
                lines = file.read().splitlines()
            if any(contract.ENV_TEMPLATE.encode() in line for line in lines):
                return False
            if any(line.startswith(_EXECUTED) for line in lines):
                return True
    return False
