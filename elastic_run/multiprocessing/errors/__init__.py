"""Errors of workers, from process to process: torch's names, each loaded when it is first used.

A training script may import this without torch and without the launcher::

    from elastic_run.multiprocessing.errors import record

    @record
    def main() -> None: ...
"""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.multiprocessing.errors.error_handler import ErrorHandler as ErrorHandler
    from elastic_run.multiprocessing.errors.error_handler import get_error_handler as get_error_handler
    from elastic_run.multiprocessing.errors.error_handler import record as record
    from elastic_run.multiprocessing.errors.failures import ChildFailedError as ChildFailedError
    from elastic_run.multiprocessing.errors.failures import ProcessFailure as ProcessFailure

_HOMES = {
    "ChildFailedError": "failures",
    "ErrorHandler": "error_handler",
    "ProcessFailure": "failures",
    "get_error_handler": "error_handler",
    "record": "error_handler",
}

__all__ = list(_HOMES)

#: Names that torch's module has beside its public ones, and that programs take from there.
_BORROWED = {
    "GlobalRank": "failures",
    "JSON": "failures",
    "get_logger": "elastic_run.utils",
    "handlers": "error_handler:",
}

__getattr__ = lazy_names(__name__, _HOMES | _BORROWED, logger="logger")
