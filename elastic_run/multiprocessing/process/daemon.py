"""Makes a process that leaves the launcher behind: a guardian, and the process that passes on output."""

from __future__ import annotations

import os

from elastic_run import signals
from elastic_run.multiprocessing.process.process_title import ProcessTitle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

_MAX_FD = 1 << 16
_IGNORED = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, signals.SIGQUIT, signals.SIGUSR1, signals.SIGUSR2)


def become_daemon(title: str, name: str, kept: Collection[int]) -> None:
    """Close the launcher's descriptors and change the title, in a process of its own session.

    Args:
        title: Its command line from now on.
        name: The short form.
        kept: Descriptors that stay open; the standard ones lead to /dev/null otherwise.
    """
    ignore_signals()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        if fd not in kept:
            os.dup2(null, fd)
    start = 3
    for fd in sorted(fd for fd in kept if fd >= start):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, _MAX_FD)
    os.chdir("/")
    ProcessTitle().show(title, name)


def ignore_signals() -> None:
    """Ignore signals to all processes (`kill -TERM -1`, a site's clean-up): the guardian must outlive the workers."""
    signals.set_wakeup_fd(-1)
    for number in _IGNORED:
        signals.ignore_signal(number)
    signals.default_signal(signals.SIGCHLD)
