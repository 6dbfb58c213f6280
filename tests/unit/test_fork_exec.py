"""What the start of a process changes for a moment in the launcher itself; starts no process."""

from __future__ import annotations

import os
import resource

import pytest

from elastic_run.multiprocessing.process.fork_exec import start_process


@pytest.mark.parametrize("fails", [False, True])
def test_the_launcher_keeps_its_limits(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """A worker begins with its own limit of descriptors and its own CPUs; the launcher keeps its former ones."""
    limits, cpus = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    lowered, chosen = limits[0] - 1, {min(cpus)}
    seen = []

    def start(*_: object, **__: object) -> int:
        seen.append((resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.sched_getaffinity(0)))
        if fails:
            raise FileNotFoundError
        return 70

    monkeypatch.setattr(os, "posix_spawnp", start)
    try:
        assert start_process(["true"], {}, affinity=frozenset(chosen), descriptor_limit=lowered) == 70
    except FileNotFoundError:
        assert fails
    assert seen == [(lowered, chosen)]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    assert os.sched_getaffinity(0) == cpus
