"""A failed worker, and the exception that says so, with torch 2.15's names and fields.

Different on purpose: an error.json that is empty, cut short or something else entirely is said so in the message, where
torch raises JSONDecodeError and loses the failure.
"""

from __future__ import annotations

import os
import time

from elastic_run.multiprocessing.errors.error_handler import NOT_AVAILABLE
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Torch's names for what a failure holds and is found by.
JSON = dict
GlobalRank = int

#: torch's word where there is no data from an error file.
_NO_DATA = "<NONE>"
_MOST_WIDTH = 60
#: Failures beside the root cause that the text tells one by one.
_MOST_OTHERS = 8
#: Characters of a message, and of each line of a traceback, that the text shows.
_LONGEST = 4000
#: What programs look for where no traceback was recorded.
_HOW_TO_RECORD = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@dataclass
class ProcessFailure:
    """A worker that failed, and what it recorded of it.

    Args:
        local_rank: Its number on its node.
        pid: Its process.
        exitcode: Its exit code, or minus the number of the signal that ended it.
        error_file: Path of its error.json; becomes "<N/A>" where there is none.

    Attributes:
        error_file_data: The contents of its error file.
        message: The record of the worker (a dict with `message` and `extraInfo`), or a sentence.
        timestamp: Seconds since the epoch at which it failed, whole as torch has them.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    error_file_data: dict[str, Any] = field(init=False)
    message: Any = field(init=False)  # torch says str, and puts a dict there
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        self.timestamp = int(time.time())
        self.error_file_data = {"message": _NO_DATA}
        self.message = ""
        clause = ""
        if self.error_file and os.path.exists(self.error_file):
            from elastic_run.multiprocessing.errors.error_file import read_error_file

            file = read_error_file(self.error_file)
            clause = f" ({file.problem})" if file.problem else ""
            if file.data is not None:
                self.error_file_data, self.message = file.data, file.data["message"]
            if file.timestamp is not None:
                self.timestamp = file.timestamp
        else:
            self.error_file = NOT_AVAILABLE
        if self.message:
            return
        if self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}{clause}"
        else:
            # torch's marks for a scheduler that looks for them.
            self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
            self.message = f"exit code {self.exitcode}; what it said stands on its stderr{clause}. {_HOW_TO_RECORD}"

    def signal_name(self) -> str:
        """Return the name of the signal that ended the worker.

        Returns:
            `SIGKILL`, or "<N/A>" if none did or it has no name.
        """
        import signal

        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Return the time of the failure.

        Returns:
            Local time, `2026-01-31_23:59:59`.
        """
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))


class ChildFailedError(Exception):
    """Workers failed, and restarts are used up.

    Args:
        name: Name of what the workers ran.
        failures: By global rank, not empty.
        root_rank: Rank whose failure was the cause, if that is known better than by whole seconds.

    Raises:
        AssertionError: There are no failures (torch's exception).
    """

    def __init__(self, name: str, failures: dict[int, ProcessFailure], root_rank: int | None = None) -> None:
        if not failures:
            message = "a ChildFailedError needs at least one failure"
            raise AssertionError(message)
        self.name = name
        self.failures = failures
        self.root_rank = root_rank if root_rank in failures else None
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[type[ChildFailedError], tuple[str, dict[int, ProcessFailure], int | None]]:
        return (type(self), (self.name, self.failures, self.root_rank))

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return the root cause.

        Returns:
            Its global rank and the failure: the root rank's if it was given, else the earliest.
        """
        rank = self.root_rank
        if rank is None:
            rank = min(self.failures, key=lambda rank: self.failures[rank].timestamp)
        return rank, self.failures[rank]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Return the failures as text, the root cause last, where a traceback of this exception ends.

        The labels and their order are torch's, since programs look for them.

        Args:
            boarder_delim: Character of the outer lines.
            section_delim: Character of the inner lines.

        Returns:
            The text.
        """
        root_rank, _ = self.get_first_failure()
        described = {
            rank: _describe(index, rank, failure) for index, (rank, failure) in enumerate(self.failures.items())
        }
        root, others = described.pop(root_rank), [*described.values()]
        title = f"{self.name} FAILED"
        width = min(_MOST_WIDTH, max(map(len, (title, *root, *(line for other in others for line in other)))))
        return "\n".join(
            [
                "",
                boarder_delim * width,
                title,
                section_delim * width,
                "Failures:",
                *(line for other in others[:_MOST_OTHERS] for line in other),
                *([f"... and {len(others) - _MOST_OTHERS} more"] if len(others) > _MOST_OTHERS else []),
                *([] if others else ["  <NO_OTHER_FAILURES>"]),
                section_delim * width,
                "Root Cause (first observed failure):",
                *root,
                boarder_delim * width,
            ]
        )


def _describe(index: int, rank: int, failure: ProcessFailure) -> list[str]:
    """Return the lines of a failure, with torch's labels."""
    name = failure.signal_name()
    values = {
        "time": failure.timestamp_isoformat(),
        "host": os.uname().nodename,
        "rank": f"{rank} (local_rank: {failure.local_rank})",
        # With two blanks before the signal, as torch has them.
        "exitcode": f"{failure.exitcode} (pid: {failure.pid})" + (f"  ({name})" if name != NOT_AVAILABLE else ""),
        "error_file": failure.error_file,
    }
    first, *more = _traceback(failure) or [""]
    return [
        f"[{index}]:",
        *(f"  {label:<10}: {value}" for label, value in values.items()),
        f"  traceback : {first}",
        *(f"  {line}" for line in more),
    ]


def _traceback(failure: ProcessFailure) -> list[str]:
    """Return what is known of the failure: a traceback, else a message; the failure's own message has all of it."""
    said = failure.message
    if isinstance(said, dict):
        extra = said.get("extraInfo")
        callstack = extra.get("py_callstack") if isinstance(extra, dict) else None
        said = callstack or said.get("message", NOT_AVAILABLE)
    if failure.exitcode < 0:
        said = _enrich(str(said), failure.error_file)
    half = _LONGEST // 2
    return [
        f"{line[:half]} ... {len(line) - 2 * half} more characters ... {line[-half:]}" if len(line) > _LONGEST else line
        for line in str(said).rstrip().splitlines()
    ]


def _enrich(message: str, error_file: str) -> str:
    """Let a handler of the program's own add to what a failure by a signal says."""
    from elastic_run.multiprocessing.errors import error_handler

    handler = error_handler.get_error_handler()
    try:
        return str(handler.maybe_enrich_signal_failure_message(message, error_file))
    except Exception:  # any program's code; the failure has to be told
        import logging

        logging.getLogger(__name__).warning("%s adds nothing to a failure", type(handler).__name__, exc_info=True)
        return message
