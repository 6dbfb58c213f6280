"""The state that all rounds of an agent share: what it tells the system, the guardian and the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_run.agent import WorkerGroup, WorkerSpec
from elastic_run.agent.context import AgentContext, AgentOptions
from elastic_run.contract import ENV_HEARTBEAT_FILE
from elastic_run.core.config import AgentConfig, JobConfig
from elastic_run.multiprocessing import process_table
from elastic_run.multiprocessing.logs import LogsDest
from elastic_run.rendezvous.registry import LocalRendezvousHandler


def make_context(logs_specs: object = None, **options: Any) -> Any:
    """Make the context of an agent of two workers."""
    handler = LocalRendezvousHandler("job", local_addr="127.0.0.1")
    spec = WorkerSpec(role="trainer", local_world_size=2, rdzv_handler=handler, entrypoint="train")
    specs: Any = logs_specs
    return AgentContext(WorkerGroup(spec), specs, AgentOptions(JobConfig(), **options))


@pytest.mark.parametrize(
    ("fields", "removed"), [({"is_temporary": True}, ["/logs"]), ({"is_temporary": False}, []), ({}, [])]
)
def test_the_guardian_removes_a_temporary_log_directory_only(fields: dict[str, bool], removed: list[str]) -> None:
    """It is told once; a plug-in's class, which may not say whether its directory is temporary, keeps its files."""
    context = make_context(SimpleNamespace(run_log_dir="/logs", **fields))
    told: list[str] = []
    context.guardian = SimpleNamespace(remove_at_end=told.append)
    context.announce_log_directory()
    context.announce_log_directory()
    assert told == removed
    assert context.log_directory == ("" if removed else "/logs")


@pytest.mark.parametrize(
    ("fields", "made"), [({"is_temporary": True}, []), ({"is_temporary": False}, ["job"]), ({}, ["job"])]
)
def test_a_log_directory_is_made_for_what_the_end_leaves(fields: dict[str, bool], made: list[str]) -> None:
    """For the failure.json of a job that ends before its first worker; a temporary directory is not made for it."""
    found: list[str] = []
    context = make_context(SimpleNamespace(make_run_log_dir=found.append, run_log_dir="/logs", **fields))
    assert context.make_log_directory() == ("/logs" if made else "")
    assert found == made


@pytest.mark.parametrize("adopts_orphans", [True, False])
def test_orphans_come_to_a_process_that_has_no_others(
    adopts_orphans: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processes keep their place among the processes; the kernel is asked once."""
    asked: list[bool] = []

    def become(*, is_on: bool) -> bool:
        asked.append(is_on)
        return True

    monkeypatch.setattr(process_table, "set_subreaper", become)
    context = make_context(adopts_orphans=adopts_orphans)
    assert context.adopt_orphans() is adopts_orphans
    assert context.adopt_orphans() is adopts_orphans
    assert asked == [True] * adopts_orphans


@pytest.mark.parametrize(
    ("config", "heartbeats", "is_on"),
    [
        (AgentConfig(), {}, False),
        (AgentConfig(flight_recorder=True), {}, True),
        (AgentConfig(hang_timeout=60.0), {1: "/logs/0/1/heartbeat"}, True),
    ],
)
def test_workers_get_what_the_flags_need(config: AgentConfig, heartbeats: dict[int, str], *, is_on: bool) -> None:
    """Both flags switch the flight recorder on; each worker that has a directory gets a file for its heartbeats."""
    context = make_context(agent_config=config)
    switched: list[object] = []
    context.flight_recorder = SimpleNamespace(switch_on=lambda envs, *_: switched.append(envs))
    envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
    context.switch_on_recorders(
        envs, LogsDest(error_files={0: "", 1: "/logs/0/1/error.json", 2: "/logs/0/2/error.json"})
    )
    assert context.heartbeats == heartbeats
    assert envs == {0: {}, 1: {ENV_HEARTBEAT_FILE: heartbeats[1]} if heartbeats else {}}
    assert switched == [envs] * is_on
