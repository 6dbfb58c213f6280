"""Warm workers (`--preload`): limits that the template or its messages come up against, and odd surroundings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.launch import ELASTIC_RUN
from tests.support.warm import SAYS_HOW

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched
    from tests.support.warm import Module

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]


def test_a_low_limit_of_descriptors_makes_nobody_cold(launch: Launch, worker: Worker, module: Module) -> None:
    """A template that may open 64 files forks 100 workers, in parts, and each of them has that limit."""
    path = worker("import resource\n" + SAYS_HOW + "say('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    program = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *ELASTIC_RUN)
    job = launch("--nproc-per-node=100", "--preload=heavy", path, env=module(), program=program)
    assert job.wait_exit(deadline=60) == 0
    assert [job.stdout.count(word) for word in ("warm", "cold", "limit 64")] == [100, 0, 100], job.stderr


def test_a_default_timeout_of_sockets_is_the_modules_own(launch: Launch, worker: Worker, module: Module) -> None:
    """A module that sets one at import is preloaded, round after round; workers have its timeout."""
    path = worker(SAYS_HOW + "import socket\nsay(socket.getdefaulttimeout())\nsys.exit(attempt == 0)")
    env = module("import socket\nsocket.setdefaulttimeout(0.01)")
    job = launch("--max-restarts=1", "--preload=heavy", path, env=env)
    assert job.wait_exit() == 0
    assert (job.stdout, "--preload" in job.stderr) == ("warm 0 0\n0.01\nwarm 0 1\n0.01\n", False)
