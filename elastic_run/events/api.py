"""What an event is: torch's classes and their JSON, which log processors read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]

EventMetadataValue = str | int | float | bool | None


class EventSource(str, Enum):
    """Who reports an event."""

    AGENT = "AGENT"
    WORKER = "WORKER"


class NodeState(str, Enum):
    """State of a node in a rendezvous."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


@dataclass
class Event:
    """Something that happened in a job.

    Args:
        name: What happened.
        source: Who reports it.
        timestamp: When, in milliseconds since the epoch.
        metadata: Anything else.
    """

    name: str
    source: EventSource
    timestamp: int = 0
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | Event) -> Event:
        """Read an event from its JSON; an event is returned as it is.

        Raises:
            TypeError: It is neither.
        """
        if isinstance(data, Event):
            return data
        fields = _fields(data, "an event")
        fields["source"] = EventSource[fields["source"]]
        return Event(**fields)

    def serialize(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class RdzvEvent:
    """Something that happened in a rendezvous.

    Args:
        name: What happened: the file and the step.
        run_id: Id of the job.
        message: The same for a reader.
        hostname: Name of the node.
        pid: Process id of its agent.
        node_state: State of the node.
        master_endpoint: Endpoint of the store, if known.
        rank: Rank of the node, if known.
        local_id: Number of the handler within its process, if known.
        error_trace: Traceback of a failure.
    """

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""

    def __str__(self) -> str:
        return self.serialize()

    @staticmethod
    def deserialize(data: str | RdzvEvent) -> RdzvEvent:
        """Read an event from its JSON; an event is returned as it is.

        Raises:
            TypeError: It is neither.
        """
        if isinstance(data, RdzvEvent):
            return data
        fields = _fields(data, "a rendezvous event")
        fields["node_state"] = NodeState[fields["node_state"]]
        return RdzvEvent(**fields)

    def serialize(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps(asdict(self))


# `object`: the annotations of the callers are promises of theirs, and JSON from elsewhere may be anything.
def _fields(data: object, what: str) -> dict[str, Any]:
    fields = json.loads(data) if isinstance(data, str) else None
    if not isinstance(fields, dict):
        message = f"not {what} nor the JSON of one: {data!r}"
        raise TypeError(message)
    return fields
