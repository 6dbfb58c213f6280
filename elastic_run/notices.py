"""Lines of the launcher on stderr before the agent has a console, and texts on stdout that the user asked for."""

from __future__ import annotations

import os
import sys

from elastic_run.errors import UsageError

#: Of the lines that we say, in characters.
_LONGEST_WORD = 200
_LONGEST_LINE = 1000


def say(text: str) -> None:
    """Print one line of the launcher's to stderr."""
    if sys.stderr is None:  # closed by whoever started us
        return
    # The middle of a long word or line, such as a value of some thousand digits, is left out: a line begins with the
    # flag, and says at its end what is allowed.
    words = escape_unprintable(text).split(" ")
    line = _shorten(" ".join(_shorten(word, _LONGEST_WORD) for word in words), _LONGEST_LINE)
    try:
        sys.stderr.write(f"elastic-run: {line}\n")
    except OSError:  # nobody reads it, or the disk is full: no reason not to run the job
        pass


def escape_unprintable(text: str) -> str:
    """Write control characters, which may come from a file or its name, as Python would."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _shorten(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def print_json(document: object) -> None:
    """Write a document to stdout; see `print_text`."""
    import json

    print_text(json.dumps(document, indent=2) + "\n")


def print_text(text: str) -> None:
    """Write to stdout; it is no error when the reader has seen enough (--help | head -1).

    Raises:
        UsageError: It can't be written, as on a full disk.
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            replace_unknown()
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        give_up_stdout(error)


def replace_unknown() -> None:
    """Write characters that the locale's encoding does not know as their numbers, as on stderr."""
    from io import TextIOWrapper

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def give_up_stdout(error: OSError) -> None:
    """Drop what is still written to stdout after an error. A reader that has closed its end of a pipe is no error.

    Raises:
        UsageError: stdout can't be written for another reason, such as a full disk.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        message = f"standard output can't be written: {error.strerror}"
        raise UsageError(message) from None
