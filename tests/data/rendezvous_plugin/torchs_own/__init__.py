"""A package outside of elastic-run that brings torch's own c10d rendezvous, with nothing of ours in it."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler


class TorchsOwn:
    """torch's handler under another name.

    Args:
        params: What the launcher passes on.
    """

    def __init__(self, params: Any) -> None:
        backend, store = create_backend(params)
        self._handler: DynamicRendezvousHandler = create_handler(store, backend, params)

    def get_backend(self) -> str:
        """Return the entry point's name."""
        return "torchs-own"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


def get_handler() -> type[TorchsOwn]:
    """Return the creator, as the entry-point group asks for."""
    return TorchsOwn
