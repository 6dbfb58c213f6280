"""Values of a program that are refused before anything is started, as those of a command line are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastic_run.agent.api import WorkerSpec
from elastic_run.launcher import LaunchConfig, elastic_launch


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nproc_per_node": 10**400}, "^nproc_per_node is above the limit of 65536 workers on a node$"),
        ({"role": "\xe9" * 3000}, "^role: .* has 6000 bytes, and 4096 are allowed$"),
        ({"run_id": "x" * 5000}, "^run_id: .* has 5000 bytes, and 4096 are allowed$"),
        ({"run_id": "\udcff"}, r"^run_id: '\\udcff' is not UTF-8$"),
        ({"max_restarts": -1}, "^max_restarts: '-1' is not a whole number from 0 up$"),
    ],
)
def test_a_value_that_can_not_be_meant_is_refused(values: dict[str, Any], said: str) -> None:
    """Such a name was too long for the nodes' messages, and so many workers were counted for minutes."""
    with pytest.raises(ValueError, match=said):
        LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, **values})


def test_no_number_is_no_interval() -> None:
    """As torch refuses an interval of 0."""
    with pytest.raises(AssertionError, match="monitor_interval must be above 0, got nan"):
        WorkerSpec("worker", 1, None, entrypoint="true", monitor_interval=math.nan)  # type: ignore[arg-type]


def test_no_name_and_no_endpoint_are_empty() -> None:
    """A program may pass on flags that its user has left out; torch runs such a job."""
    left_out: Any = None
    config = LaunchConfig(1, 1, 1, rdzv_backend="local", run_id=left_out, rdzv_endpoint=left_out)
    assert (config.run_id, config.rdzv_endpoint) == ("", "")
    assert elastic_launch(config, "true")() == {0: None}
