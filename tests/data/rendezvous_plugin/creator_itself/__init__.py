"""A package outside of elastic-run whose entry point is the creator itself, and which asks for torch's parameters."""

from __future__ import annotations

from typing import Any


def create_rendezvous_handler(params: Any) -> Any:
    """Return torch's own c10d handler, under the entry point's name."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousConnectionError,
        RendezvousParameters,
    )
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    if not isinstance(params, RendezvousParameters):
        message = f"params must be RendezvousParameters, not {type(params)}"
        raise TypeError(message)
    if params.get("refuse"):
        cause = ValueError("refuse is given")
        message = "no luck"
        raise RendezvousConnectionError(message) from cause
    backend, store = create_backend(params)
    handler = create_handler(store, backend, params)
    handler.get_backend = lambda: "creator-itself"  # type: ignore[method-assign]
    return handler
