"""Passes on the output of background processes after their job has succeeded, in a small process of its own.

The workers' stderr passes through the launcher, and a process that writes into a pipe without a reader gets SIGPIPE. So
the launcher leaves its reading ends to this process, which lives until the last background process has ended. It holds
the launcher's stdout or stderr open, as the background processes themselves do under torch.

It is a fork if the launcher is the whole process, and exec'd inside a program that has an interpreter. In both cases it
is no child of the launcher.
"""

from __future__ import annotations

import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_SIZE = 1 << 16
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from elastic_run.multiprocessing.output import remainder; remainder.main()"
)


class OpenStream:
    """A stream that background processes may still write to: the launcher's end, and the descriptors that get it."""

    __slots__ = ("reading", "targets")

    def __init__(self, reading: int, targets: Sequence[int]) -> None:
        self.reading = reading
        self.targets = list(targets)


def leave(sources: Sequence[OpenStream], *, is_exec: bool) -> int:
    """Start the process that passes on what comes; returns its session when it has its descriptors."""
    interpreter = ""
    if is_exec:
        from elastic_run.multiprocessing.process.interpreter import find_interpreter

        interpreter = find_interpreter()
    pid = _spawn(interpreter, sources) if interpreter else os.fork()
    if not pid:
        try:
            os.setsid()
            _run(sources)
        finally:
            os._exit(0)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # another part of this program was quicker
    return pid


def _spawn(interpreter: str, sources: Sequence[OpenStream]) -> int:
    from elastic_run.multiprocessing.process.fork_exec import inheritable_descriptors, start_process

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    words = [f"{source.reading}:{','.join(map(str, source.targets))}" for source in sources]
    kept = {fd for source in sources for fd in (source.reading, *source.targets) if fd > 2}  # noqa: PLR2004
    closed = [fd for fd in inheritable_descriptors() if fd not in kept]
    argv = [interpreter, "-I", "-S", "-c", _CODE, root, *words]
    return start_process(argv, os.environ, closed=closed, kept=sorted(kept))


def main() -> None:
    """Run as a fresh interpreter: each argument is a source, as `READING:TARGET,TARGET`."""
    pairs = [word.partition(":") for word in sys.argv[2:]]
    _run([OpenStream(int(reading), [int(fd) for fd in targets.split(",")]) for reading, _, targets in pairs])


def _run(sources: Sequence[OpenStream]) -> None:
    """In the new process: fork once more, so that the launcher is not its parent, and pass the output on."""
    from elastic_run.multiprocessing.process.guardian_process import become_daemon

    if os.fork():
        return
    kept = {fd for source in sources for fd in (source.reading, *source.targets)}
    become_daemon("output of background processes", "output", kept)
    pass_on(sources)


def pass_on(sources: Sequence[OpenStream]) -> None:
    """Copy what comes until every source has ended."""
    poll, by_fd = select.poll(), {source.reading: source for source in sources}
    for reading in by_fd:
        poll.register(reading, select.POLLIN)
    while by_fd:
        for fd, _ in poll.poll():
            try:
                data = os.read(fd, _SIZE)
            except BlockingIOError:
                continue
            except OSError:
                data = b""  # a terminal whose last user has gone
            if data:
                _write(by_fd[fd], data)
            else:
                poll.unregister(fd)
                del by_fd[fd]


def _write(source: OpenStream, data: bytes) -> None:
    for target in [*source.targets]:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(target, rest) :]
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(target, select.POLLOUT)
                waiting.poll()
            except OSError:
                source.targets.remove(target)  # nobody reads there, or the disk is full
                break
