"""Metrics for Prometheus, through the package prometheus-client.

For programs that serve or push its registry::

    from elastic_run import metrics
    from elastic_run.metrics.prometheus import PrometheusMetricHandler

    metrics.configure(PrometheusMetricHandler())

Rules
- ``<group>_<name>``, with what Prometheus doesn't take replaced by underscores; the role in ``workers.<role>.…`` is a
  label. Durations become a summary in seconds, counts a counter, all else a gauge.
- A value that doesn't fit is logged once and dropped: no metric ends a job.
"""

from __future__ import annotations

import logging
import re
import threading

from elastic_run.metrics import MetricHandler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

    from elastic_run.metrics import MetricData

__all__ = ["PrometheusMetricHandler"]

logger = logging.getLogger(__name__)

_DURATION = ".duration.ms"
_COUNTS = re.compile(r"(^|\.)(success|failure|run_\w+)$")
_OF_ROLE = re.compile(r"workers\.(.+)\.([^.]+)")
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusMetricHandler(MetricHandler):
    """Keeps metrics in a registry of prometheus-client.

    Args:
        registry: The registry; None for the one that prometheus-client serves by default.

    Raises:
        ModuleNotFoundError: prometheus-client is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client
        except ModuleNotFoundError as error:
            message = "metrics for Prometheus need prometheus-client: pip install 'elastic-run[metrics]'"
            raise ModuleNotFoundError(message) from error
        self._client = prometheus_client
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._collectors: dict[str, Counter | Gauge | Summary] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    def emit(self, metric_data: MetricData) -> None:
        """Take one value.

        Args:
            metric_data: The value with its time, group and name; Prometheus has times of its own.
        """
        with self._lock:
            try:
                self._record(metric_data.group_name, metric_data.name, metric_data.value)
            except (ValueError, TypeError) as error:
                if metric_data.name not in self._refused:
                    self._refused.add(metric_data.name)
                    logger.warning("metric %s=%r is dropped: %s", metric_data.name, metric_data.value, error)

    def _record(self, group: str, name: str, value: float) -> None:
        of_role = _OF_ROLE.fullmatch(name)
        labels = {"role": of_role[1]} if of_role else {}
        plain = f"workers.{of_role[2]}" if of_role else name
        if name.endswith(_DURATION):
            self._find(
                self._client.Summary, group, f"{plain.removesuffix(_DURATION)}.duration_seconds", labels
            ).observe(value / 1000)
        elif _COUNTS.search(name):
            self._find(self._client.Counter, group, plain, labels).inc(value)
        else:
            self._find(self._client.Gauge, group, plain, labels).set(value)

    def _find(self, kind, group: str, name: str, labels: dict[str, str]):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - one of three classes, and one of its instances
        full = _UNFIT.sub("_", f"{group}_{name}")
        full = f"_{full}" if full[0].isdigit() else full
        if full not in self._collectors:
            self._collectors[full] = kind(full, f"{name} of {group}", list(labels), registry=self._registry)
        found = self._collectors[full]
        if not isinstance(found, kind):
            message = f"{full} is a {type(found).__name__} already"
            raise TypeError(message)
        return found.labels(**labels) if labels else found
