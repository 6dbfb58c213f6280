"""Jobs that last for months: what they leave in memory does not grow with rounds and nodes."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

#: A launcher that says how many blocks of memory it has when it begins its 150th round, and each 100 rounds later.
_COUNTING = """
import gc, os, runpy, sys
from elastic_run.agent.driver.round import Round
begin = Round.__init__
def count(self, *arguments, **options):
    if options["number"] % 100 == 50 and options["number"] > 100:
        gc.collect()
        os.write(1, b"blocks %d\\n" % sys.getallocatedblocks())
    begin(self, *arguments, **options)
Round.__init__ = count
sys.argv = ["elastic_run", *sys.argv[1:]]
runpy.run_module("elastic_run", run_name="__main__")
"""


@pytest.mark.long
def test_restarts_leave_nothing_in_memory(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """In some 100 restarts of 900 the launcher gets no more objects, and it still counts them all.

    What is imported or waited for once, at some time of the job, may fall into the others; so do the timers of the
    rounds of the last second, whose number grows until the job is a second old.
    """
    path = tmp_path / "worker.sh"
    path.write_text("exit $((TORCHELASTIC_RESTART_COUNT % 2 + 1))\n")
    flags = ("--standalone", "--max-restarts=1051", "--max-backoff=0", "--no-python", "sh", path)
    job = launch(*flags, program=(sys.executable, "-c", _COUNTING))
    assert job.wait_exit(deadline=200) in {1, 2}
    blocks = [int(line.split()[1]) for line in job.stdout.splitlines()]
    assert len(blocks) == 10
    assert min(after - before for before, after in pairwise(blocks)) < 200, blocks  # it was 800
    assert "restart 1051 of 1051" in job.stderr
    assert "(1051 attempts in all)" in job.stderr
