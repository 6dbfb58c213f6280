"""Writing what a command was asked for to stdout."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from elastic_run.errors import UsageError


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
