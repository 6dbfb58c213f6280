"""Metrics in a registry of prometheus-client."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from elastic_run import metrics
from elastic_run.metrics.prometheus import PrometheusMetricHandler

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """Give a registry that takes all metrics of this process."""
    made = CollectorRegistry()
    before = metrics._default_metrics_handler
    metrics.configure(PrometheusMetricHandler(made))
    yield made
    metrics.configure(before)


def test_the_launcher_s_metrics_are_served(registry: CollectorRegistry) -> None:
    """Counts add up, by role; durations are seconds; other values are the last ones."""
    for _ in range(2):
        metrics.put_metric("workers.trainer.a.run_total", 1)
    metrics.put_metric("workers.trainer.a.flakiness", 50)
    metrics.put_metric("workers.trainer.a.flakiness", 25)
    metrics.put_metric("agent.rendezvous.duration.ms", 1500)
    metrics.put_metric("agent.rendezvous.duration.ms", 500)
    metrics.put_metric("agent.rendezvous.success", 1)
    metrics.put_metric("2nd loss-value", 0.5, "my group")  # type: ignore[arg-type] # torch says int, people give floats
    lines = {
        line for line in generate_latest(registry).decode().splitlines() if line[0] != "#" and "_created" not in line
    }
    assert lines == {
        'torchelastic_workers_run_total{role="trainer.a"} 2.0',
        'torchelastic_workers_flakiness{role="trainer.a"} 25.0',
        "torchelastic_agent_rendezvous_duration_seconds_count 2.0",
        "torchelastic_agent_rendezvous_duration_seconds_sum 2.0",
        "torchelastic_agent_rendezvous_success_total 1.0",
        "my_group_2nd_loss_value 0.5",
    }


def test_a_measured_function_is_served(registry: CollectorRegistry) -> None:
    """What `prof` tells of a function is a counter and a summary."""

    @metrics.prof(group="mine")
    def step() -> None:
        """Stand for a training step."""

    step()
    text = generate_latest(registry).decode()
    assert "step_success_total 1.0" in text
    assert "step_duration_seconds_count 1.0" in text


def test_a_value_that_does_not_fit_is_dropped(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    """A count that goes down, a text, one name for two kinds: logged once each, and the program goes on."""
    for _ in range(2):
        metrics.put_metric("a.success", -1)
        metrics.put_metric("b", "three")  # type: ignore[arg-type] # that is the point
        metrics.put_metric("c.run_x", 1)
        metrics.put_metric("c-run_x", 1)
    assert [record.args[0] for record in caplog.records if record.args] == ["a.success", "b", "c-run_x"]  # type: ignore[index] # a tuple
    assert "torchelastic_c_run_x_total 2.0" in generate_latest(registry).decode()


def test_threads_share_a_handler(registry: CollectorRegistry) -> None:
    """A metric that two threads make at the same time is one metric."""
    names = [f"m{number}.success" for number in range(50)]

    def count() -> None:
        for name in names:
            metrics.put_metric(name, 1)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert generate_latest(registry).decode().count("_success_total 8.0") == 50


def test_the_default_registry_is_prometheus_s() -> None:
    """Without a registry the metrics are where prometheus-client serves them."""
    PrometheusMetricHandler().emit(metrics.MetricData(0.0, "elastic_run_test", "value", 3))
    assert REGISTRY.get_sample_value("elastic_run_test_value") == 3
    REGISTRY.unregister(REGISTRY._names_to_collectors["elastic_run_test_value"])


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'elastic-run\[metrics\]'"):
        PrometheusMetricHandler()


def test_a_group_may_begin_with_a_digit(registry: CollectorRegistry) -> None:
    """Prometheus allows no digit in front, and takes all other names as they are."""
    metrics.put_metric("loss", 3, "2nd")
    metrics.put_metric("loss", 4, "a2")
    lines = generate_latest(registry).decode().splitlines()
    assert "_2nd_loss 3.0" in lines
    assert "a2_loss 4.0" in lines
