"""Lets a tracer that has wrapped `subprocess.Popen`, such as viztracer, change the commands of workers.

Such a tracer follows child processes: it replaces `subprocess.Popen.__init__` by a function that puts the tracer in
front of the command, and calls the original. Workers are not started by Popen, so it would not see them. Here Popen
gets the command all the same, in a subclass that keeps what the tracer has made of it, and starts no process.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

#: Place of the variables in the arguments of `Popen._execute_child` behind the command and the executable.
_ENVIRONMENT = 4


def apply_tracer(argv: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return a command and its whole environment as a tracer has changed them; without a tracer, as they were."""
    subprocess: Any = sys.modules.get("subprocess")
    if subprocess is None or not _is_wrapped(subprocess):
        return argv, env
    found: list[tuple[Sequence[str], Mapping[str, str]]] = []

    class Kept(subprocess.Popen):  # type: ignore[misc]  # the class is known at run time only
        def _execute_child(self, args: Any, _executable: object, *rest: Any) -> None:
            # Every Python since 3.3 calls it by position; gevent replaces it as well.
            self.pid = 0
            found.append((args if isinstance(args, (list, tuple)) else [args], rest[_ENVIRONMENT]))

    Kept(list(argv), env=dict(env))
    return found[-1] if found else (argv, env)


def _is_wrapped(subprocess: Any) -> bool:
    """Whether Popen is not the standard class; a wrapper's other attributes may all be copies of the original's."""
    popen = subprocess.Popen
    if not isinstance(popen, type):
        return False
    begin: Any = popen.__init__  # type: ignore[misc]
    return type(begin) is not type(_is_wrapped) or begin.__globals__ is not vars(subprocess)
