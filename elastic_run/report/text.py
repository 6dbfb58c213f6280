"""Texts for a terminal: without unprintable characters, measured in columns, shortened or wrapped; and words.

Output of workers may hold anything: escape sequences that change colours or clear the screen, binary data, lines of
megabytes, characters two columns wide. All of it passes through this module before it is shown. The words for exit
codes, signals, ranks, durations and exceptions are the same in all texts.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal as signals
import unicodedata

from elastic_run.contract import EXIT_HUNG, EXIT_SIGNAL_BASE, HANG
from elastic_run.core.job.short_lists import list_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elastic_run.core.failure.root_cause import ExceptionText, WorkerEnd

#: Characters of a text that are looked at, half of them at each end.
_LIMIT = 2 * 1024
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_ELLIPSIS = "..."
#: Text that readers copy: a command between backticks, and a word with a path or an address in it.
_WHOLE = re.compile(
    r"`[^`]{1,200}`\S*"
    r"|(?<!\S)\S*[\"'](?:~|\.\.?)?/[^\"']*[\"']\S*"
    r"|(?<!\S)(?:\S*[\"'(=:\[<,])?(?:~|\.\.?)?/\S*"
)
#: Paths and commands of a text's middle that are kept.
_MOST_KEPT = 2
_SURROGATES = range(0xDC80, 0xDD00)
_ZERO_WIDTH = "\u200b\u200c\u200d\ufeff"


def printable(text: str) -> str:
    """Return a text in one line without anything that a terminal would obey."""
    if len(text) > _LIMIT:
        text = f"{text[: _LIMIT // 2]} {_ELLIPSIS} {text[-_LIMIT // 2 :]}"
    text = _ANSI.sub("", text)
    return text if text.isascii() and text.isprintable() else "".join(_visible(character) for character in text)


def shows_colors(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a descriptor is a terminal that shows colours, and the user wants them."""
    return os.isatty(fd) and environ.get("TERM") != "dumb" and not environ.get("NO_COLOR")


def columns(text: str) -> int:
    """Return the columns that a printable text takes."""
    return len(text) if text.isascii() else sum(_width(character) for character in text)


def elide(text: str, limit: int, *, tail: float = 0.4) -> str:
    """Shorten a text to a width by leaving out its middle."""
    if columns(text) <= limit:
        return text
    if limit <= len(_ELLIPSIS):
        return _head(text, limit)
    start, end = _middle(text, limit, tail)
    return f"{text[:start].rstrip()}{_ELLIPSIS}{text[end:]}"


def shorten(text: str, limit: int, *, tail: float = 0.4) -> str:
    """Shorten a text as `elide` does, but cut no path and no command, and keep the first two of the middle."""
    if columns(text) <= limit:
        return text
    start, end = _middle(text, limit, tail)
    for whole in _WHOLE.finditer(text):
        if whole.start() < end < whole.end():
            end = whole.start()
        if whole.start() < start < whole.end():
            start = whole.end()
    if start >= end:
        return text
    kept = [found[0] for found in _WHOLE.finditer(text, start, end) if found.end() < end][:_MOST_KEPT]
    return _ELLIPSIS.join((text[:start].rstrip(), *kept, text[end:]))


def wrap(text: str, width: int, most: int) -> list[str]:
    """Break a text into at least one line, but break no path and no command."""
    text = text.strip()
    lines, limit = _break(text, width), width * most
    while len(lines) > most and limit > 0:
        # Breaking between words wastes columns, so the text is shortened until it fits.
        lines, limit = _break(shorten(text, limit), width), limit - max(1, width // 8)
    return lines if len(lines) <= most else [*lines[: most - 1], " ".join(lines[most - 1 :])]


def _middle(text: str, limit: int, tail: float) -> tuple[int, int]:
    """Return where the part that doesn't fit begins and ends."""
    room = max(0, limit - len(_ELLIPSIS))
    end = _head(text[::-1], int(room * tail))[::-1].lstrip()
    return len(_head(text, room - columns(end))), len(text) - len(end)


def _break(text: str, width: int) -> list[str]:
    lines: list[str] = []
    while columns(text) > width:
        line = _head(text, width)
        whole = next((found for found in _WHOLE.finditer(text) if found.start() < len(line) < found.end()), None)
        space = line.rfind(" ")
        if whole is not None:
            line = text[: whole.start() or whole.end()]
        elif space > width // 3 and not text[len(line) : len(line) + 1].isspace():
            line = line[:space]
        lines.append(line.rstrip())
        text = text[len(line) :].lstrip()
    return [*lines, text] if text or not lines else lines


def _head(text: str, limit: int) -> str:
    """Return as much of the start of a text as fits."""
    if text.isascii():
        return text[:limit]
    used = itertools.accumulate(_width(character) for character in text)
    return text[: sum(1 for _ in itertools.takewhile(lambda columns: columns <= limit, used))]


@functools.lru_cache(maxsize=1024)
def _width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    if ord(character) in _SURROGATES:  # a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return "" if character in _ZERO_WIDTH else character.encode("unicode_escape").decode("ascii")


#: The place in C++ code that gloo and NCCL put before their messages.
_CPP_PLACE = re.compile(r"^\[/?\S+\.\w+:\d+\] ")
_MINUTE = 60
_HOUR = 3600
_DAY = 86400


def signal_name(number: int) -> str:
    """Return a signal's name: `SIGTERM`, `SIGRTMIN+3`, or `signal 99` where there is no such signal."""
    try:
        return signals.Signals(number).name
    except ValueError:
        offset = number - int(getattr(signals, "SIGRTMIN", 1000))
        last = int(getattr(signals, "SIGRTMAX", 0)) - int(getattr(signals, "SIGRTMIN", 0))
        return f"SIGRTMIN+{offset}" if 0 < offset < last else f"signal {number}"


def exit_text(end: WorkerEnd) -> str:
    """Say how a worker ended: `exit code 1`, `SIGKILL`, or `exit code 137 (128+9: SIGKILL)`."""
    if end.exitcode < 0:
        return signal_name(-end.exitcode)
    if end.signal is None:
        return f"exit code {end.exitcode}"
    return f"exit code {end.exitcode} ({EXIT_SIGNAL_BASE}+{end.signal}: {signal_name(end.signal)})"


def end_verb(end: WorkerEnd) -> str:
    """Return the verb that follows a worker's name: how it ended."""
    if is_hang(end):
        return "made no progress"
    return f"was killed by {exit_text(end)}" if end.exitcode < 0 else f"failed with {exit_text(end)}"


def is_hang(end: WorkerEnd) -> bool:
    """Whether the launcher stopped a worker for a hang; a worker may choose the same exit code."""
    return end.exitcode == EXIT_HUNG and end.exception is not None and end.exception.type == HANG


def no_restart_left(max_restarts: int) -> str:
    """Say why the job ends where --hang-action asks for a restart."""
    return f"no restart is left for --hang-action=restart (--max-restarts={max_restarts})"


def exception_line(exception: ExceptionText) -> str:
    """Return an exception in one line: its type, and the first line of the message that is not empty."""
    first = next((line.strip() for line in exception.message.splitlines() if line.strip()), "")
    first = _CPP_PLACE.sub("", first, count=1)
    return f"{exception.type}: {first}" if first else exception.type


def span(seconds: float) -> str:
    """Return a span of time, rounded to the precision that a reader needs."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02d} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def ranks(numbers: Iterable[int]) -> str:
    """Return a list of ranks with consecutive ranks as ranges."""
    ordered = sorted(numbers)
    return f"rank{'s' if len(ordered) > 1 else ''} {list_ranks(ordered)}"


def count(number: int, noun: str) -> str:
    """Return a number and its noun: `1 worker` or `8 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
