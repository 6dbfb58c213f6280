"""An exception that has ended the main thread of a worker, as the worker itself reports it; its process may live on.

Pure. There is no doubt about such an exception (see `worker_start`): a traceback on stderr may be of one that the
program has handled. So the agent may count the worker as failed.
"""

from __future__ import annotations

from elastic_run.core.diagnosis.stacks import RAISED, WROTE, Place, find_place, is_in_shutdown, parse_stacks
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.diagnosis.stacks import Dump

#: What the functions wait for that multiprocessing calls at the end of a program.
_OF_MULTIPROCESSING = {
    "_exit_function": "a child process still runs",
    "__call__": "a queue, a pool or another object of multiprocessing does not end",
}
#: Threads, and characters of an exception, that a line shows.
_MOST_NAMES = 3
_MOST_SUMMARY = 120


@dataclass(frozen=True, slots=True)
class Uncaught:
    """An exception that has ended a main thread."""

    at: float  # Monotonic seconds
    exception: ExceptionText  # Its class and its message, without a traceback
    #: Name of each other thread for which Python waits at its end, by its number in hex
    threads: tuple[tuple[str, str], ...] = ()


def read_uncaught(text: str) -> Uncaught | None:
    """Read what a worker has written: the moment, the class, the message, and each thread's number and name."""
    at, *fields = text.split("\x1f")
    try:
        name, message, *threads = fields
        exception = ExceptionText(name, message)
        exception.lines = (exception.summary,)
        named = (thread.partition(" ") for thread in threads)
        return Uncaught(float(at), exception, tuple((number, name) for number, _, name in named))
    except ValueError:
        return None


def confirm(written: ExceptionText | None, told: Uncaught) -> ExceptionText:
    """Return the exception that stderr shows, with its traceback, if the worker reports the same; else that."""
    if written is None or written.name != told.exception.name:
        return told.exception
    written.is_certain = True
    return written


def describe_survival(told: Uncaught, dump: Dump | None = None) -> str:
    """Say in a clause what keeps the process alive, such as `thread loader still runs`."""
    stacks = parse_stacks("" if dump is None else dump.text)
    frames = () if stacks.main is None else stacks.main.frames
    if frames and not is_in_shutdown(stacks):  # exit functions and destructors come when these threads have ended
        function = next((each.function for each in frames if each.file.endswith("/multiprocessing/util.py")), "")
        return _OF_MULTIPROCESSING.get(function) or f"it {_describe_place(find_place(stacks))}"
    text = "" if dump is None or len(stacks.threads) == 1 else dump.text
    living = [name for number, name in told.threads if not text or f"0x{number:0>16}" in text]
    if living:
        more = f" and {len(living) - _MOST_NAMES} more" if len(living) > _MOST_NAMES else ""
        names = f"{', '.join(living[:_MOST_NAMES])}{more}"
        return f"thread {names} still runs" if len(living) == 1 else f"threads {names} still run"
    if dump is not None and dump.problem:
        return f"it {dump.problem}"
    return "another thread still runs" if frames else "an exit function, a destructor or native code still runs"


def place_failed(told: Uncaught, dump: Dump) -> Place:
    """Return the place of a rank that has failed and lives, for the report on a job that hangs."""
    said = told.exception.summary[:_MOST_SUMMARY]
    return Place(problem=f"{RAISED}{said}, and has not ended: {describe_survival(told, dump)}")


def place_last_words(place: Place, written: ExceptionText) -> Place:
    """Return the place of a rank whose last output is an exception: it may have failed, or have handled it."""
    said = written.summary[:_MOST_SUMMARY]
    return Place(problem=f"{WROTE}{said} and nothing after it, and {place.problem or _describe_place(place)}")


def _describe_place(place: Place) -> str:
    return f"is in {place.function} ({place.file.rpartition('/')[2]}:{place.line})"
