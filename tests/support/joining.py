"""The command that a node has printed for the others, as a user copies it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.launch import Launched

_ASSIGNMENT = re.compile(r"(?:^| )ELASTIC_RUN_RDZV_TOKEN=(\S*) ")
#: The environment in which a copied command finds the launcher under test.
COPIED = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}


def wait_join_line(agent: Launched) -> str:
    """Wait for the line that tells others how to join; return the command in it."""
    return str(agent.wait_line(r"join with: (.*)$")[1])


def copied(agent: Launched) -> list[str]:
    """Return the command by which a shell runs what an agent has printed for other nodes; `COPIED` goes with it."""
    return ["bash", "-c", wait_join_line(agent)]


def token_of(line: str) -> str | None:
    """Return the token that a join line shows, or None."""
    found = _ASSIGNMENT.search(line)
    return None if found is None else found[1]
