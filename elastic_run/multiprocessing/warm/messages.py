"""Messages between agent, template and forks: small documents and descriptors, over sockets that keep boundaries.

Rules
- Both ends run the same interpreter, so `marshal` is enough: it is built in, and a template must not import a module
  that its workers would not import. The sockets are pairs that we open; nothing comes from the network.
- A message is sent whole or not at all, and never waits for room. A document that may be large (an environment) goes
  into a file without a name, and its descriptor is sent.
"""

from __future__ import annotations

import _socket
import marshal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

#: The kernel sends no more descriptors at once (SCM_MAX_FD).
MOST_DESCRIPTORS = 253
_MOST_BYTES = 1 << 16
_DESCRIPTOR_BYTES = 4
_BYTE_ORDER = sys.byteorder


def open_pair() -> tuple[_socket.socket, _socket.socket]:
    """Open two connected sockets, closed on exec: the agent's own, which doesn't block, and the other's."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    ours.setblocking(False)
    return ours, theirs


def adopt(descriptor: int) -> _socket.socket:
    """Return the socket of a descriptor that was inherited; it blocks.

    Where a module has called `socket.setdefaulttimeout`, Python has made it one that doesn't, for all who share it.
    """
    channel = _socket.socket(fileno=descriptor)
    channel.setblocking(True)
    return channel


def send(channel: _socket.socket, document: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a document of plain data, below 64 KiB, and copies of descriptors, at most `MOST_DESCRIPTORS`."""
    rights = b"".join(fd.to_bytes(_DESCRIPTOR_BYTES, _BYTE_ORDER) for fd in descriptors)
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if rights else []
    channel.sendmsg([marshal.dumps(document)], ancillary, _socket.MSG_NOSIGNAL)


def receive(channel: _socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a document and its descriptors, closed on exec, or None when the other end is gone."""
    room = _socket.CMSG_SPACE(MOST_DESCRIPTORS * _DESCRIPTOR_BYTES)
    try:
        data, ancillary, _, _ = channel.recvmsg(_MOST_BYTES, room, _socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other end was closed with something unread in it. The kernel says so once, before what it had to say.
        data, ancillary, _, _ = channel.recvmsg(_MOST_BYTES, room, _socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        int.from_bytes(rights[start : start + _DESCRIPTOR_BYTES], _BYTE_ORDER)
        for level, kind, rights in ancillary
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
        for start in range(0, len(rights), _DESCRIPTOR_BYTES)
    ]
    return (marshal.loads(data), descriptors) if data else None  # noqa: S302 - from our own process, see above
