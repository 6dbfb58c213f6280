"""What the command and the hosts of --hosts say to each other through an ssh connection.

- Each message is a JSON object in a line. A host reads the command's messages from its stdin. The first one is an
  order, which says what to run. `start` with the endpoints and `signal` follow. An empty object is a sign of life.
- The host's messages stand in its stdout and stderr, among all that login shells and workers write there. So each
  begins with a control character and a random mark, which only the order names.
"""

from __future__ import annotations

import json

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

#: A host refuses an order of another version: the two may have different releases.
VERSION = 1
#: Seconds between two signs of life of the command, and the silence after which a host ends its part of the job. The
#: time is long, since a suspended command (Ctrl-Z) is silent too.
BEAT, LONGEST_SILENCE = 10.0, 60.0
#: How many hosts may coordinate the job, one after the other: the first ones of the list.
MOST_ENDPOINTS = 5
#: ASCII's record separator.
_BEGIN = b"\x1e"


@dataclass(frozen=True, slots=True)
class Host:
    """One host of --hosts."""

    target: str  # What ssh is given
    name: str  # The same without the user
    slots: int | None = None  # The number of workers there, if it was given


@dataclass(frozen=True, slots=True)
class HostsJob:
    """A job on several hosts, as the command line asks for it."""

    names: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]  # The words of each host's ssh
    words: tuple[tuple[str, ...], ...]  # The command line of each host's launcher
    order: Mapping[str, Any]  # What all hosts are told: the directory, variables, the token
    least: int  # With fewer hosts the job can't go on
    has_own_place: bool  # Whether the hosts meet at ports of their own, since the user named no place
    stop_time: float  # Seconds that a launcher may take to stop its workers, and to end


def write_message(**fields: Any) -> bytes:
    """Return a message of the command."""
    return json.dumps(fields).encode() + b"\n"


def write_marked(mark: str, **fields: Any) -> bytes:
    """Return a message of a host."""
    return _BEGIN + mark.encode() + write_message(**fields)


class MarkedMessages:
    """Cuts the messages of a host out of a stream."""

    def __init__(self, mark: str) -> None:
        self._begin = _BEGIN + mark.encode()
        self._rest = b""

    def cut(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the bytes without messages, and the messages; what may be a part of one waits for the next bytes."""
        found = []
        shown, *pieces = (self._rest + data).split(self._begin)
        self._rest = b""
        for piece in pieces:
            line, end, after = piece.partition(b"\n")
            shown += after
            if end:
                found.append(json.loads(line))
            else:
                self._rest = self._begin + line
        start = shown.rfind(_BEGIN)
        if start >= 0 and not self._rest and self._begin.startswith(shown[start:]):
            shown, self._rest = shown[:start], shown[start:]
        return shown, found
