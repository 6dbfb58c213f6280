"""Warm workers (`--preload`): modules that end the template, and limits that it or its messages come up against."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.test_preload import module, wait_template
from tests.support.launch import ELASTIC_RUN

if TYPE_CHECKING:
    from tests.integration.test_preload import Launch, Module, Worker

__all__ = ["module"]  # a fixture

_SAYS_HOW = "say('warm' if 'heavy' in sys.modules else 'cold')\n"


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("import os\nos._exit(3)", "ended with exit code 3"),
        ("import os\nos._exit(0)", "ended with exit code 0"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os\nos.abort()", "was killed by SIGABRT"),
    ],
)
def test_a_module_that_ends_the_template_is_named_once(
    body: str, how: str, launch: Launch, worker: Worker, module: Module
) -> None:
    """One line says which module was being imported and how that ended, and workers start cold, also in round two."""
    path = worker(_SAYS_HOW + "sys.exit(attempt == 0)")
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--preload=json,heavy", path, env=module(body))
    assert job.wait_exit() == 0
    assert [line for line in job.stderr.splitlines() if "--preload" in line] == [
        f"elastic-run: --preload: heavy was being imported when the template {how}: workers start cold"
    ]
    assert "warm" not in job.stdout


def test_a_template_that_is_killed_from_outside_tells_where_it_was(
    launch: Launch, worker: Worker, module: Module
) -> None:
    """Who runs out of memory in an import learns of which module, and that there will be another template."""
    env = module("import os\nprint('imports')\nopen(os.environ['GATE']).read()")
    job = launch("--preload=heavy", worker(_SAYS_HOW), env=env)
    job.wait_line("imports")
    os.kill(wait_template(job.pid), signal.SIGKILL)
    assert job.wait_exit() == 0
    assert job.stdout == "cold\n"
    assert (
        "--preload: the workers' template was killed by SIGKILL: they start cold where they start before there is "
        "another (it was importing heavy)"
    ) in job.stderr


def test_a_low_limit_of_descriptors_makes_nobody_cold(launch: Launch, worker: Worker, module: Module) -> None:
    """A template that may open 64 files forks 100 workers, in parts, and each of them has that limit."""
    path = worker("import resource\n" + _SAYS_HOW + "say(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    program = ("sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *ELASTIC_RUN)
    job = launch("--nproc-per-node=100", "--preload=heavy", path, env=module(), program=program)
    assert job.wait_exit(deadline=60) == 0
    assert [job.stdout.count(word) for word in ("warm", "cold", "64")] == [100, 0, 100], job.stderr


def test_a_list_that_no_message_holds_is_refused(launch: Launch, worker: Worker) -> None:
    """More modules than anybody has are bad input: exit code 2, and nothing is started."""
    job = launch(f"--preload={','.join(['json'] * 14_000)}", worker("say('runs')"))
    assert job.wait_exit() == 2
    assert job.stdout == ""
    assert job.stderr.endswith("' is longer than 16384 bytes\n")


def test_a_default_timeout_of_sockets_is_the_modules_own(launch: Launch, worker: Worker, module: Module) -> None:
    """A module that sets one at import is preloaded, round after round; workers have its timeout."""
    path = worker(_SAYS_HOW + "import socket\nsay(socket.getdefaulttimeout())\nsys.exit(attempt == 0)")
    env = module("import socket\nsocket.setdefaulttimeout(0.01)")
    job = launch("--max-restarts=1", "--preload=heavy", path, env=env)
    assert job.wait_exit() == 0
    assert (job.stdout, "--preload" in job.stderr) == ("warm\n0.01\n" * 2, False)


def test_another_name_of_the_interpreter_is_warm(launch: Launch, worker: Worker, module: Module) -> None:
    """PYTHON_EXEC may name the same Python by a link beside it, and workers have the name that it gives."""
    own = Path(sys.executable)
    path = next(each for each in own.parent.glob("python*") if each != own and each.resolve() == own.resolve())
    script = worker(_SAYS_HOW + "say(sys.executable)")
    job = launch("--preload=heavy", script, env=module() | {"PYTHON_EXEC": str(path)})
    assert job.wait_exit() == 0
    assert job.stdout == f"warm\n{path}\n"
