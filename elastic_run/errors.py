"""Errors that several parts raise or catch; each other error stands with the part that raises it."""

from __future__ import annotations


class UsageError(ValueError, RuntimeError):
    """The command line is wrong: one line that names the flag, the value and what is allowed.

    It is a ValueError and a RuntimeError: for the same mistakes torch raises the one or the other.
    """


class PluginHungError(Exception):
    """The job has ended, and a plug-in's call has not returned: Python's own end might wait for its locks for ever.

    Args:
        exit_code: The exit code of the job.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
