"""`--explain` tells what then happens: the same command, environment and nodes as those of the start."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from tests.support.sessions import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

#: What a start adds to a worker that belongs to this one start: files and a token.
OF_ONE_START = {"TORCHELASTIC_ERROR_FILE", "ELASTIC_RUN_TOKEN", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
REPORT = "import json; say(json.dumps([dict(os.environ), sys.orig_argv]))"


def explained_environment(text: str, local_rank: int) -> dict[str, str]:
    """Return the variables of one worker, as an explanation shows them."""
    part = text.partition("Variables of the workers, in addition to those of this process:\n")[2]
    pairs = dict(word.split("=", 1) for word in part.split() if "=" in word)
    return {name: str(local_rank) if re.fullmatch(r"0\.\.\d+", value) else value for name, value in pairs.items()}


@pytest.mark.parametrize(
    "flags",
    [
        ["--nproc-per-node=2", "--max-restarts=3", "--role=trainer", "--signals-to-handle=SIGTERM"],
        ["--nproc-per-node=2", "--virtual-local-rank", "--scale-up-signal=SIGUSR1", "--worker-store=rank0"],
        ["--nnodes=1", "--rdzv-id=mine", "--master-addr=localhost", "--master-port={port}"],
    ],
    ids=lambda flags: flags[-1],
)
def test_workers_get_the_environment_and_the_command_that_were_explained(
    flags: list[str], launch: Launch, worker: Worker
) -> None:
    """Each variable that a start adds was shown, with its value; the command is the one that was shown."""
    port = free_port()
    words = [*(flag.format(port=port) for flag in flags), worker(REPORT), "--lr=1", "a b"]
    explained = launch("--explain", *words)
    assert explained.wait_exit() == 0
    job = launch(*words)
    assert job.wait_exit() == 0, job.stderr
    seen = [json.loads(line) for line in job.stdout.splitlines()]
    outer = {*launch_environment(launch), "OMP_NUM_THREADS", "_"}
    assert seen
    for environment, command in seen:
        added = {name: value for name, value in environment.items() if name not in outer}
        shown = explained_environment(explained.stdout, int(environment["RANK"]))
        assert {name: shown.get(name) for name in added if name not in OF_ONE_START} == {
            name: value for name, value in added.items() if name not in OF_ONE_START
        }
        assert f"Command      {shlex.join(command)}\n" in explained.stdout


def launch_environment(launch: Launch) -> set[str]:
    """Return the names of the variables that a launcher has in these tests."""
    found = launch("-c", "import json, os; print(json.dumps(list(os.environ)))", program=["python3"])
    assert found.wait_exit() == 0
    return set(json.loads(found.stdout))
