"""Lets a worker write the dump of its flight recorder when the agent asks, and when it ends. Runs in the worker.

Rules
- A line of the .pth file calls `begin` at Python's own start, where --flight-recorder has set the variable. Until the
  worker imports torch.distributed nothing else happens: no thread, no import.
- Then a thread waits on a socket. The main thread is usually in a collective, where no signal handler of Python runs;
  it has given up the GIL there, which the stacks in a dump take. torch's own worker server needs no GIL, but its dump
  of a gloo group has neither stacks nor the ranks of subgroups. NCCL's named pipe is looked at once a second, and gloo
  has none.
- A worker that ends by an exception, or by itself, writes its dump on the way out: its peers may wait for it.
- Only this process does so: the variable is taken out of the environment, and a fork closes the socket.
"""

from __future__ import annotations

import os
import sys

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_TRIGGER = "torch.distributed.distributed_c10d"


def begin() -> None:
    """Wait for the import of torch.distributed; called by the .pth file."""
    name = os.environ.pop(contract.ENV_FLIGHT_RECORDER)
    if _TRIGGER in sys.modules:
        _serve(name)  # in the fork of a template that has imported torch
    else:
        sys.meta_path.insert(0, _ImportWatch(name))


def _serve(name: str) -> None:
    from elastic_run.diagnosis.recorder_server import serve

    serve(name)


class _ImportWatch:
    """A finder that answers for one module, once, and lets it be loaded as always."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's own spec of the module, with a call behind its execution; None for all other modules."""
        if fullname != _TRIGGER:
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute, name = loader.exec_module, self._name

        def execute_and_serve(module: ModuleType) -> None:
            execute(module)
            _serve(name)

        loader.exec_module = execute_and_serve  # type: ignore[method-assign]
        return spec
