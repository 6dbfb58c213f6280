"""Writes an exception where the launcher finds it: the file that TORCHELASTIC_ERROR_FILE names; and `record`.

The class, its methods and the file's format are torch 2.15's (torch.distributed.elastic.multiprocessing.errors); the
file of one may be read by the other. Different on purpose: where the file can't be written or read, that is a warning
and never an exception that takes the place of the one to be recorded.
"""

from __future__ import annotations

import functools
import json
import os
import time

from elastic_run import lazy_names
from elastic_run.contract import ENV_ERROR_FILE
from elastic_run.files import open_own

__getattr__ = lazy_names(__name__, {}, logger="logger")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, ParamSpec, TypeVar

    R = TypeVar("R")
    P = ParamSpec("P")

#: torch's word where there is no error file.
NOT_AVAILABLE = "<N/A>"
#: Characters of a message, and of a traceback, that are recorded; a message may list all that a checkpoint lacks. The
#: whole of it stands on stderr, and what reads the file takes 4 MiB, in which a character may be 12 bytes.
_MOST = 128 * 1024
#: Characters of an overwritten file that are logged.
_LOGGED = 16 * 1024
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ErrorHandler:
    """Records exceptions in a file; subclasses may record them elsewhere."""

    _fn_name: str | None = None

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Keep the name of the function that `record` decorates, for subclasses.

        Args:
            fn_name: Its qualified name; None if it has none, as a `functools.partial`.
        """
        self._fn_name = fn_name

    def record_success(self) -> None:
        """Do nothing; `record` calls it when the function has returned, for subclasses."""

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:  # noqa: ARG002 - for subclasses
        """Return what a failure by a signal says; subclasses may add to it, such as the fault of a GPU.

        Args:
            message: The text so far.
            error_file: The worker's error file, or "<N/A>"; its log files may be beside it.

        Returns:
            The text that `ChildFailedError` shows.
        """
        return message

    def initialize(self) -> None:
        """Prepare to record: Python's faulthandler writes the stack of a crash in native code to stderr."""
        import faulthandler

        try:
            faulthandler.enable(all_threads=True)
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            # stderr may be closed, or an object without a descriptor.
            _warn(f"faulthandler can't be enabled: {type(error).__name__}: {error}")

    def record_exception(self, e: BaseException) -> None:
        """Write an exception to the error file, if there is one.

        Args:
            e: The exception that is being handled.
        """
        path = self._get_error_file_path()
        if not path:
            return
        import traceback

        callstack = "".join(traceback.format_exception(type(e), e, skip_own_frames(e)))
        extra = {"py_callstack": _cut(callstack), "timestamp": str(int(time.time()))}
        message = _cut(f"{type(e).__name__}: {_text(e)}")
        self._write_error_file(path, json.dumps({"message": {"message": message, "extraInfo": extra}}))

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put the exit code into what a child recorded, which could not know it.

        Args:
            rootcause_error_file: Where the child recorded it, for messages.
            rootcause_error: What it recorded; is changed.
            error_code: Its exit code, or minus the signal's number.
        """
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _log().warning("%s has no message with fields: no place for exit code %s", rootcause_error_file, error_code)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to this process's own, with the exit code put in.

        Args:
            rootcause_error_file: The child's file; one that can't be read is replaced by a sentence that says so.
            error_code: The child's exit code, or minus the signal's number; 0 leaves the code out.
        """
        path = self._get_error_file_path()
        if not path:
            _log().info("no error file of our own to copy %s to", rootcause_error_file)
            return
        from elastic_run.multiprocessing.errors.error_file import read_error_file

        file = read_error_file(rootcause_error_file)
        error = file.data
        if error is None:
            extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
            said = f"{rootcause_error_file}: {file.problem or 'there is none'}"
            error = {"message": {"message": said, "extraInfo": extra}}
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, error, error_code)
        self._rm(path)
        self._write_error_file(path, json.dumps(error))

    def _get_error_file_path(self) -> str | None:
        return os.environ.get(ENV_ERROR_FILE)

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        try:
            with open(open_own(file_path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
                file.write(error_msg)
        except OSError as error:
            _warn(f"the error file {file_path} can't be written: {error.strerror}")

    def _rm(self, my_error_file: str) -> None:
        """Remove what a child that shares our environment may have left there, and note it in the log."""
        try:
            with open(my_error_file, encoding="utf-8", errors="replace") as file:
                _log().warning("%s is overwritten; it held:\n%s", my_error_file, file.read(_LOGGED))
            os.remove(my_error_file)
        except OSError:
            return  # usually there is none; and where it can't be removed, writing will say why


def _cut(text: str) -> str:
    half = _MOST // 2
    return text if len(text) <= _MOST else f"{text[:half]} [...] {text[-half:]}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - any class's __str__ runs here, and the failure has to be told
        return f"<its __str__ raised {type(broken).__name__}>"


def _warn(text: str) -> None:
    import warnings

    warnings.warn(text, stacklevel=3)


def _log() -> Any:
    import logging

    return logging.getLogger(__name__)


def skip_own_frames(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without our frames at its beginning: how we called the user's code is no news."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return error.__traceback__ if trace is None else trace


def get_error_handler() -> ErrorHandler:
    """Return the error handler of this process.

    Returns:
        A new handler.
    """
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Record an exception that leaves a function, for the launcher; use it on the main function.

    elastic-run reports exceptions without it too. It is for launchers and schedulers that read error files.

    Args:
        fn: The function.
        error_handler: The handler that records the exception; None for a new one, as `get_error_handler` makes it.

    Returns:
        The function. It raises what `fn` raises, except that `SystemExit(0)` becomes a return of None, as with torch.
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        _call_hook(handler, "set_entrypoint_fn_name", getattr(fn, "__qualname__", None))
        handler.initialize()
        try:
            result = fn(*args, **kwargs)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except Exception as error:
            failure = _first_failure(error)
            if failure is None:
                handler.record_exception(error)
            elif failure.error_file != NOT_AVAILABLE:
                handler.dump_error_file(failure.error_file, failure.exitcode)
            raise
        # Outside of the try: an exception of this hook must not be recorded as one of the function.
        _call_hook(handler, "record_success")
        return result

    return wrapper


def _call_hook(handler: ErrorHandler, name: str, *args: str | None) -> None:
    """Call a hook that handlers made for torch before 2.15 don't have."""
    hook = getattr(handler, name, None)
    if hook is not None:
        hook(*args)


def _first_failure(error: Any) -> Any:
    """Return the root cause of children that this process has launched, with our launcher or with torch's; or None."""
    if not any(cls.__name__ == "ChildFailedError" for cls in type(error).__mro__):
        return None
    return error.get_first_failure()[1]
