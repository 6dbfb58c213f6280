"""Which worker's failure was the first cause of all the others, and whether two failures are the same.

Pure. A rank that fails takes its peers with it: they lose a connection or wait for a collective until it times out, and
often they are the ones that shout. So failures are ranked before they are ordered by time:

1. an exception of the program's own;
2. an end without one: a signal, or a bare exit code;
3. a consequence: a lost connection, a collective or a store that timed out.

A worker that the agent had already told to stop is no cause, with one exception: where nothing but consequences is left
and a stopped worker ended with an exception of its own, that one was first (its interpreter was still going down).
A lone consequence is a cause: nobody else is there to blame.

Imported by the agent before the first worker starts: cheap, and expressions are compiled on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

#: Severity of a failure, the cause first.
OWN_EXCEPTION = 0
BARE_END = 1
CONSEQUENCE = 2

SIGNAL_BASE = 128
EXIT_USAGE = 2
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
SIGABRT = 6

#: Errors of the program itself: they come back however often it is started.
_DETERMINISTIC_TYPES = frozenset(
    ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "TabError", "NameError")
)
#: What the interpreter or the shell says on stderr when a program can't even begin.
_CANNOT_BEGIN = r": can't open file '|: No module named |: No such file or directory$|: command not found$|: error: "
#: What other ranks see of a rank that is dead or late. Sources: torch 2.13's c10d (TCPStore, ProcessGroupNCCL, gloo).
_CONSEQUENCE = "|".join(
    (
        r"connection (was )?(closed|reset|refused|aborted)",
        r"connection was likely closed",
        r"broken pipe",
        r"failed to recv|recvvalue|sendbytes|recvbytes",
        r"socket timeout",
        r"timed out waiting \d+ ?ms for (send|recv)",
        r"timed out after \d+ seconds waiting for clients",
        r"client socket has timed out",
        r"wait timeout after|application timeout caused pair closure",
        r"watchdog caught collective operation timeout|collective operation timeout",
        r"heartbeat monitor timed out|unable to get heartbeat",
        r"ncclremoteerror|remote process exited or there was a network error",
        r"nccl communicator (was|has been|encountered) (aborted|error)|communicator was aborted",
        r"failed to pass monitoredbarrier|ranks? .*failed to reach",
        r"timed ?out .*(allreduce|all_reduce|barrier|broadcast|rendezvous|store)",
    )
)
#: Types that only ever come from talking to another rank.
_CONSEQUENCE_TYPES = frozenset(
    (
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    )
)
#: The same types, but the rank's own fault.
_OWN_FAULT = (
    r"eaddrinuse|address already in use|duplicate gpu|ncclinvalid|invalid (usage|argument)|unhandled cuda error"
    r"|out of memory|no backend type"
)
#: How a program ends that obeys a signal, or whose DataLoader processes were told to stop with it.
_OBEYED = r"KeyboardInterrupt|SystemExit|SignalException|SIGTERM|SIGINT|DataLoader worker .*(exited|killed)"
#: What differs between two runs of the same failure: paths of temporary files, hex, and every number.
_VARYING = r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|/tmp/\S+|\d+(\.\d+)?(e[-+]?\d+)?"  # noqa: S108 - a pattern, not a file


class ExceptionText:
    """An exception as a worker wrote it down.

    Args:
        type: Name of its class, `ImportError`; a C++ type or "Fatal Python error" where it is one of those.
        message: Its message, lines and all.
        lines: The last lines of its traceback, the oldest first, with the line of type and message at the end.
        where: The innermost line of the user's own code, `train.py:12 in main`, or "".
        cause: The exception that it was raised from, in one line, or "".
    """

    __slots__ = ("cause", "lines", "message", "type", "where")

    def __init__(
        self,
        type: str,  # noqa: A002 - the field's word
        message: str = "",
        lines: tuple[str, ...] = (),
        where: str = "",
        cause: str = "",
    ) -> None:
        self.type = type
        self.message = message
        self.lines = lines
        self.where = where
        self.cause = cause

    def __repr__(self) -> str:
        return f"ExceptionText({self.type!r}, {self.message!r}, where={self.where!r}, cause={self.cause!r})"

    @property
    def name(self) -> str:
        """The class's name without its module."""
        return self.type.replace("::", ".").rpartition(".")[2]


class WorkerEnd:
    """How one worker ended.

    Args:
        rank: Its number in the job.
        local_rank: Its number on its node.
        role: Name of its role.
        host: Name of its node.
        pid: Its process.
        exitcode: Its exit code, or minus the number of the signal that ended it.
        ended_at: Wall clock, seconds since the epoch, for display and order.
        uptime: Seconds that it lived.
        restart_count: The attempt it belonged to.
        was_stopped: Whether the agent had told it to stop before it ended.
        exception: What it wrote down, or None.
        error_file: Path of its error.json, or "".
        stderr_tail: The last lines of its stderr.
        log_file: Path of the file that holds its stderr, or "".
        remark: A short clause for the report, such as that error.json could not be read, or "".
    """

    __slots__ = (
        "ended_at",
        "error_file",
        "exception",
        "exitcode",
        "host",
        "local_rank",
        "log_file",
        "pid",
        "rank",
        "remark",
        "restart_count",
        "role",
        "stderr_tail",
        "uptime",
        "was_stopped",
    )

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        role: str,
        host: str,
        pid: int,
        exitcode: int,
        ended_at: float,
        uptime: float,
        restart_count: int = 0,
        was_stopped: bool = False,
        exception: ExceptionText | None = None,
        error_file: str = "",
        stderr_tail: tuple[str, ...] = (),
        log_file: str = "",
        remark: str = "",
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.role = role
        self.host = host
        self.pid = pid
        self.exitcode = exitcode
        self.ended_at = ended_at
        self.uptime = uptime
        self.restart_count = restart_count
        self.was_stopped = was_stopped
        self.exception = exception
        self.error_file = error_file
        self.stderr_tail = stderr_tail
        self.log_file = log_file
        self.remark = remark

    @property
    def signal(self) -> int | None:
        """The signal that ended it, also where a shell between us and it said so by 128+n."""
        if self.exitcode < 0:
            return -self.exitcode
        is_reported = SIGNAL_BASE < self.exitcode <= SIGNAL_BASE + 64
        return self.exitcode - SIGNAL_BASE if is_reported else None


def parse_exception(text: str, *, exitcode: int | None = None) -> ExceptionText | None:
    """Find the exception with which a program's stderr ends.

    Args:
        text: The end of its stderr; it may begin anywhere and hold anything.
        exitcode: How the program ended, if known: one that was killed, or that chose an exit code of its own and wrote
            on after a traceback, did not die of that traceback.

    Returns:
        The exception, or None where stderr doesn't end with one.
    """
    from elastic_run.core.traceback_text import find_exception  # noqa: PLC0415 - only after a failure

    return find_exception(text, exitcode)


def find_root_cause(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the worker whose failure came first, or None if none failed by itself.

    Args:
        ends: How the workers of one attempt ended.

    Returns:
        The root cause.
    """
    failed = [end for end in ends if end.exitcode != 0]
    suspects = [end for end in failed if not end.was_stopped]
    if suspects and all(is_consequence(end) for end in suspects):
        suspects += [end for end in failed if end.was_stopped and _failed_before_its_stop(end)]
    return min(suspects, key=_order, default=None)


def is_consequence(end: WorkerEnd) -> bool:
    """Whether a failure looks like what other ranks see of a rank that died.

    Args:
        end: The failed worker.

    Returns:
        Whether somebody else is more likely the cause.
    """
    return severity(end) == CONSEQUENCE


def severity(end: WorkerEnd) -> int:
    """Rank a failure: `OWN_EXCEPTION`, `BARE_END` or `CONSEQUENCE`.

    Args:
        end: The failed worker.

    Returns:
        The smaller, the more likely the cause.
    """
    exception = end.exception
    if exception is None:
        is_aborted = end.signal == SIGABRT and _pattern(_CONSEQUENCE).search("\n".join(end.stderr_tail)) is not None
        return CONSEQUENCE if is_aborted else BARE_END
    if _pattern(_OWN_FAULT).search(exception.message):
        return OWN_EXCEPTION
    if exception.name in _CONSEQUENCE_TYPES or _pattern(_CONSEQUENCE).search(exception.message):
        return CONSEQUENCE
    return BARE_END if end.exitcode < 0 else OWN_EXCEPTION


def failure_signature(end: WorkerEnd) -> tuple[int | str, ...]:
    """Return what two failures share when they are the same failure.

    Args:
        end: The failed worker.

    Returns:
        Exit code, type, message without what varies from run to run, and place; without an exception the exit code and
        the last line of stderr.
    """
    exception = end.exception
    if exception is not None:
        return (end.exitcode, exception.type, _normalise(exception.message), exception.where)
    last = next((line for line in reversed(end.stderr_tail) if line.strip()), "")
    return (end.exitcode, _normalise(last))


def is_deterministic(end: WorkerEnd) -> bool:
    """Whether a failure can't go away by itself: a missing module or program, a syntax error, wrong arguments.

    Args:
        end: The failed worker.

    Returns:
        Whether a restart is pointless.
    """
    if end.exception is not None:
        return end.exception.name in _DETERMINISTIC_TYPES
    if end.exitcode in (EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND):
        return True
    last = next((line for line in reversed(end.stderr_tail) if line.strip()), "")
    return end.exitcode in (1, EXIT_USAGE) and _pattern(_CANNOT_BEGIN).search(last) is not None


def _failed_before_its_stop(end: WorkerEnd) -> bool:
    if severity(end) != OWN_EXCEPTION or end.exception is None:
        return False
    return _pattern(_OBEYED).search(f"{end.exception.type}: {end.exception.message}") is None


def _order(end: WorkerEnd) -> tuple[int, float, int]:
    return (severity(end), end.ended_at, end.rank)


def _normalise(text: str) -> str:
    return _pattern(_VARYING).sub("#", text[:4096].strip())


def _pattern(expression: str) -> re.Pattern[str]:
    """Compile an expression, which Python itself remembers."""
    import re  # noqa: PLC0415 - not before something failed

    return re.compile(expression, re.IGNORECASE)
