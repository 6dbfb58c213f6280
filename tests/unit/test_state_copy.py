"""Which nodes keep a copy of the job's state, for the log in another store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.core.job.config import JobConfig
from elastic_run.core.job.snapshot import identify, make_state, write_state
from elastic_run.core.job.state import LIVE, Job, Seat
from elastic_run.core.protocol import job_keys
from elastic_run.rendezvous.elastic.state_copy import StateCopy
from elastic_run.store.jobstore.memory import MemoryJobStore


@pytest.mark.parametrize(
    ("nodes", "is_successor", "is_kept"), [(64, False, True), (65, False, False), (65, True, True)]
)
def test_in_a_large_job_only_nodes_that_may_serve_the_store_keep_a_copy(
    nodes: int, *, is_successor: bool, is_kept: bool
) -> None:
    """Otherwise each node would read the state of the whole job for each decision."""
    job = Job(1, 4, round=1, round_id="1/1/a", incarnation="a.1", seats=(Seat("a", LIVE),), config=JobConfig(1, 99))
    state = write_state(make_state(job, 0.0, position=0, oldest=0, formations=()))
    place = SimpleNamespace(group_world_size=nodes)
    member: Any = SimpleNamespace(
        log=SimpleNamespace(state_slot=4, state_term=1),
        job=SimpleNamespace(has_view=True),
        round=SimpleNamespace(place=place),
    )
    backend: Any = SimpleNamespace(successors=[("b", 1)], is_successor=is_successor)
    copy, left, next_store = StateCopy(backend), MemoryJobStore(), MemoryJobStore()
    left.write({job_keys.state_key(4, 1): state})
    copy.keep(left, member)
    assert copy.offer(next_store) == (identify(state) if is_kept else None)
    assert next_store.get([job_keys.copy_key(identify(state))]) == [state if is_kept else None]
