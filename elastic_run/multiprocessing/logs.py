"""Where each worker's output goes: torch's LogsSpecs, LogsDest and Std.

Layout: `<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}`, as torch's. Two things
differ: nothing is created before the first round is laid out, and no attempt is ever overwritten (law 9): a round that
finds its directory taken gets the next free name, `attempt_0_1`.

Without a log directory and without redirects the directory is private and temporary: it holds only error files, and
`cleanup` removes it. Where no directory can be made at all the job runs without error files.
Source: torch 2.13, torch.distributed.elastic.multiprocessing.api.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from enum import IntFlag

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field
else:
    from elastic_run.utils.light_dataclass import dataclass, field

__all__ = ["DefaultLogsSpecs", "LogsDest", "LogsSpecs", "Std", "to_map"]

_CONSOLE = ""


class Std(IntFlag):
    """Standard streams, as bits."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read a value of --redirects or --tee.

        Args:
            vm: `0` to `3` for all workers, or a map `LOCAL_RANK:STD,…`.

        Returns:
            The streams, or the streams by local rank.

        Raises:
            ValueError: It is neither.
        """
        if vm in ("0", "1", "2", "3"):
            return cls(int(vm))
        streams: dict[int, Std] = {}
        for item in vm.split(","):
            rank, colon, value = item.partition(":")
            if not (colon and rank.isascii() and rank.isdigit() and value in ("0", "1", "2", "3")):
                message = f"{vm!r} is neither 0, 1, 2 or 3 nor a map of local ranks to these (0:3,1:1)"
                raise ValueError(message)
            streams[int(rank)] = cls(int(value))
        return streams


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return the streams of every local rank.

    Args:
        val_or_map: For all workers, or by local rank; ranks that are left out have none.
        local_world_size: Workers on this node.

    Returns:
        Streams by local rank.
    """
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Paths by local rank; an empty path is the console.

    Args:
        stdouts: Where stdout goes.
        stderrs: Where stderr goes.
        tee_stdouts: Those of `stdouts` that go to the console too.
        tee_stderrs: Those of `stderrs` that go to the console too.
        error_files: Where a worker leaves its exception.
        filtered_stdout: File for duplicated stdout lines.
        filtered_stderr: File for duplicated stderr lines.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = field(default_factory=str)
    filtered_stderr: str = field(default_factory=str)


class LogsSpecs(ABC):
    """What the user asked for about output; subclass it to lay files out in another way.

    Args:
        log_dir: Directory for log files, or None.
        redirects: Streams that go to files.
        tee: Streams that go to files and to the console.
        local_ranks_filter: Local ranks that are shown on the console; None for all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Lay out the files of a round.

        Args:
            envs: Environment by local rank; gets TORCHELASTIC_ERROR_FILE.

        Returns:
            Where everything goes.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory below which all runs have theirs."""


class DefaultLogsSpecs(LogsSpecs):
    """Torch's layout; see the module's comment. Arguments are those of `LogsSpecs`."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir and log_dir != os.devnull and os.path.isfile(log_dir):
            message = f"log_dir {log_dir!r} is a file"
            raise NotADirectoryError(message)
        super().__init__(log_dir or None, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None

    @property
    def root_log_dir(self) -> str:
        """The directory below which all runs have theirs; empty while there is none."""
        return str(self._root_log_dir or "")

    @property
    def run_log_dir(self) -> str | None:
        """This run's directory, once a round was laid out."""
        return self._run_log_dir

    @property
    def is_temporary(self) -> bool:
        """Whether nothing that the user asked for is in the directory."""
        has_files = any(_has_streams(streams) for streams in (self._redirects, self._tee))
        return self._root_log_dir is None and not has_files

    def cleanup(self) -> None:
        """Remove the directory if it is temporary."""
        if self.is_temporary and self._run_log_dir:
            _remove_tree(self._run_log_dir)
            self._run_log_dir = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Lay out the files of a round; see `LogsSpecs.reify`.

        Raises:
            OSError: The log directory that the user gave can't be written.
        """
        attempt = self._make_attempt_directory(envs.get(0, {}))
        redirects = to_map(self._redirects, len(envs))
        tees = to_map(self._tee, len(envs))
        logs = LogsDest()
        for rank in range(len(envs)):
            directory = _make_directory(attempt, str(rank)) if attempt else ""
            self._lay_out(logs, rank, directory, redirects[rank] | tees[rank], tees[rank])
            logs.error_files[rank] = os.path.join(directory, contract.ERROR_FILE) if directory else os.devnull
            envs[rank][contract.ENV_ERROR_FILE] = logs.error_files[rank] if directory else ""
        logs.filtered_stdout = os.path.join(attempt, contract.FILTERED_STDOUT_LOG) if attempt else os.devnull
        logs.filtered_stderr = os.path.join(attempt, contract.FILTERED_STDERR_LOG) if attempt else os.devnull
        return logs

    def _lay_out(self, logs: LogsDest, rank: int, directory: str, to_file: Std, to_both: Std) -> None:
        is_hidden = bool(self._local_ranks_filter) and rank not in (self._local_ranks_filter or ())
        for stream, name, files, tees in (
            (Std.OUT, contract.STDOUT_LOG, logs.stdouts, logs.tee_stdouts),
            (Std.ERR, contract.STDERR_LOG, logs.stderrs, logs.tee_stderrs),
        ):
            if not directory or not to_file & stream:
                # A rank that is not to be seen and has no file: its output goes nowhere, as with torch.
                files[rank] = os.devnull if is_hidden else _CONSOLE
                continue
            files[rank] = os.path.join(directory, name)
            if to_both & stream and not is_hidden:
                tees[rank] = files[rank]

    def _make_attempt_directory(self, env: dict[str, str]) -> str:
        """Return the round's directory, or an empty string where there is none to be had."""
        if self._root_log_dir == os.devnull:
            return ""
        try:
            if self._run_log_dir is None:
                self._run_log_dir = self._make_run_directory(env.get(contract.ENV_RUN_ID, "test_run_id"))
            count = env.get(contract.ENV_RESTART_COUNT, "0")
            return _make_directory(self._run_log_dir, contract.ATTEMPT_DIR_PREFIX + count)
        except OSError:
            if not self.is_temporary:
                raise
            return ""

    def _make_run_directory(self, run_id: str) -> str:
        if self._root_log_dir is not None:
            os.makedirs(self._root_log_dir, exist_ok=True)
            return _make_unique_directory(self._root_log_dir, f"{run_id.replace('/', '_')}_")
        last_error: OSError | None = None
        for root in (os.environ.get("TMPDIR") or "/tmp", "/dev/shm"):  # noqa: S108 - the name is random, the mode 0700
            try:
                base = _make_unique_directory(root, "torchelastic_")
                if self.is_temporary:
                    return base
                return _make_unique_directory(base, f"{run_id.replace('/', '_')}_")
            except OSError as error:
                last_error = error
        raise last_error or OSError("no directory for log files")

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, tee={self._tee}, "
            f"local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefaultLogsSpecs):
            return False
        names = ("_root_log_dir", "_redirects", "_tee", "_local_ranks_filter")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]


def _has_streams(streams: Std | dict[int, Std]) -> bool:
    return bool(streams) if isinstance(streams, Std) else any(streams.values())


def _make_unique_directory(root: str, prefix: str) -> str:
    while True:
        path = os.path.join(root, prefix + os.urandom(4).hex())
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        return path


def _make_directory(root: str, name: str) -> str:
    """Make a directory that is new, with a number behind the name where that is taken."""
    path, number = os.path.join(root, name), 0
    while True:
        try:
            os.mkdir(path)
        except FileExistsError:
            number += 1
            path = os.path.join(root, f"{name}_{number}")
            continue
        return path


def _remove_tree(path: str) -> None:
    for directory, names, files in os.walk(path, topdown=False):
        for name in files:
            _try(os.unlink, os.path.join(directory, name))
        for name in names:
            child = os.path.join(directory, name)
            _try(os.unlink if os.path.islink(child) else os.rmdir, child)
    _try(os.rmdir, path)


def _try(remove: object, path: str) -> None:
    try:
        remove(path)  # type: ignore[operator]
    except OSError:
        pass
