"""Reads what Python's faulthandler writes of a process: its threads, each with its frames, innermost first.

Source: Python/traceback.c of CPython 3.9 to 3.14. The text has no end, only the next thread or nothing. The main thread
comes last, as threads are listed from the newest to the oldest. Of more than 100 threads, or frames of one thread, the
text leaves out the rest and says so by a line of three dots; it is the main thread that is left out then. The text of
the main thread alone is called a stack.
"""

from __future__ import annotations

import re

from elastic_run import contract
from elastic_run.records import dataclass

#: Python 3.14 adds the thread's name in brackets.
_THREAD = re.compile(r"(?:(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(.*)\])?|Stack) \(most recent call first\):$")
_STARTS = re.compile(r"^(?:(?:Current thread|Thread) 0x|Stack )", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a thread's stack.

    Args:
        file: Path of the source file.
        line: Number of the line; 0 where Python doesn't know it.
        function: Name of the function; `<module>` for a file's top level.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a process.

    Args:
        frames: Its calls, innermost first.
        name: Its name, where Python tells it, or "".
    """

    frames: tuple[Frame, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The threads of a process.

    Args:
        threads: As far as they are known, the oldest last.
        is_cut: Whether there are more than Python writes, the main thread among them.
    """

    threads: tuple[Thread, ...]
    is_cut: bool = False

    @property
    def main(self) -> Thread | None:
        """The thread with which the program began, or None where it is not known."""
        return None if self.is_cut or not self.threads else self.threads[-1]


def parse_stacks(text: str) -> Stacks:
    """Read a text of faulthandler's.

    Args:
        text: The whole text. Lines that are none of faulthandler's are passed over.
    """
    threads: list[tuple[str, list[Frame]]] = []
    is_cut = False
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            threads.append((thread[1] or "", []))
        elif (frame := _FRAME.match(line)) and threads and frame[1] != contract.STACK_HANDLER_FILE:
            threads[-1][1].append(Frame(frame[1], int(frame[2]) if frame[2] != "???" else 0, frame[3]))
        elif line == "...":
            is_cut = True
    return Stacks(tuple(Thread(tuple(frames), name) for name, frames in threads), is_cut)


def shorten_stacks(text: str, most: int) -> str:
    """Leave out the newest threads of a text that is too long, for the main thread is the last.

    Args:
        text: A text of faulthandler's.
        most: Characters that are kept.

    Returns:
        Whole threads as far as there is room; of a main thread that is longer alone its innermost calls.
    """
    if len(text) <= most:
        return text
    starts = [match.start() for match in _STARTS.finditer(text)]
    kept = next((start for start in starts if len(text) - start <= most), starts[-1] if starts else 0)
    return text[kept : kept + most]
