"""The end of a worker; which end was the first cause of all the others, and whether two failures are the same.

Pure. A rank that fails takes its peers with it: they lose a connection or wait for a collective until it times out, and
often they are the ones that shout. So failures are ranked before they are ordered by time:

1. an exception of the program's own;
2. an end without one: a signal, or a bare exit code;
3. a connection that was lost: to a rank, or one of the program's own, to a database or for its data;
4. what torch says of a lost rank: a connection of its own that was lost, a collective or a store that timed out.

A worker that the agent had already told to stop is no cause, but for `find_hidden_cause`. A secondary failure without
any other failure counts as the cause.

Sources of the words about a lost peer: the messages of torch 2.13's TCPStore, ProcessGroupNCCL and gloo, read in its
source or made by killing a peer, and those of older releases in public issue threads.

Jobs of several nodes import this module before the first worker starts: expressions are compiled at their first use.
"""

from __future__ import annotations

import re
from binascii import crc32

from elastic_run.contract import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_SIGNAL_BASE, EXIT_USAGE, HANG
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.failure.stacks import Place

#: The type of what faulthandler writes: the place of a crash, and not an exception that the program may have handled.
FATAL_ERROR = "Fatal Python error"


@dataclass(slots=True)
class ExceptionText:
    """An exception as a worker wrote it down."""

    type: str  # Name of its class, `ImportError`; a C++ type or "Fatal Python error" where it is one of those
    message: str = ""  # Its message, lines and all
    #: The last lines of its traceback, the oldest first, with the line of type and message at the end
    lines: tuple[str, ...] = ()
    where: str = ""  # The innermost line of the user's own code, `train.py:12 in main`, or ""
    #: The exception with which its chain began, in one line, with the one that it was raised from where that is
    #: another, or ""
    cause: str = ""
    #: Whether the worker died of it. Otherwise it is the last one on its stderr, and more was written after it or
    #: into its lines, or the stop's signal came before the end: the program may have handled it.
    is_certain: bool = True

    @property
    def name(self) -> str:
        """The class's name without its module."""
        return self.type.replace("::", ".").rpartition(".")[2]

    @property
    def summary(self) -> str:
        """Type and the first line of the message."""
        first = self.message.partition("\n")[0]
        return f"{self.type}: {first}" if first else self.type


@dataclass(frozen=True, slots=True)
class OomKills:
    """Kills by the OOM killer; None where the kernel doesn't tell."""

    group: int | None = None  # In this process's cgroup and below
    machine: int | None = None  # On the whole machine

    def since(self, before: OomKills) -> OomKills:
        """Return the kills between an earlier reading and this one."""

        def subtract(now: int | None, earlier: int | None) -> int | None:
            return None if now is None or earlier is None else max(0, now - earlier)

        return OomKills(subtract(self.group, before.group), subtract(self.machine, before.machine))


#: Severity of a failure, the cause first.
OWN_EXCEPTION = 0
BARE_END = 1
SECONDARY_FAILURE = 2
LOST_RANK = 3

#: Lines of stderr that a worker's end keeps: the last ones tell. The report shows some of them.
STDERR_TAIL_LINES = 20
SIGABRT = 6
#: Stands before an exception of which the worker may not have died.
LAST_EXCEPTION = "the last exception on its stderr, with more output after it"

#: Errors of the program itself: they come back however often it is started.
_DETERMINISTIC_TYPES = frozenset(
    ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError", "NameError")
)
#: Functions that refuse a launch without a main guard, in the traceback of a worker that imports its program:
#: multiprocessing's and ours.
_GUARD_CHECKS = ("in _check_not_importing_main", "in refuse_unguarded_main")
#: What differs between two runs of the same failure: paths of temporary files, hex, and every number.
_VARYING = r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|/tmp/\S+|\d+(?:\.\d+)?(?:e[-+]?\d+)?"

#: Characters of a message in which signs of a lost peer are searched for.
_LIMIT = 4096
#: Types that only ever come from talking to another process.
_TYPES = frozenset(
    (
        *("BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError"),
        *("DistBackendError", "DistNetworkError", "DistStoreError"),
    )
)
#: What gloo says of data that is longer than its receiver's collective takes.
_OTHER_SIZE = "Received data size doesn't match expected size"
#: What NCCL says of the same, where it goes through sockets. It calls that an invalid usage.
_TRUNCATED = "message truncated : receiving"
#: Texts of a lost or late peer. The hints for them stand in report/failure_hints.toml.
_LOST_PEER = (
    r"(?i)connection (?:was )?(?:likely )?(?:closed|reset|refused|aborted)"
    r"|broken pipe"
    r"|failed to recv|recvvalue|sendbytes|recvbytes"
    r"|socket timeout|client socket has timed out"
    r"|timed out waiting \d+ ?ms for (?:send|recv)"
    r"|timed out after \d+ seconds waiting for clients"
    r"|wait timeout after|application timeout caused pair closure"
    r"|caught collective operation timeout"
    r"|heartbeat monitor timed out|unable to get heartbeat"
    r"|ncclremoteerror|remote process exited or there was a network error"
    r"|(?:nccl )?communicator (?:was|has been) aborted"
    r"|failed to pass monitoredbarrier"
    rf"|{_OTHER_SIZE}|{_TRUNCATED}"
)
#: Types of exceptions that torch raises. A matching message counts for these types only: programs that talk to a
#: database or a web server see the same words in exceptions of other types.
_TORCH_TYPES = frozenset(
    (
        *("DistBackendError", "DistNetworkError", "DistStoreError"),
        *("RuntimeError", "Error", "runtime_error", "system_error"),
        *("IoException", "TimeoutException", "EnforceNotMet"),
    )
)
#: The same types, but the rank's own fault.
_OWN_FAULT = (
    r"(?i)eaddrinuse|address already in use|duplicate gpu|ncclinvalid"
    r"|unhandled cuda error|out of memory|no backend type"
)
#: How a program ends that obeys a signal, or whose DataLoader processes were stopped with it.
_OBEDIENCE = r"(?s)^KeyboardInterrupt|SignalException|SIGTERM|SIGINT|SIGHUP|DataLoader worker .*(?:exited|killed)"


@dataclass(slots=True)
class WorkerEnd:
    """How one worker ended."""

    rank: int
    local_rank: int
    role: str
    host: str
    pid: int
    exitcode: int  # Its exit code, or minus the number of the signal that ended it
    ended_at: float  # Wall clock, seconds since the epoch, for display
    uptime: float  # Monotonic seconds from the round's start on its node to its end: for order and durations
    restart_count: int = 0
    was_stopped: bool = False  # Whether the agent had told it to stop before it ended
    #: What it wrote down, or None; of a worker that was stopped the exception at the end of its stderr, not certain
    #: where the stop's signal ended it
    exception: ExceptionText | None = None
    error_file: str = ""  # Path of its error.json, or ""
    stderr_tail: tuple[str, ...] = ()  # The last lines of its stderr, at most STDERR_TAIL_LINES
    stderr_target: str = ""  # Where its stderr went if the agent has not seen it, or ""
    log_file: str = ""  # Path of the file that holds its stderr, or ""
    remark: str = ""  # A short clause for the report, such as that error.json could not be read, or ""
    kernel_line: str = ""  # The line of the kernel's log that tells why, or ""
    #: Kills by the OOM killer on its node during its round, or None if they are not known
    oom_kills: OomKills | None = None
    stuck_at: Place | None = None  # Where it was at the end of its grace period, before SIGKILL, or None
    #: Whether it had been in the same calls before it was told to stop; see `stacks.has_not_moved`
    is_unmoved: bool = False
    last_words: str = ""  # Clause about an exception that it had written last when a signal stopped the job, or ""

    @property
    def certain_exception(self) -> ExceptionText | None:
        """The exception that it died of, or None: also where it is not certain that it did."""
        return self.exception if self.exception is not None and self.exception.is_certain else None

    @property
    def signal(self) -> int | None:
        """The signal that ended it, also where a shell between us and it said so by 128+n."""
        if self.exitcode < 0:
            return -self.exitcode
        is_reported = EXIT_SIGNAL_BASE < self.exitcode <= EXIT_SIGNAL_BASE + 64
        return self.exitcode - EXIT_SIGNAL_BASE if is_reported else None

    @property
    def job_exit_code(self) -> int:
        """The exit code that it gives its job as the root cause: 128+n for signal n."""
        return self.exitcode if self.exitcode >= 0 else EXIT_SIGNAL_BASE - self.exitcode


@dataclass(frozen=True, slots=True)
class EqualErrors:
    """How many workers of the last round had the same error as the root cause, and on which nodes."""

    ranks: int  # These workers, with the root cause
    of_ranks: int  # All workers of these nodes
    hosts: tuple[str, ...]  # The names of these nodes; many names are folded
    nodes: int  # Number of these nodes
    of_nodes: int  # Nodes in the round


def find_root_cause(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the worker whose failure came first, or None if none failed by itself."""
    failed = [end for end in ends if end.exitcode != 0]
    suspects = [end for end in failed if not end.was_stopped]
    hidden = find_hidden_cause(ends) if suspects and all(map(is_secondary, suspects)) else None
    if hidden is not None:
        suspects.append(hidden)
    return min(suspects, key=_order, default=None)


def find_hidden_cause(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the worker that had failed by itself when its node was told to stop, or None.

    Its interpreter was still going down, and the peers that it took with it were seen first. Only where nothing but
    consequences is found in the whole job it is the cause.
    """
    hidden = [end for end in ends if end.exitcode != 0 and end.was_stopped and _failed_before_its_stop(end)]
    return min(hidden, key=_order, default=None)


def is_secondary(end: WorkerEnd) -> bool:
    """Whether a failure may be what other ranks see of a rank that died; narrower is `has_lost_rank`."""
    return severity(end) >= SECONDARY_FAILURE


def has_lost_rank(end: WorkerEnd) -> bool:
    """Whether a failure is what torch says of a rank that died.

    For this one others are left running a moment longer, as one of them may have the cause. A connection that the
    program itself had lost, to a database or for its data, stops them at once.
    """
    return severity(end) == LOST_RANK


def severity(end: WorkerEnd) -> int:
    """Rank a failure: `OWN_EXCEPTION`, `BARE_END`, `SECONDARY_FAILURE` or `LOST_RANK`."""
    exception = end.exception
    if exception is None and (end.signal != SIGABRT or end.kernel_line):
        return BARE_END
    if exception is None:
        return LOST_RANK if any(re.search(_LOST_PEER, line) for line in end.stderr_tail) else BARE_END
    if _looks_like_lost_peer(exception):
        if end.kernel_line:
            return BARE_END  # a GPU that has failed looks from here like a peer that was lost
        return LOST_RANK if exception.name in _TORCH_TYPES else SECONDARY_FAILURE
    return BARE_END if end.exitcode < 0 or not exception.is_certain else OWN_EXCEPTION


def _looks_like_lost_peer(exception: ExceptionText) -> bool:
    message = exception.message[:_LIMIT]
    if re.search(_OWN_FAULT, message) and _TRUNCATED not in message:
        return False
    return exception.name in _TYPES or re.search(_LOST_PEER, message) is not None


def failure_signature(end: WorkerEnd) -> tuple[int | str, ...]:
    """Return what two failures share when they are the same: the place as well, unlike `compute_error_number`."""
    exception = end.certain_exception
    if exception is not None:
        return (end.exitcode, exception.type, _normalise(exception.message), exception.where)
    return (end.exitcode, _normalise(_last_line(end)))


def compute_error_number(end: WorkerEnd) -> int | None:
    """Return a number that is equal for workers with the same error, also of different nodes.

    It is a checksum of the exception without what varies from rank to rank. Without an exception, or if the worker may
    have handled it, the exit code and the last line of stderr count. None if the worker has not failed by itself.
    """
    exception = end.exception
    if exception is None or not (exception.is_certain or end.was_stopped):
        has_failed = end.exitcode != 0 and not end.was_stopped
        return _checksum(str(end.exitcode), _last_line(end)) if has_failed else None
    return None if exception.type == HANG else _checksum(exception.type, exception.message)


def has_equal_error(end: WorkerEnd, root: WorkerEnd) -> bool:
    """Whether another worker has failed like the root cause, or was stopped while it was going down so."""
    number = compute_error_number(root)
    return number is not None and compute_error_number(end) == number


def is_deterministic(end: WorkerEnd) -> bool:
    """Whether a failure can't go away by itself: a missing module or program, a syntax error, wrong arguments."""
    if end.certain_exception is not None:
        return end.certain_exception.name in _DETERMINISTIC_TYPES
    if end.exitcode in (EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND):
        return True
    last = _last_line(end)
    if end.exitcode == EXIT_USAGE:
        return ": can't open file '" in last or ": error: " in last
    return end.exitcode == 1 and ": No module named " in last


def is_unguarded_launch(end: WorkerEnd) -> bool:
    """Whether a worker has failed because its program starts processes as soon as it is imported."""
    exception = end.certain_exception
    return exception is not None and any(line.rstrip().endswith(_GUARD_CHECKS) for line in exception.lines)


def _failed_before_its_stop(end: WorkerEnd) -> bool:
    if end.exception is None or severity(end) != OWN_EXCEPTION:
        return False
    return re.search(_OBEDIENCE, f"{end.exception.type}: {end.exception.message[:_LIMIT]}") is None


def _checksum(kind: str, text: str) -> int:
    return crc32(f"{kind}\n{_normalise(text)}".encode(errors="replace"))


def _last_line(end: WorkerEnd) -> str:
    return next((line for line in reversed(end.stderr_tail) if line.strip()), "")


def _order(end: WorkerEnd) -> tuple[int, float, int]:
    return (severity(end), end.uptime, end.rank)


def _normalise(text: str) -> str:
    return re.sub(_VARYING, "#", text[:4096].strip())
