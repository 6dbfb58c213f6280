"""The word of a host that goes: the store it serves goes with it, and the job goes on at the next endpoint, or nowhere.

It is an entry among the facts that only the coordinator's driver reads: what the core makes of it is a `Move`.
"""

from __future__ import annotations

import json

from elastic_run.core.messages import PROTOCOL

__all__ = ["decode_moving", "encode_moving"]

_KIND = "moving"


def encode_moving(endpoint: str, detail: str) -> bytes:
    """Return the entry.

    Args:
        endpoint: Where the store goes on, empty for nowhere.
        detail: One sentence for the user.
    """
    document = {"protocol": PROTOCOL, "kind": _KIND, "endpoint": endpoint, "detail": detail}
    return json.dumps(document, sort_keys=True).encode()


def decode_moving(entry: bytes) -> tuple[str, str] | None:
    """Return endpoint and detail if an entry is one of these, else None.

    Args:
        entry: Any entry among the facts.
    """
    if b'"moving"' not in entry:
        return None
    try:
        found = json.loads(entry)
    except ValueError:
        return None
    if not isinstance(found, dict) or (found.get("protocol"), found.get("kind")) != (PROTOCOL, _KIND):
        return None
    endpoint, detail = found.get("endpoint"), found.get("detail")
    return (endpoint, detail) if isinstance(endpoint, str) and isinstance(detail, str) else None
