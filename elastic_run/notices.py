"""What the user is told without the agent's console: lines on stderr, texts on stdout, an error that becomes a line.

`find_foreign_place` tells whose code has raised an exception.
"""

from __future__ import annotations

import os
import sys

_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages" + os.sep, "dist-packages" + os.sep)
#: Packages that our own code calls.
_DEPENDENCIES = ("etcd", "prometheus_client", "psutil", "urllib3")
#: Of the lines that we say, in characters.
_LONGEST_WORD = 200
_LONGEST_LINE = 1000


class UsageError(ValueError, RuntimeError):
    """The command line is wrong: one line that names the flag, the value and what is allowed.

    It is a ValueError and a RuntimeError: for the same mistakes torch raises the one or the other.
    """


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
    """Write to stdout; it is no error when the reader has seen enough (--help | head -1), but a full disk is."""
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
    """Drop what is still written to stdout after an error; a reader that has closed its end of a pipe is no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        message = f"standard output can't be written: {error.strerror}"
        raise UsageError(message) from None


def find_foreign_place(error: BaseException) -> str:
    """Return the ``FILE:LINE`` where code that is not ours, such as a plug-in's, raised an exception, or "".

    The standard library and our dependencies count to the code that called them.
    """
    place, trace = "", error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path.startswith(_ROOT):
            place = ""
        elif not _is_neutral(path):
            place = f"{path}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _is_neutral(path: str) -> bool:
    if path.startswith("<"):  # code that was made from a text, such as a constructor
        return True
    for directory in _INSTALLED:
        _, found, below = path.rpartition(os.sep + directory)
        if found:
            return below.partition(os.sep)[0] in _DEPENDENCIES
    return path.startswith(_STANDARD_LIBRARY)
