"""A package outside of elastic-run that brings a rendezvous backend, as its author would write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastic_run.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

if TYPE_CHECKING:
    from elastic_run.rendezvous import RendezvousHandlerCreator, RendezvousParameters


class MeetingPlace(RendezvousHandler):
    """Meets nobody, at the endpoint.

    Args:
        params: What the launcher passes on.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self.params = params

    def get_backend(self) -> str:
        """Return the entry point's name."""
        return "meeting-place"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return rank 0 of 1, with the store at the endpoint's host and the port of the settings."""
        info = RendezvousStoreInfo(self.params.endpoint, self.params.get_as_int("port") or 0)
        store: Any = None  # the only node of a round asks for nothing
        return RendezvousInfo(store, rank=0, world_size=1, bootstrap_store_info=info)

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self.params.run_id

    def shutdown(self) -> bool:
        """Return True."""
        return True


def get_handler() -> RendezvousHandlerCreator:
    """Return the creator, as the entry-point group asks for."""
    return MeetingPlace
