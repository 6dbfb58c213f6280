"""A node's answer to `elastic-run status`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elastic_run.agent.worker_status import Sample, describe_node

if TYPE_CHECKING:
    from elastic_run.agent.agent_view import AgentView


@pytest.mark.parametrize(("number", "uptime"), [(1, 4.0), (2, None)])
def test_a_round_that_has_not_begun_has_no_time(number: int, uptime: float | None) -> None:
    """While the next round is waited for, the workers and their time are those of the last one."""
    spec = SimpleNamespace(entrypoint="train.py", args=())
    group = SimpleNamespace(group_rank=0, group_world_size=2, spec=spec, workers=[])
    context = SimpleNamespace(
        hostname="a",
        group=group,
        options=SimpleNamespace(job_config=SimpleNamespace(max_restarts=1)),
        run_id="job",
        log_directory="",
    )
    view = SimpleNamespace(
        find_agent=lambda: SimpleNamespace(state="joining", round=number, restart_count=0),
        find_round=lambda: SimpleNamespace(number=1, started=2.0),
        context=context,
        started=1.0,
        job=None,
    )
    sample = Sample(6.0, {})
    document = describe_node(cast("AgentView", view), sample, sample, {})
    assert (document["round"], document["round_uptime"]) == (number, uptime)
