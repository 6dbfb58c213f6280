"""The event log: every event with its fields, as one table, and the thread that writes the lines to the files.

A line of the log is one JSON object: it has the fields of `ALWAYS`, for a worker the fields of `OF_WORKER`, and the
fields of its event. Rules of version 1: no field is renamed or changes its meaning; new fields and new events may be
added, so a reader skips unknown ones. docs/event-log.md is made from these tables, and `find_mistake` checks a line.
A line is one write to a file that was opened with O_APPEND, so lines of several launchers don't mix on a local file
system. (NFS has no such append; there each node needs a file of its own, as it has in the log directory.)
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from _queue import SimpleQueue

from elastic_run import contract
from elastic_run.files import open_own
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

VERSION = contract.EVENTS_VERSION

#: JSON's types by the name in `Field.type`; true is no number here.
_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "count": (int,),
    "seconds": (int, float),
    "yes or no": (bool,),
    "numbers": (list,),
}
#: A clock, a duration or a count from here up is garbage, and so are nan and infinity.
_BEYOND = 1e12


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an event in the log."""

    name: str  # The key in the JSON object
    type: str  # `text`, `count`, `seconds`, `yes or no` or `numbers` (a list)
    meaning: str  # A sentence without the full stop
    may_be_null: bool = False  # Null means that the value is unknown, or that there is none


@dataclass(frozen=True, slots=True)
class Kind:
    """One event."""

    meaning: str  # When it is written
    fields: tuple[Field, ...] = ()  # Its own, beside `ALWAYS`
    is_of_worker: bool = False  # Whether it has the fields of `OF_WORKER` too


ALWAYS = (
    Field("version", "count", f"version of the schema: {VERSION}"),
    Field("event", "text", "name of the event"),
    Field("time", "seconds", "wall clock of the node, since the epoch: for display only"),
    Field("monotonic", "seconds", "monotonic clock of the node; compare it with values of the same agent only"),
    Field("node", "text", "host name of the node"),
    Field("agent", "text", "the launcher: eight random hexadecimal digits, new with each start"),
    Field("run_id", "text", "id of the job"),
    Field("round", "count", "number of the round; null before the first", may_be_null=True),
    Field("restart", "count", "restarts of the job so far"),
)

OF_WORKER = (
    Field("rank", "count", "global rank"),
    Field("local_rank", "count", "rank on this node"),
    Field("pid", "count", "process id"),
)

_END = (
    Field("exit_code", "count", "exit code; null for a signal", may_be_null=True),
    Field("signal", "text", "name of the signal; null for an exit code", may_be_null=True),
    Field("was_stopped", "yes or no", "whether the launcher had told it to stop before"),
)

EVENTS: dict[str, Kind] = {
    "agent_started": Kind(
        "The launcher of a node begins; written when its first workers run, with the time of its start.",
        (
            Field("agent_pid", "count", "process id of the launcher"),
            Field("release", "text", "version of elastic-run"),
            Field("program", "text", "what the workers run"),
            Field("role", "text", "role of the workers"),
            Field("local_workers", "count", "workers on this node"),
            Field("min_nodes", "count", "fewest nodes of the job"),
            Field("max_nodes", "count", "most nodes of the job"),
            Field("max_restarts", "count", "restarts that the job may make"),
        ),
    ),
    "rendezvous_started": Kind("The node begins to wait for a place in the next round."),
    "round_formed": Kind(
        "The node has its place in a round.",
        (
            Field("job", "text", "what tells this job from others of the same id"),
            Field("round_id", "text", "unique id of the round in a job of several nodes, else empty"),
            Field("node_rank", "count", "rank of this node"),
            Field("nodes", "count", "nodes in the round"),
            Field("workers", "count", "workers in the round, on all nodes"),
            Field("first_rank", "count", "global rank of this node's first worker"),
            Field("reason", "text", "what made the round necessary; empty for the first one, and on one node"),
            Field("rendezvous_s", "seconds", "since rendezvous_started"),
        ),
    ),
    "worker_started": Kind(
        "A worker was started.",
        (Field("is_output_seen", "yes or no", "whether its stdout passes through the launcher, as with --tee"),),
        is_of_worker=True,
    ),
    "workers_started": Kind(
        "All workers of this node were started.",
        (
            Field("start_s", "seconds", "since round_formed"),
            Field("recovery_s", "seconds", "since the failure before it on this node; else null", may_be_null=True),
            Field("kept_state", "text", "the step of the state that they find, with --keep-state", may_be_null=True),
        ),
    ),
    "first_output": Kind(
        "The first bytes of a worker came: of its stderr, and of its stdout where it is seen.",
        (Field("after_s", "seconds", "since the workers' start"),),
        is_of_worker=True,
    ),
    "silence": Kind(
        "A worker writes again after at least 10 s; of many equal silences the first 20 of a round are written, then "
        "those that are half as long again as the longest.",
        (Field("silence_s", "seconds", "since its output before"),),
        is_of_worker=True,
    ),
    "resources": Kind(
        "What the workers of this node that run have used, each list in the order of `ranks`.",
        (
            Field("ranks", "numbers", "global ranks"),
            Field(
                "cpu_s", "numbers", "seconds of processor time of each worker's process so far, without its children"
            ),
            Field("memory_mib", "numbers", "resident memory of each worker's process in MiB"),
        ),
    ),
    "hang_found": Kind(
        "No rank of the job has made progress for --hang-timeout; each node that has judged it writes this event.",
        (
            Field("still_s", "seconds", "for how long no rank has made progress"),
            Field("rank", "count", "global rank that the others wait for, as far as its stack tells"),
            Field("detail", "text", "where each rank is, in one line"),
            Field("action", "text", "what follows: report, restart or fail"),
        ),
    ),
    "waits": Kind(
        "Once a minute, with --flight-recorder or --hang-timeout: for which ranks the others wait. The first node of a "
        "job writes this event, for the 16 ranks for which they wait longest.",
        (
            Field("ranks", "numbers", "global ranks"),
            Field("behind", "numbers", "percent of the last minute in which the others waited for each of them"),
        ),
    ),
    "slow_rank_found": Kind(
        "The others have waited for one rank in most of five minutes.",
        (
            Field("rank", "count", "global rank"),
            Field("behind", "count", "percent of the time in which the others waited for it"),
            Field("detail", "text", "the line on the console, with the reason where it is known"),
        ),
    ),
    "worker_exited": Kind(
        "A worker has ended.",
        (
            *_END,
            Field("uptime_s", "seconds", "since the workers' start"),
            Field("silence_s", "seconds", "since its last output, or since its start"),
        ),
        is_of_worker=True,
    ),
    "worker_failed": Kind(
        "Why a worker has failed; written when all workers of the round have ended, and their output was read.",
        (
            *_END,
            Field("cause", "text", "its exception in one line; else empty"),
            Field("where", "text", "file and line of the exception; else empty"),
            Field("remark", "text", "what else is known; else empty"),
            Field("is_root", "yes or no", "whether it failed first, as far as this node knows"),
            Field("is_consequence", "yes or no", "whether it failed as workers do that lose a peer"),
            Field("log_file", "text", "path of the file with its stderr, or empty"),
        ),
        is_of_worker=True,
    ),
    "round_warned": Kind("New nodes wait; the workers will be stopped soon, and are told."),
    "workers_stopping": Kind(
        "The launcher begins to stop the workers of its node.",
        (
            Field("reason", "text", "failure, halt, signal or success"),
            Field("detail", "text", "why the job stops the round: which nodes came or were lost; else empty"),
            Field("detected_s", "seconds", "since the first failure on this node; null without one", may_be_null=True),
        ),
    ),
    "workers_stopped": Kind(
        "No process of the round lives on this node.",
        (
            Field("stop_s", "seconds", "since workers_stopping"),
            Field("unkillable", "count", "processes that SIGKILL did not end"),
        ),
    ),
    "pause_started": Kind("The launcher waits before a restart.", (Field("pause_s", "seconds", "for how long"),)),
    "signal_received": Kind(
        "The launcher got a signal.",
        (
            Field("signal", "text", "its name"),
            Field("sender", "text", "the process that sent it, where that is known, else empty"),
        ),
    ),
    "lines_lost": Kind(
        "Lines before this one could not be written.",
        (Field("lines", "count", "how many"),),
    ),
    "agent_ended": Kind(
        "The launcher knows how the job has ended for this node.",
        (
            Field("verdict", "text", "as in failure.json, or success"),
            Field("exit_code", "count", "exit code of the launcher"),
            Field("detail", "text", "one sentence on the verdict; else empty"),
            Field("cause", "text", "the job's root cause in one line; else empty"),
            Field("cause_rank", "count", "global rank of the root cause; else null", may_be_null=True),
            Field("cause_node", "text", "host name of the root cause; else empty"),
            Field("wall_s", "seconds", "since agent_started"),
            Field("running_s", "seconds", "in which all workers of this node ran and none had failed"),
        ),
    ),
}


def find_mistake(document: object) -> str:
    """Return why a line of an event log does not fit the schema, as what the line is or has; "" if it does."""
    if not isinstance(document, dict):
        return "is not a JSON object"
    version, name = document.get("version"), document.get("event")
    if version != VERSION or version is True:
        other = f"has version {version!r:.20}; this release reads version {VERSION}"
        return other if "event" in document else "is not an event of elastic-run"
    if not isinstance(name, str) or name not in EVENTS:
        return f"has an unknown event: {name!r:.40}"
    kind = EVENTS[name]
    fields = (*ALWAYS, *(OF_WORKER if kind.is_of_worker else ()), *kind.fields)
    return next((f"has a wrong value of {field.name} ({name})" for field in fields if not _fits(field, document)), "")


def _fits(field: Field, document: dict[str, Any]) -> bool:
    value = document.get(field.name)
    if value is None:
        return field.may_be_null and field.name in document
    if isinstance(value, bool):
        return field.type == "yes or no"
    numbers = value if isinstance(value, list) else [value] if isinstance(value, (int, float)) else []
    is_sane = all(type(number) in (int, float) and abs(number) < _BEYOND for number in numbers)
    return is_sane and isinstance(value, _TYPES[field.type])


# --- the files --------------------------------------------------------------------------------------------------------
#: Lines that wait for a disk that is too slow or full.
_LINES_LIMIT = 10_000
_NEWLINE = b"\n"


class EventFile:
    """One file of events, made if it is missing, and the thread that writes its lines; closed with itself.

    `describe_gap` returns the line that tells how many lines are missing. `on_loss` is called once, in the thread, with
    the path and the error of the first line that is lost. A file that `is_own` follows no other user's link.
    """

    def __init__(
        self,
        path: str,
        describe_gap: Callable[[int], bytes],
        on_loss: Callable[[str, OSError], None],
        *,
        is_own: bool = False,
    ) -> None:
        self.path = path
        # O_NONBLOCK: a pipe without a reader, or with a slow reader, must not block. It has no effect on a file.
        flags = os.O_APPEND | os.O_NONBLOCK
        opened = open_own if is_own else _open_any
        try:
            self._fd = opened(path, os.O_RDWR | flags)
        except PermissionError:
            self._fd = opened(path, os.O_WRONLY | flags)
        self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._describe_gap = describe_gap
        self._on_loss: Callable[[str, OSError], None] | None = on_loss
        self._lost = self._dropped = 0
        self._is_torn = False
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Write one line soon, in the order of the calls and without holding up the caller."""
        if self._lines.qsize() < _LINES_LIMIT:
            self._lines.put(line)
        else:
            self._dropped += 1

    def close(self, wait_limit: float) -> None:
        """Write the lines that wait, and close the file."""
        self._lines.put(None)
        self._thread.join(wait_limit)

    def _run(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            dropped, told = self._dropped - told, self._dropped
            if dropped:
                self._lose(TimeoutError(errno.ETIMEDOUT, "the disk is too slow"), dropped)
            self._append(line)
        os.close(self._fd)

    def _append(self, line: bytes) -> None:
        """Write one line, or count it as lost."""
        try:
            if self._lost:
                self._write_whole(self._describe_gap(self._lost))
                self._lost = 0
            self._write_whole(line)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError, lines: int = 1) -> None:
        self._lost += lines
        if self._on_loss is not None:
            on_loss, self._on_loss = self._on_loss, None
            on_loss(self.path, error)

    def _write_whole(self, line: bytes) -> None:
        # A launcher that was killed, or a full disk, may have left a part of a line.
        data = _NEWLINE + line if self._is_torn or self._ends_within_line() else line
        while data:  # after a part, the second write gives the reason: a full disk, a limit, a full pipe
            data = data[os.write(self._fd, data) :]
            self._is_torn = bool(data)

    def _ends_within_line(self) -> bool:
        if not self._is_regular:
            return False
        try:
            size = os.fstat(self._fd).st_size
            return size > 0 and os.pread(self._fd, 1, size - 1) != _NEWLINE
        except OSError:
            return False  # it may only be written


def _open_any(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
