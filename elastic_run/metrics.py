"""Metrics of the launcher, and of programs that add some: the names of ``torch.distributed.elastic.metrics``.

The launcher publishes in the group ``torchelastic``: ``workers.<role>.…`` and ``agent.….duration.ms``. Nothing is
configured at first, and then a metric costs a function call. A handler that raises loses the value that it raised on,
and nothing else: that is said once, in the log. (With torch it ends the job.)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar, overload

from elastic_run import alias_modules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

alias_modules(__name__, {"api": (__name__,)})


class MetricData(NamedTuple):
    """One value: seconds since the epoch, group, name, value."""

    timestamp: float
    group_name: str
    name: str
    value: int


class MetricsConfig:
    """Settings for `initialize_metrics`.

    Args:
        params: Anything that a site's own set-up wants to know.
    """

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(ABC):
    """Takes the metrics of one or more groups. Subclass it to send them somewhere."""

    @abstractmethod
    def emit(self, metric_data: MetricData) -> None:
        """Take one value, with its time, group and name."""


class ConsoleMetricHandler(MetricHandler):
    """Prints each value on standard output."""

    def emit(self, metric_data: MetricData) -> None:
        """Print ``[time][group]: name=value``."""
        data = metric_data
        print(f"[{data.timestamp}][{data.group_name}]: {data.name}={data.value}")  # noqa: T201 - that is its purpose


class NullMetricHandler(MetricHandler):
    """Drops everything."""

    def emit(self, metric_data: MetricData) -> None:
        """Do nothing."""


class MetricStream:
    """A group and its handler.

    Args:
        group_name: Name of the group.
        handler: Where its values go.
    """

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: int) -> None:
        """Give a value to the handler, with the time of now."""
        try:
            self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))
        except Exception as error:  # noqa: BLE001 - whatever foreign code raises
            if any(self.handler is known for known in _broken_handlers):
                return
            _broken_handlers.append(self.handler)
            import logging

            message = "metric handler %s of group %r raised %s on %s: %s; the job goes on (shown once)"
            name, kind = type(self.handler).__qualname__, type(error).__name__
            logging.getLogger(__name__).warning(message, name, self.group_name, kind, metric_name, error)


_metrics_map: dict[str, MetricHandler] = {}
_default_metrics_handler: MetricHandler = NullMetricHandler()
#: Those that have raised, and of which that was said.
_broken_handlers: list[MetricHandler] = []


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Choose where metrics go.

    Args:
        handler: Takes the values.
        group: The group whose values it takes; None for all groups that have no handler of their own.
    """
    if group is None:
        global _default_metrics_handler  # noqa: PLW0603 - torch has one setting per process
        _default_metrics_handler = handler
    else:
        _metrics_map[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802 - torch's name
    """Return the group with the handler that it has now."""
    return MetricStream(group, _metrics_map.get(group, _default_metrics_handler))


def put_metric(metric_name: str, metric_value: int, metric_group: str = "torchelastic") -> None:
    """Publish a value of a metric in a group."""
    getStream(metric_group).add_value(metric_name, metric_value)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Return the whole milliseconds since a moment of ``time.time()``."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[_P, _R], group: str = "torchelastic") -> Callable[_P, _R]: ...
@overload
def prof(fn: None = None, group: str = "torchelastic") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def prof(
    fn: Callable[_P, _R] | None = None, group: str = "torchelastic"
) -> Callable[_P, _R] | Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Publish how each call of a function ends and how long it takes: ``@prof`` or ``@prof(group="mine")``.

    The metrics are ``<name>.success`` or ``<name>.failure`` with the value 1, and ``<name>.duration.ms``. The name is
    ``Class.method``, or ``module.function`` outside of a class.

    Args:
        fn: The function.
        group: Group of the metrics.

    Returns:
        The function with measurement, or a decorator where no function is given.
    """

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name: str = function.__qualname__
        if "." not in name and function.__module__:
            name = f"{function.__module__.rpartition('.')[2]}.{name}"
        return _measured(function, name, group)

    return wrap(fn) if fn else wrap


def profile(group: str | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Publish a function's metrics under its bare name; deprecated, use `prof`."""
    _warn_of_deprecation("profile is deprecated, use prof")

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        return _measured(function, function.__name__, group)  # type: ignore[arg-type] # torch passes None on

    return wrap


def publish_metric(metric_group: str, metric_name: str, metric_value: int) -> None:
    """Publish a value; deprecated, use `put_metric`."""
    _warn_of_deprecation("publish_metric is deprecated, use put_metric")
    getStream(metric_group).add_value(metric_name, metric_value)


def _measured(function: Callable[_P, _R], name: str, group: str) -> Callable[_P, _R]:
    @wraps(function)
    def measured(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        start = time.monotonic()
        try:
            result = function(*args, **kwargs)
        except Exception:
            put_metric(f"{name}.failure", 1, group)
            raise
        else:
            put_metric(f"{name}.success", 1, group)
            return result
        finally:
            put_metric(f"{name}.duration.ms", int((time.monotonic() - start) * 1000), group)

    return measured


def _warn_of_deprecation(message: str) -> None:
    import warnings

    warnings.warn(message, category=FutureWarning, stacklevel=3)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing: a place for a site's own set-up, called once by the launcher, as in torch."""
