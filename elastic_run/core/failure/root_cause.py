"""Which worker's failure was the first cause of all the others, and whether two failures are the same.

Pure. A rank that fails takes its peers with it: they lose a connection or wait for a collective until it times out, and
often they are the ones that shout. So failures are ranked before they are ordered by time:

1. an exception of the program's own;
2. an end without one: a signal, or a bare exit code;
3. a connection that was lost: to a rank, or one of the program's own, to a database or for its data;
4. what torch says of a lost rank: a connection of its own that was lost, a collective or a store that timed out.

A worker that the agent had already told to stop is no cause, with one exception: where nothing but consequences is left
and a stopped worker ended with an exception of its own, that one was first (its interpreter was still going down).
A secondary failure without any other failure counts as the cause.

Imported by the agent before the first worker starts: cheap, and expressions are compiled on first use.
"""

from __future__ import annotations

from binascii import crc32

from elastic_run.contract import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_SIGNAL_BASE, EXIT_USAGE, HANG
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.core.diagnosis.stack_groups import Place
    from elastic_run.core.failure.exception_text import ExceptionText
    from elastic_run.core.failure.oom_kills import OomKills

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


@dataclass(slots=True)
class WorkerEnd:
    """How one worker ended.

    Args:
        rank: Its number in the job.
        local_rank: Its number on its node.
        role: Name of its role.
        host: Name of its node.
        pid: Its process.
        exitcode: Its exit code, or minus the number of the signal that ended it.
        ended_at: Wall clock, seconds since the epoch, for display.
        uptime: Monotonic seconds from the round's start on its node to its end: for order and durations.
        restart_count: The attempt it belonged to.
        was_stopped: Whether the agent had told it to stop before it ended.
        exception: What it wrote down, or None; of a worker that was stopped the exception at the end of its stderr, not
            certain where the stop's signal ended it.
        error_file: Path of its error.json, or "".
        stderr_tail: The last lines of its stderr, at most STDERR_TAIL_LINES.
        stderr_target: Where its stderr went if the agent has not seen it, or "".
        log_file: Path of the file that holds its stderr, or "".
        remark: A short clause for the report, such as that error.json could not be read, or "".
        kernel_line: The line of the kernel's log that tells why, or "".
        oom_kills: Kills by the OOM killer on its node during its round, or None if they are not known.
        stuck_at: Where it was at the end of its grace period, before SIGKILL, or None.
        last_words: Clause about an exception that it had written last when a signal stopped the job, or "".
        is_unmoved: Whether it had been in the same calls before it was told to stop; see `stack_groups.has_not_moved`.
    """

    rank: int
    local_rank: int
    role: str
    host: str
    pid: int
    exitcode: int
    ended_at: float
    uptime: float
    restart_count: int = 0
    was_stopped: bool = False
    exception: ExceptionText | None = None
    error_file: str = ""
    stderr_tail: tuple[str, ...] = ()
    stderr_target: str = ""
    log_file: str = ""
    remark: str = ""
    kernel_line: str = ""
    oom_kills: OomKills | None = None
    stuck_at: Place | None = None
    is_unmoved: bool = False
    last_words: str = ""

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


def parse_exception(text: str, *, exitcode: int | None = None) -> ExceptionText | None:
    """Find the exception with which a program's stderr ends.

    Args:
        text: The end of its stderr; it may begin anywhere and hold anything.
        exitcode: How the program ended, if known: one that was killed, or that chose an exit code of its own and wrote
            on after a traceback, did not die of that traceback.

    Returns:
        The exception; of a program that ended with exit code 1 the last one, certain or not; or None.
    """
    from elastic_run.core.failure.traceback_text import find_exception

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
    hidden = find_hidden_cause(ends) if suspects and all(map(is_secondary, suspects)) else None
    if hidden is not None:
        suspects.append(hidden)
    return min(suspects, key=_order, default=None)


def find_hidden_cause(ends: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the worker that had failed by itself when its node was told to stop, or None.

    Its interpreter was still going down, and the peers that it took with it were seen first. Only where nothing but
    consequences is found in the whole job it is the cause.

    Args:
        ends: How the workers of one attempt ended.
    """
    hidden = [end for end in ends if end.exitcode != 0 and end.was_stopped and _failed_before_its_stop(end)]
    return min(hidden, key=_order, default=None)


def is_secondary(end: WorkerEnd) -> bool:
    """Whether a failure may be what other ranks see of a rank that died; narrower is `has_lost_rank`.

    Args:
        end: The failed worker.

    Returns:
        Whether another worker with another failure is more likely the cause.
    """
    return severity(end) >= SECONDARY_FAILURE


def has_lost_rank(end: WorkerEnd) -> bool:
    """Whether a failure is what torch says of a rank that died.

    For this one others are left running a moment longer, as one of them may have the cause. A connection that the
    program itself had lost, to a database or for its data, stops them at once.

    Args:
        end: The failed worker.

    Returns:
        Whether the cause is another rank's.
    """
    return severity(end) == LOST_RANK


def got_other_size(end: WorkerEnd) -> bool:
    """Whether gloo has ended a worker because a peer sent more bytes than its collective takes.

    Args:
        end: The failed worker.

    Returns:
        Whether the cause is a call of this rank, or of its peer.
    """
    from elastic_run.core.failure import secondary_failures

    return end.signal == SIGABRT and secondary_failures.is_of_other_size(end.stderr_tail)


def severity(end: WorkerEnd) -> int:
    """Rank a failure: `OWN_EXCEPTION`, `BARE_END`, `SECONDARY_FAILURE` or `LOST_RANK`.

    Args:
        end: The failed worker.

    Returns:
        The smaller, the more likely the cause.
    """
    exception = end.exception
    if exception is None and (end.signal != SIGABRT or end.kernel_line):
        return BARE_END
    from elastic_run.core.failure import secondary_failures

    if exception is None:
        return LOST_RANK if secondary_failures.is_lost_peer(end.stderr_tail) else BARE_END
    if secondary_failures.is_secondary(exception.name, exception.message):
        if end.kernel_line:
            return BARE_END  # a GPU that has failed looks from here like a peer that was lost
        return LOST_RANK if secondary_failures.is_of_torch(exception.name) else SECONDARY_FAILURE
    return BARE_END if end.exitcode < 0 or not exception.is_certain else OWN_EXCEPTION


def failure_signature(end: WorkerEnd) -> tuple[int | str, ...]:
    """Return what two failures share when they are the same failure.

    Args:
        end: The failed worker.

    Returns:
        Exit code, type, message without what varies from run to run, and place; without an exception of which the
        worker died for certain the exit code and the last line of stderr.
    """
    exception = end.certain_exception
    if exception is not None:
        return (end.exitcode, exception.type, _normalise(exception.message), exception.where)
    return (end.exitcode, _normalise(_last_line(end)))


def compute_error_number(end: WorkerEnd) -> int | None:
    """Return a number that is equal for workers with the same error, also of different nodes.

    Args:
        end: A worker that failed, or that was stopped while it was going down.

    Returns:
        A checksum of the exception's type and of its message without what varies from rank to rank; without an
        exception, or if the worker may have handled it, of its exit code and its last line on stderr. None if the
        worker has not failed, or did nothing.
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
    """Whether a failure can't go away by itself: a missing module or program, a syntax error, wrong arguments.

    Args:
        end: The failed worker.

    Returns:
        Whether a restart is pointless.
    """
    if end.certain_exception is not None:
        return end.certain_exception.name in _DETERMINISTIC_TYPES
    if end.exitcode in (EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND):
        return True
    last = _last_line(end)
    if end.exitcode == EXIT_USAGE:
        return ": can't open file '" in last or ": error: " in last
    return end.exitcode == 1 and ": No module named " in last


def is_unguarded_launch(end: WorkerEnd) -> bool:
    """Whether a worker has failed because its program starts processes as soon as it is imported.

    Args:
        end: The failed worker.

    Returns:
        Whether that is so; each worker of such a program fails.
    """
    exception = end.certain_exception
    return exception is not None and any(line.rstrip().endswith(_GUARD_CHECKS) for line in exception.lines)


def _failed_before_its_stop(end: WorkerEnd) -> bool:
    if end.exception is None or severity(end) != OWN_EXCEPTION:
        return False
    from elastic_run.core.failure import secondary_failures

    return not secondary_failures.is_obedience(end.exception.type, end.exception.message)


def _checksum(kind: str, text: str) -> int:
    return crc32(f"{kind}\n{_normalise(text)}".encode(errors="replace"))


def _last_line(end: WorkerEnd) -> str:
    return next((line for line in reversed(end.stderr_tail) if line.strip()), "")


def _order(end: WorkerEnd) -> tuple[int, float, int]:
    return (severity(end), end.uptime, end.rank)


def _normalise(text: str) -> str:
    import re

    return re.sub(_VARYING, "#", text[:4096].strip())
