"""Metrics and events of a program's own: a handler for each group, a measured function, an event log.

    python examples/metrics.py

The launcher's own metrics go the same way: give `configure` the group "torchelastic" in the program that launches.
"""

from elastic_run import events, metrics


class Totals(metrics.MetricHandler):
    """Adds up what comes."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}

    def emit(self, metric_data: metrics.MetricData) -> None:
        """Add one value."""
        self.totals[metric_data.name] = self.totals.get(metric_data.name, 0) + metric_data.value


@metrics.prof(group="training")
def step(size: int) -> int:
    """Stand for a training step; `prof` counts how it ends and measures how long it takes."""
    return size * 2


totals = Totals()
metrics.configure(metrics.ConsoleMetricHandler())  # whatever has no handler of its own is printed
metrics.configure(totals, group="training")
for size in (1, 2, 3):
    metrics.put_metric("samples", step(size), "training")
metrics.put_metric("epochs", 1, "other")
print(f"{totals.totals['samples']} samples in {totals.totals['__main__.step.success']} steps")

saved = events.Event("checkpoint saved", events.EventSource.WORKER, metadata={"step": 3, "loss": 0.25})
events.record(saved, "console")  # one line of JSON on stderr; "null" drops it
