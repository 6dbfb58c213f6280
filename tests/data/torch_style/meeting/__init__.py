"""A rendezvous backend as a package for torchrun brings it: one node, torch's names only, nothing of elastic-run's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters


class Meeting(RendezvousHandler):
    """Meets nobody: the one node is rank 0, and its store serves the workers as well.

    Args:
        parameters: What the launcher passes on.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._backend = parameters.backend
        self._run_id = parameters.run_id
        self._host = parameters.endpoint
        self._is_closed = False

    def get_backend(self) -> str:
        """Return the name under which it was asked for."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Return that this store is there for the workers: rank 0 serves none."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Form a round of one node."""
        if self._is_closed:
            raise RendezvousClosedError
        store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._host, store.port))

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._is_closed

    def set_closed(self) -> None:
        """Say that the job is over."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait: none ever."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go of everything."""
        self._is_closed = True
        return True


def get_handler() -> type[Meeting]:
    """Return what makes a handler from parameters, as the group torchrun.handlers wants it."""
    return Meeting
