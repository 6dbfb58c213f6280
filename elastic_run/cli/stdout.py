"""Writing what a command was asked for to stdout."""

from __future__ import annotations

import os
import sys

from elastic_run.errors import UsageError


def print_json(document: object) -> None:
    """Write a document to stdout; see `print_text`."""
    import json  # noqa: PLC0415 - only when asked for

    print_text(json.dumps(document, indent=2) + "\n")


def print_text(text: str) -> None:
    """Write to stdout; it is no error when the reader has seen enough (--help | head -1).

    Raises:
        UsageError: It can't be written, as on a full disk.
    """
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        give_up_stdout(error)


def give_up_stdout(error: OSError) -> None:
    """Write no more to stdout after an error; it is none if the reader has closed its end.

    Raises:
        UsageError: It can't be written, as on a full disk.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        message = f"standard output can't be written: {error.strerror}"
        raise UsageError(message) from None
