"""Which error handler a worker uses, and the decorator that tells the launcher by it what the worker died of."""

from __future__ import annotations

import functools

from elastic_run.multiprocessing.errors.error_handler import NOT_AVAILABLE, ErrorHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, ParamSpec, TypeVar

    R = TypeVar("R")
    P = ParamSpec("P")


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
        error_handler: The handler that records; None for the handler of `get_error_handler`.

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
        _call_hook(handler, "record_success")  # out here, so that what it raises is not recorded as the function's
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
