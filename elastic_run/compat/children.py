"""Children that multiprocessing starts under `compat.install`: torch's paths mean ours there, too.

A fork has what its parent has. A process of spawn or forkserver begins with what `multiprocessing.spawn` prepares for
it: a dictionary, whose unpickling is the first thing that happens in the child, before it imports the program's main
file. An object in that dictionary installs the aliases when it is unpickled. The child's own children get it in turn.

Nothing of this touches a program without `install`, nor other Python children: for these there is ELASTIC_RUN_COMPAT=1.
"""

from __future__ import annotations

import os
from multiprocessing import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_KEY = "elastic-run compat"
#: Runs in the child, whose `sys.path` is not the program's yet.
_ARRIVAL = """
import sys
sys.path.append({directory!r})
try:
    from elastic_run import compat
    compat.install()
finally:
    sys.path.remove({directory!r})
"""


class Arrival:
    """Installs the aliases in the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return exec, (_ARRIVAL.format(directory=os.path.dirname(package)),)


class ChildrenHook:
    """Puts the object into what multiprocessing prepares for each child, from its making until `undo`."""

    def __init__(self) -> None:
        self._original = spawn.get_preparation_data
        self._is_active = True
        spawn.get_preparation_data = self._prepare

    def _prepare(self, name: str) -> dict[str, Any]:
        data = self._original(name)
        # First, so that it is unpickled first.
        return {_KEY: Arrival(), **data} if self._is_active else data

    def undo(self) -> None:
        """Take it out again; another program's function that was put over this one meanwhile stays."""
        self._is_active = False
        if spawn.get_preparation_data == self._prepare:
            spawn.get_preparation_data = self._original
