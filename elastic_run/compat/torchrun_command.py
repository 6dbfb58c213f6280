"""A command called torchrun that is elastic-run, in a directory of the user's choice.

A wheel can't bring a script on request only, and one that always brought `torchrun` would overwrite torch's. So it is
written where the user says; taking the directory off PATH, or deleting the file, brings torch's back.
"""

from __future__ import annotations

import os
import sys

_MARK = "# Written by `python -m elastic_run.compat --install-torchrun`; delete it to have torch's torchrun back."

#: Bytes of an interpreter's path that every kernel takes from a first line.
_LONGEST_INTERPRETER = 120


class CommandExistsError(Exception):
    """There is a torchrun already, and we haven't written it."""


def write_command(directory: str, python: str = sys.executable) -> str:
    """Write the command, or write it anew.

    Args:
        directory: Where; it is made if it doesn't exist.
        python: The interpreter that runs it.

    Returns:
        Its path, absolute.

    Raises:
        CommandExistsError: Another program's torchrun is there.
        OSError: It can't be written.
    """
    path = os.path.join(os.path.abspath(directory), "torchrun")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path) and _MARK not in _read(path):
        message = f"{path} exists and is not ours: choose another directory"
        raise CommandExistsError(message)
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(_text(python))
    os.chmod(path, 0o755)  # noqa: S103 - a command is for all
    return path


def _text(python: str) -> str:
    """Return a Python script rather than a shell's `python -m`: modules in the working directory can't hide ours."""
    first = [f"#!{python}"]
    if " " in python or len(python) > _LONGEST_INTERPRETER:
        # A shell finds such an interpreter, the kernel doesn't; to Python the two lines are a string.
        quoted = python.replace("'", "'\"'\"'")
        first = ["#!/bin/sh", f"'''exec' '{quoted}' \"$0\" \"$@\"", "' '''"]
    return "\n".join([*first, _MARK, "from elastic_run.__main__ import main", "", "main()"]) + "\n"


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(4096)
