"""The output of one round's workers: which descriptors they get, and where what they write ends up.

    console, no capture     the launcher's own descriptor
    console, capture        a pipe, or a raw terminal where ours is one, through a Channel
    file                    the file itself
    tee                     a pipe, through a TeeChannel to file and console

Only stderr is captured; where 1 and 2 are the same open file both go through one channel, so that their order stays. A
captured terminal is raw: bytes pass unchanged, and the user's own terminal does what it always does with them.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.multiprocessing.output.channel import Channel, LogFile, TeeChannel
from elastic_run.multiprocessing.output.console import is_same_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.output.console import Console

_STDOUT, _STDERR = 1, 2
_PIPE_BYTES = 1 << 20
#: fcntl's command, which the module has only since Python 3.10 and only on Linux.
_F_SETPIPE_SZ = 1031


class WorkerOutput:
    """The output of one round.

    Args:
        loop: The agent's loop.
        console: The launcher's console.
        capture: Whether stderr passes through the launcher, so that the report can show its end.
    """

    def __init__(self, loop: Loop, console: Console, *, capture: bool = True) -> None:
        self._loop = loop
        self._console = console
        self._capture = capture
        self._is_terminal = capture and os.isatty(_STDERR)
        self._is_one_file = is_same_file(_STDOUT, _STDERR)
        self._channels: dict[int, list[Channel]] = {}
        self._stderr: dict[int, Channel | str] = {}
        self._to_close: dict[int, list[int]] = {}
        self._terminals: dict[int, int] = {}
        self._duplicates: dict[int, tuple[LogFile, tuple[bytes, ...]]] = {}
        self._has_told_trouble = False

    def open_filtered(
        self, stdout: str, stderr: str, *, stdout_filters: Sequence[str] = (), stderr_filters: Sequence[str] = ()
    ) -> None:
        """Copy tee'd lines that hold one of some texts into a file for all ranks.

        Args:
            stdout: File for lines of stdout, or empty.
            stderr: File for lines of stderr, or empty.
            stdout_filters: The texts for stdout.
            stderr_filters: The texts for stderr.
        """
        for fd, path, filters in ((_STDOUT, stdout, stdout_filters), (_STDERR, stderr, stderr_filters)):
            if path and filters:
                needles = tuple(text.encode(errors="surrogateescape") for text in filters)
                self._duplicates[fd] = (LogFile(path, on_trouble=self._tell_trouble), needles)

    def open(
        self,
        local_rank: int,
        *,
        stdout: str,
        stderr: str,
        tee_stdout: bool,
        tee_stderr: bool,
        stdout_prefix: bytes,
        stderr_prefix: bytes,
    ) -> tuple[int, int]:
        """Prepare a worker's output.

        Args:
            local_rank: The worker.
            stdout: A file, or empty for the console.
            stderr: A file, or empty for the console.
            tee_stdout: Whether stdout goes to the console as well as to its file.
            tee_stderr: Whether stderr does.
            stdout_prefix: Prefix of tee'd lines of stdout.
            stderr_prefix: Prefix of tee'd lines of stderr.

        Returns:
            The descriptors that the worker gets as 1 and 2; `started` closes those that are not the launcher's own.

        Raises:
            OSError: The system refuses a pipe or terminal.
        """
        self._channels[local_rank] = []
        self._to_close[local_rank] = []
        if self._capture and not stdout and not stderr and self._is_one_file:
            both = self._open_captured(local_rank)
            return both, both
        out = self._open_one(local_rank, _STDOUT, stdout, is_tee=tee_stdout, prefix=stdout_prefix)
        err = self._open_one(local_rank, _STDERR, stderr, is_tee=tee_stderr, prefix=stderr_prefix)
        return out, err

    def _open_one(self, local_rank: int, target: int, path: str, *, is_tee: bool, prefix: bytes) -> int:
        if not path:
            is_captured = self._capture and target == _STDERR
            return self._open_captured(local_rank) if is_captured else target
        if target == _STDERR:
            self._stderr[local_rank] = path
        if not is_tee:
            return self._open_file(local_rank, path)
        reader, writer = self._open_pipe(local_rank)
        channel = TeeChannel(
            self._loop,
            self._console,
            reader,
            target,
            file=LogFile(path, on_trouble=self._tell_trouble),
            prefix=prefix,
            duplicate=self._duplicate_to(target),
        )
        self._add(local_rank, target, channel)
        return writer

    def _open_file(self, local_rank: int, path: str) -> int:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._tell_trouble(path, error)
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        self._to_close[local_rank].append(fd)
        return fd

    def _open_captured(self, local_rank: int) -> int:
        reader, writer = self._open_terminal(local_rank) if self._is_terminal else self._open_pipe(local_rank)
        self._add(local_rank, _STDERR, Channel(self._loop, self._console, reader, _STDERR))
        return writer

    def _add(self, local_rank: int, target: int, channel: Channel) -> None:
        self._channels[local_rank].append(channel)
        if target == _STDERR:
            self._stderr[local_rank] = channel

    def _open_pipe(self, local_rank: int) -> tuple[int, int]:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        _enlarge(writer)
        self._to_close[local_rank].append(writer)
        return reader, writer

    def _open_terminal(self, local_rank: int) -> tuple[int, int]:
        import tty  # noqa: PLC0415 - only on a terminal

        master, slave = os.openpty()
        tty.setraw(slave)
        os.set_blocking(master, False)
        self._to_close[local_rank].append(slave)
        self._terminals[local_rank] = master
        _copy_window_size(_STDERR, slave)
        return master, slave

    def _duplicate_to(self, target: int) -> object:
        if target not in self._duplicates:
            return None
        file, needles = self._duplicates[target]

        def duplicate(prefix: bytes, lines: bytes) -> None:
            wanted = [prefix + line for line in lines.splitlines(keepends=True) if any(n in line for n in needles)]
            if wanted:
                file.write(b"".join(wanted))

        return duplicate

    def started(self, local_rank: int) -> None:
        """Close this process's copies of what the worker has now."""
        for fd in self._to_close.pop(local_rank, []):
            os.close(fd)

    def finish(self, local_rank: int) -> None:
        """Read what a worker that is gone has left behind, and close its channels.

        A stranger that was handed the pipe and still writes gets SIGPIPE from then on.
        """
        self._terminals.pop(local_rank, None)
        for channel in self._channels.get(local_rank, []):
            channel.finish()

    def tail(self, local_rank: int) -> bytes:
        """Return the last bytes of a worker's stderr, as far as they passed through here or are in a file."""
        source = self._stderr.get(local_rank)
        if isinstance(source, str):
            return _read_end(source)
        return b"" if source is None else source.tail.read()

    def resize(self) -> None:
        """Give the workers' terminals the size of ours."""
        for master in self._terminals.values():
            _copy_window_size(_STDERR, master)

    def close(self) -> None:
        """Close the files for all ranks."""
        for file, _ in self._duplicates.values():
            file.close()

    def _tell_trouble(self, path: str, error: OSError) -> None:
        if not self._has_told_trouble:
            self._has_told_trouble = True
            self._console.say(f"{path}: {error.strerror}; the job goes on, and what doesn't fit there is not kept")


def _enlarge(pipe: int) -> None:
    import fcntl  # noqa: PLC0415 - a small C module

    try:
        fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        pass  # over the user's limit of pipe pages: the default size works too


def _copy_window_size(source: int, target: int) -> None:
    import fcntl  # noqa: PLC0415
    import termios  # noqa: PLC0415

    try:
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
    except OSError:
        pass  # a terminal without a size


def _read_end(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        os.lseek(fd, -min(os.fstat(fd).st_size, contract.CAPTURE_BYTES), os.SEEK_END)
        return os.read(fd, contract.CAPTURE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)
