"""Errors that several parts raise or catch; each other error stands with the part that raises it."""

from __future__ import annotations


class UsageError(ValueError, RuntimeError):
    """The command line is wrong: one line that names the flag, the value and what is allowed.

    It is a ValueError and a RuntimeError: for the same mistakes torch raises the one or the other.
    """
