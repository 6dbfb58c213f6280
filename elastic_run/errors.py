"""Errors that several parts raise or catch, and whose code has raised one; other errors stand with their parts."""

from __future__ import annotations

import os

_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages" + os.sep, "dist-packages" + os.sep)
#: Packages that our own code calls.
_DEPENDENCIES = ("etcd", "prometheus_client", "psutil", "urllib3")


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
