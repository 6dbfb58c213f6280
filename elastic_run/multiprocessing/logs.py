"""The files of the workers' output: torch's `LogsDest`, `LogsSpecs` and `DefaultLogsSpecs`.

Differences from torch
- The directory of a run is named after the job and the moment, and a link beside it points to the newest one. When the
  job ends, directories that hold nothing are removed.
- The directory of a run is no more open to other users than the log directory, and only this user writes to it.
- With a log directory and neither redirects nor tee, files get a copy of all output, and the console stays as it is.
- No attempt is ever removed or written over: when an attempt's directory is there already, as after a change of
  membership, the next one is called ``attempt_0.1``.
- Without a log directory nothing is made on disk before `reify` or the first read of `root_log_dir`. Without redirects
  or tee only the workers' error files need a directory. It is private and temporary (`DefaultLogsSpecs.is_temporary`);
  if it can't be made, the job runs without error files.
- Maps may name any rank.
"""

from __future__ import annotations

import os
import stat
import time
from abc import ABC, abstractmethod

from elastic_run import contract
from elastic_run.files import (
    attempt,
    make_directories,
    make_directory,
    make_new,
    make_temporary,
    random_name,
    remove_tree,
)
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    #: One value of `Std` for all workers, or one by local rank; plain numbers do.
    Streams = int | Mapping[int, int]
#: Digits at the end of a directory's name, which keep jobs of one minute apart; `make_new` does where they are equal.
_RANDOM_DIGITS = 4
#: Bytes of a job's name in the name of a directory, which may have 255 bytes.
_NAME_LENGTH = 200
#: `Std.OUT` and `Std.ERR`: starting workers needs no `enum`, so plain numbers do here.
_OUT = 1
_ERR = 2
#: What each worker needs of a plug-in's paths; without the other fields of `LogsDest` it does.
_NEEDED = ("stdouts", "stderrs")


def parse_streams(text: str) -> int | dict[int, int]:
    """Read the value of --redirects or --tee: ``0`` to ``3`` for all workers, or a map of local ranks to those.

    Raises:
        ValueError: It is neither.
    """
    values = ("0", "1", "2", "3")
    if text in values:
        return int(text)
    found = {}
    for item in text.split(","):
        rank, _, value = item.partition(":")
        if not (rank.isascii() and rank.isdigit() and value in values):
            message = f"{text!r} is neither 0, 1, 2 or 3 nor a map of local ranks to these, such as 0:3,1:2"
            raise ValueError(message)
        found[int(rank)] = int(value)
    return found


def streams_by_rank(val_or_map: Streams, ranks: Iterable[int]) -> dict[int, int]:
    """Return each rank's value; 0 if the map does not have the rank."""
    return {rank: val_or_map if isinstance(val_or_map, int) else val_or_map.get(rank, 0) for rank in ranks}


@dataclass
class LogsDest:
    """Paths by local rank; an empty path is the console.

    The last two fields are ours: files with a copy of output that the console shows unchanged, or hides.
    """

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = field(default_factory=str)
    filtered_stderr: str = field(default_factory=str)
    kept_stdouts: dict[int, str] = field(default_factory=dict)
    kept_stderrs: dict[int, str] = field(default_factory=dict)


def is_log(path: str) -> bool:
    """Whether a path of `LogsDest` is a log file: an empty path is the console, and the null device keeps nothing."""
    return path not in ("", os.devnull)


class LogsSpecs(ABC):
    """Chooses the files of each worker's output; plug-ins of the group ``torchrun.logs_specs`` are subclasses.

    Args:
        log_dir: Directory for log files.
        redirects: Streams that go to files, for all workers or by local rank.
        tee: Streams that go to files and to the console.
        local_ranks_filter: Local ranks that may write to the console; None or empty for all.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Streams = 0,
        tee: Streams = 0,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Lay out one attempt.

        Args:
            envs: Each worker's environment by local rank. TORCHELASTIC_ERROR_FILE is added.

        Returns:
            The paths of all streams.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The directory that all runs share."""


class DefaultLogsSpecs(LogsSpecs):
    """torch's layout: ``<log_dir>/<run>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}``.

    The run's directory is ``<run_id>_<moment>_<random>``, or ``<moment>_<program>_<random>`` for a job without a name.

    Args:
        log_dir: Directory for log files, made when it isn't there. ``/dev/null``: no files at all, redirects and tee
            are without effect.
        redirects: Streams that go to files.
        tee: Streams that go to files and to the console.
        local_ranks_filter: Local ranks that may write to the console.

    Raises:
        NotADirectoryError: The log directory is a file.
        OSError: The log directory can't be made.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Streams = 0,
        tee: Streams = 0,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        if log_dir and os.path.isfile(log_dir):
            message = f"log_dir: {log_dir} is a file"
            raise NotADirectoryError(message)
        if log_dir and log_dir != os.devnull:
            make_directories(log_dir)
        super().__init__(log_dir or None, redirects, tee, local_ranks_filter)
        #: This machine's name if several machines write to the same log directory; it becomes part of the run's name.
        self.host = ""
        #: The program's name if the run id is random; it takes the place of the id in the run's name.
        self.program = ""
        #: Whether no log directory was given, so that the user has to be told where the files are.
        self.is_unnamed = not log_dir
        #: What the user has to know of the log directory, a line; empty for nothing.
        self.notice = ""
        self._run_id = ""
        self._run_log_dir: str | None = None
        self._has_no_place = False

    @property
    def root_log_dir(self) -> str:
        """The directory that all runs share; if none was given, a temporary one that is kept, as with torch.

        Raises:
            OSError: No temporary directory can be made.
        """
        if self._root_log_dir is None and self._run_log_dir is None:
            self._root_log_dir = make_temporary("torchelastic_")
            if self._root_log_dir is None:
                message = "no directory for temporary files can be written to: give --log-dir for the log files"
                raise OSError(message)
        return self._root_log_dir or self._run_log_dir or ""

    @property
    def run_log_dir(self) -> str | None:
        """The directory of this run, or None when there is none (yet)."""
        return self._run_log_dir

    @property
    def is_temporary(self) -> bool:
        """Whether the directory holds only error files, so that it is removed with the launcher."""
        return self._has_own_directory and self._root_log_dir is None and not self._has_streams

    @property
    def _has_streams(self) -> bool:
        """Whether any stream was chosen for a file; a log directory without that gets a copy of all output."""
        settings = (self._redirects, self._tee)
        return any(any((each,) if isinstance(each, int) else each.values()) for each in settings)

    @property
    def _has_own_directory(self) -> bool:
        """Whether this class makes the run's directory; a directory that a subclass makes is not removed."""
        return getattr(type(self), "_make_log_dir") is DefaultLogsSpecs._make_log_dir  # noqa: B009 - its own hook

    @property
    def _latest(self) -> str:
        """The name of the link to the newest run; nodes that share a directory have a link each."""
        # Without an underscore, so that the pattern `logs/*_*` has the runs alone.
        return f"latest-{self.host.replace('/', '-').replace('_', '-')}" if self.host else "latest"

    def cleanup(self) -> None:
        """Remove the directory if it is temporary, otherwise only the empty directories in it."""
        if self._run_log_dir is not None and self.is_temporary:
            remove_tree(self._run_log_dir)
        self.remove_empty_directories()

    def remove_empty_directories(self) -> None:
        """Remove what holds nothing, the run's directory included; files stay, also in a temporary directory."""
        if self._run_log_dir is None or not self._has_own_directory:
            return
        for place, _, _ in os.walk(self._run_log_dir, topdown=False):
            attempt(os.rmdir, place)
        link = os.path.join(os.path.dirname(self._run_log_dir), self._latest)
        if os.path.islink(link) and not os.path.exists(link):
            attempt(os.unlink, link)
        if not os.path.lexists(self._run_log_dir):
            self._run_log_dir = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Lay out one attempt, and make its directories; see `LogsSpecs.reify`.

        Raises:
            OSError: The directories can't be made.
        """
        logs = self.lay_out(envs)
        for path in filter(is_log, logs.error_files.values()):
            make_directory(os.path.dirname(path))
        return logs

    def lay_out(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Lay out one attempt as `reify` does, but leave each worker's own directory to be made when it starts.

        Otherwise the first of many workers would wait for all directories, while processors are idle.
        """
        if self._root_log_dir == os.devnull:
            return _nowhere(envs)
        first = envs.get(0, {})
        self.make_run_log_dir(first.get(contract.ENV_RUN_ID, "test_run_id"))
        if self._run_log_dir is None:
            return self._lay_out("", envs)
        name = contract.ATTEMPT_DIR_PREFIX + first.get(contract.ENV_RESTART_COUNT, "0")
        return self._lay_out(make_new(self._run_log_dir, name), envs)

    def make_run_log_dir(self, run_id: str) -> None:
        """Make the directory of this run, unless it is there or can't be.

        Raises:
            OSError: It can't be made.
        """
        self._run_id = run_id
        if self._run_log_dir is not None and not os.path.isdir(self._run_log_dir):
            # A user, or a cleaner of old temporary files, has removed it. Another user may have made its name again.
            self._run_log_dir = None
            self._root_log_dir = None if self.is_unnamed else self._root_log_dir
        if self._run_log_dir is None and not self._has_no_place and self._root_log_dir != os.devnull:
            self._run_log_dir = self._make_log_dir(self._root_log_dir, run_id) or None
            self._has_no_place = self._run_log_dir is None

    def _lay_out(self, directory: str, envs: dict[int, dict[str, str]]) -> LogsDest:
        redirects, tees = streams_by_rank(self._redirects, envs), streams_by_rank(self._tee, envs)
        logs = LogsDest(
            filtered_stdout=os.path.join(directory, contract.FILTERED_STDOUT_LOG),
            filtered_stderr=os.path.join(directory, contract.FILTERED_STDERR_LOG),
        )
        keeps_all = self._root_log_dir is not None and not self._has_streams
        for rank, env in envs.items():
            own = os.path.join(directory, str(rank)) if directory else ""
            is_shown = not self._local_ranks_filter or rank in self._local_ranks_filter
            for stream, name, paths, tee_paths, kept in (
                (_OUT, contract.STDOUT_LOG, logs.stdouts, logs.tee_stdouts, logs.kept_stdouts),
                (_ERR, contract.STDERR_LOG, logs.stderrs, logs.tee_stderrs, logs.kept_stderrs),
            ):
                is_in_file = bool((redirects[rank] | tees[rank]) & stream)
                paths[rank] = os.path.join(own, name) if is_in_file else "" if is_shown else os.devnull
                if tees[rank] & stream and is_shown:
                    tee_paths[rank] = paths[rank]
                if keeps_all:
                    kept[rank] = os.path.join(own, name)
            logs.error_files[rank] = env[contract.ENV_ERROR_FILE] = own and os.path.join(own, contract.ERROR_FILE)
        return logs

    def _make_log_dir(self, log_dir: str | None, rdzv_run_id: str) -> str:
        """Make the directory of this run in the one that all runs share, or None; torch's hook for subclasses.

        Returns the path; empty where nobody asked for files and there is no place for temporary ones.
        """
        program = self.program if rdzv_run_id == self._run_id else ""  # a subclass may have a name of its own
        name = name_run(rdzv_run_id, program=program, host=self.host)
        if log_dir is None and self.is_temporary:
            return make_temporary(f"elastic-run_{name}_") or ""
        is_shared = log_dir is not None
        if log_dir is None:
            log_dir = self.root_log_dir
        make_directories(log_dir)
        directory = make_new(log_dir, f"{name}_{random_name()[:_RANDOM_DIGITS]}")
        if is_shared:
            self.notice = link_latest(directory, os.path.join(log_dir, self._latest))
        return directory

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        names = ("_root_log_dir", "_redirects", "_tee", "_local_ranks_filter")
        is_alike = isinstance(other, DefaultLogsSpecs)
        return is_alike and all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment] # as torch's: equal by value, and changing


def _nowhere(envs: dict[int, dict[str, str]]) -> LogsDest:
    """Return what torch answers for the log directory /dev/null: all on the console, tees that count for nothing."""
    for env in envs.values():
        env[contract.ENV_ERROR_FILE] = ""
    return LogsDest(
        stdouts=dict.fromkeys(envs, ""),
        stderrs=dict.fromkeys(envs, ""),
        tee_stdouts=dict.fromkeys(envs, os.devnull),
        tee_stderrs=dict.fromkeys(envs, os.devnull),
        error_files=dict.fromkeys(envs, os.devnull),
        filtered_stdout=os.devnull,
        filtered_stderr=os.devnull,
    )


class LogsPluginError(RuntimeError):
    """A plug-in has left out paths that the workers need: one line that names its class."""


def check_logs(specs: LogsSpecs, logs: object, local_ranks: Collection[int]) -> None:
    """Refuse what the `reify` of a plug-in of --logs-specs has returned if the workers can't be started with it.

    Raises:
        LogsPluginError: Workers have no path for stdout or stderr.
    """
    for name in _NEEDED:
        if missing := [str(rank) for rank in local_ranks if rank not in getattr(logs, name, ())]:
            method = f"{type(specs).__module__}.{type(specs).__qualname__}.reify"
            message = f'{method} has returned no {name} for local rank {", ".join(missing)}; "" is the console'
            raise LogsPluginError(message)


def name_run(run_id: str, *, program: str, host: str) -> str:
    """Return the name of a run's directory without its random part: `job7_20261122-0917` or `20261122-0917_train`.

    The job's id stands first, as under torchrun. A program's name, unless it is "", takes the place of the id, behind
    the moment. `host` is the node's name where several nodes write to one directory, or "".
    """
    end = f"_{host.replace('/', '_')}" if host else ""
    text = (program or run_id).replace("/", "_").encode(errors="surrogateescape")
    # Valid UTF-8 also where the file system's names have another encoding: in the locale C of an old configuration.
    name = os.fsdecode(text[: _NAME_LENGTH - len(end.encode())].decode(errors="ignore").encode())
    moment = time.strftime("%Y%m%d-%H%M")
    return "_".join((moment, name) if program else (name, moment)) + end


def link_latest(directory: str, link: str) -> str:
    """Let a link point to the newest of the directories beside it; harmless where that can't be done.

    A file or directory of the link's name that is no link is left alone. Returns a line for the user if another user's
    link has that name, else an empty string.
    """
    name = os.path.basename(directory)
    try:
        status = os.lstat(link)
    except OSError:
        status = None
    if status is not None and not stat.S_ISLNK(status.st_mode):
        return ""
    if status is not None and status.st_uid != os.geteuid():
        return f"the link {link} belongs to another user (uid {status.st_uid}), and does not lead to this run: {name}"
    temporary = f"{link}.{random_name()}"
    attempt(lambda new: os.symlink(name, new), temporary)
    attempt(lambda new: os.replace(new, link), temporary)
    return ""
