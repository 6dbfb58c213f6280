"""An exception as a worker wrote it down."""

from __future__ import annotations

from elastic_run.records import dataclass

#: The type of what faulthandler writes: the place of a crash, and not an exception that the program may have handled.
FATAL_ERROR = "Fatal Python error"


@dataclass(slots=True)
class ExceptionText:
    """An exception as a worker wrote it down.

    Args:
        type: Name of its class, `ImportError`; a C++ type or "Fatal Python error" where it is one of those.
        message: Its message, lines and all.
        lines: The last lines of its traceback, the oldest first, with the line of type and message at the end.
        where: The innermost line of the user's own code, `train.py:12 in main`, or "".
        cause: The exception with which its chain began, in one line, with the one that it was raised from where that is
            another, or "".
        is_certain: Whether the worker died of it. Otherwise it is the last one on its stderr, and more was written
            after it or into its lines, or the stop's signal came before the end: the program may have handled it.
    """

    type: str
    message: str = ""
    lines: tuple[str, ...] = ()
    where: str = ""
    cause: str = ""
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
