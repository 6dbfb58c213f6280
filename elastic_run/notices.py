"""Lines that the launcher prints before the agent has a console: notices and the error that ends a wrong start."""

from __future__ import annotations

import sys

#: Of the lines that we say, in characters.
_LONGEST_WORD = 200
_LONGEST_LINE = 1000


def say(text: str) -> None:
    """Tell the user something, in one line of the launcher's."""
    if sys.stderr is None:  # closed by whoever started us
        return
    try:
        sys.stderr.write(f"elastic-run: {_shorten_line(text)}\n")
    except OSError:  # nobody reads it, or the disk is full: no reason not to run the job
        pass


def _shorten_line(text: str) -> str:
    """Take the middle out of what is too long to be read, such as a value of some thousand digits.

    The ends stay: a line begins with the flag, and says at its end what is allowed.
    """
    words = escape_unprintable(text).split(" ")
    return _shorten(" ".join(_shorten(word, _LONGEST_WORD) for word in words), _LONGEST_LINE)


def escape_unprintable(text: str) -> str:
    """Write control characters, which may come from a file or its name, as Python would."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _shorten(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"
