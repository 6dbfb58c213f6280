"""Metrics of the launcher, and of programs that add some: the names of ``torch.distributed.elastic.metrics``.

The launcher publishes in the group ``torchelastic``: ``workers.<role>.…`` and ``agent.….duration.ms``. Choose a
handler with `configure`; without one they are dropped.

| module | what it holds |
|---|---|
| `api` | metrics with group and name, and their handlers |
| `prometheus` | a handler for Prometheus, through prometheus-client |
"""

from __future__ import annotations

from elastic_run.metrics.api import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    prof,
    profile,
    publish_metric,
    put_metric,
)

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


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """Do nothing: a place for a site's own set-up, called once by the launcher, as in torch.

    Args:
        cfg: Settings.
    """
