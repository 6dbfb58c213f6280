"""The wire format of torch's TCPStore: operations, framing, limits, errors.

Captured on the wire between torch 2.13's own client and server; `tests/compat` holds it against other releases.

- Little-endian throughout. A message is one byte of operation and its fields; nothing marks its end. A string is its
  length (u64) and its bytes; a list is a count (u64) and that many strings, or pairs of strings. Keys carry the prefix
  `/`, which the server takes as a part of the key.
- A client opens with VALIDATE and a magic number, and in the same segment PING and a nonce (its pid), which the server
  returns. Whoever opens with anything else speaks another protocol. A client that is told a world size then counts up
  `init/` (without the prefix); a clone doesn't.
- SET, MULTI_SET, APPEND and QUEUE_PUSH have no reply, so a client never learns that one was refused: its next
  operation finds the connection closed. GET of a missing key answers "": clients send WAIT first.
- WAIT and BARRIER answer 0 once they are over. CANCEL_WAIT answers 1; when it crossed with the end of the wait the
  client reads 0, then 1. CHECK and WAIT count a queue that isn't empty as a key, NUM_KEYS, LIST_KEYS and DELETE don't.
- COMPARE_SET answers with the value now. A missing key is set where "" is expected; where anything else is expected it
  stays missing, and the answer is the expected value: torch's client can't tell that from success.
- ADD reads the value as C's `strtoll`, counts modulo 2**64, and stores decimal text. Text that is no number, an
  unknown operation and a string over the limit each close the connection, as torch's server does.
- BARRIER counts the callers of a key like ADD and lets them go at the world size; PrefixStore doesn't use it. Torch's
  older backend knows no queues. Torch 2.4 has the operations up to CANCEL_WAIT, and opens without PING.
"""

from __future__ import annotations

import sys
from struct import Struct

from elastic_run.store.errors import UNKNOWN, WireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# --- what a store takes from outside at most -------------------------------------------------------------------------
# Torch's own bounds come first: a client that meets one would meet it at torch's server too. The others are ours, for
# the sums that torch leaves unbounded. A job of torch never meets them: the largest content known is that of Gloo
# groups, in which each of N workers leaves about 8 bytes for each other one (136 with torch 2.6 and before). That grows
# with the hosts, so the bound does as well. A stranger mostly has one address. The protocol knows no refusal, so a
# client that passes a bound loses its connection, and the owner says which bound.
_KIB = 1024
_MIB = 1024 * _KIB

#: Bytes of a key with its prefix, and of a value.
KEY_LIMIT = 8 * _KIB
VALUE_LIMIT = 8 * _MIB
#: Strings of one list. A list of pairs may hold twice as many strings.
COUNT_LIMIT = 128 * _KIB

#: Bytes of one message that comes in, and of one answer that our own client takes.
MESSAGE_LIMIT = 256 * _MIB
#: Bytes for the content of a server, for one reply, and for what all its connections hold, each; and what each further
#: client's address adds: Gloo's full mesh of 16,384 workers on 2,048 hosts takes 2 GB of 8.4, and one of 4,096 workers
#: with torch 2.6 takes 2.3 GB of 2.4.
STORE_LIMIT = 256 * _MIB
HOST_LIMIT = 4 * _MIB
#: Hosts that count (all loopback addresses are one): an IPv6 network has more addresses than a server has memory.
COUNTED_HOSTS = 4096
#: Descriptors that clients leave to the rest of the process, which needs some for each worker that it starts. Below
#: `FEW_DESCRIPTORS` none is kept, since a job may need each of them.
RESERVED_DESCRIPTORS = 64
FEW_DESCRIPTORS = 1024
#: No bound, for a store that is no server's.
UNBOUNDED = sys.maxsize

# What small things cost beside their bytes, as CPython 3.11 measures them.
#: A key with its value, and a value of a queue.
ENTRY_COST = 200
#: A queue.
QUEUE_COST = 1000
#: A key that a client waits for, with its place among those who wait for it.
WAIT_COST = 528
#: A piece of a message or of a reply.
PIECE_COST = 64
#: A string of a message that is not finished, beside its bytes and its length.
FIELD_COST = 48


def measure(hosts: int) -> int:
    """Return a server's bound in bytes, for clients from so many hosts."""
    return STORE_LIMIT + HOST_LIMIT * min(hosts, COUNTED_HOSTS)


# --- operations ------------------------------------------------------------------------------------------------------
MAGIC = 0x3C85F7CE

VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, NUM_KEYS, DELETE, APPEND, MULTI_GET, MULTI_SET, CANCEL_WAIT, PING = (
    range(14)
)
QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS, BARRIER = range(14, 19)
#: Replies of CHECK, and of WAIT, BARRIER and CANCEL_WAIT.
READY, NOT_READY = b"\0", b"\1"
WAIT_OVER, WAIT_CANCELLED = b"\0", b"\1"

U32 = Struct("<I")
U64 = Struct("<Q")
I64 = Struct("<q")

_U32_SIZE = U32.size
_U64_SIZE = U64.size
_unpack_length = U64.unpack_from

# A field is given by its kind: a limit means a string of at most that many bytes.
_I64 = -1
_U32 = -2
_KEY = KEY_LIMIT
_VALUE = VALUE_LIMIT


class Layout:
    """The kinds of fields of one operation's message; in a list a count comes first, and they repeat so many times."""

    def __init__(self, *kinds: int, is_list: bool = False) -> None:
        self.kinds = kinds
        self.is_list = is_list


#: What may come first on a connection, and what may come then.
_OPENING: Mapping[int, Layout] = {VALIDATE: Layout(_U32)}
LAYOUTS: Mapping[int, Layout] = {
    SET: Layout(_KEY, _VALUE),
    COMPARE_SET: Layout(_KEY, _VALUE, _VALUE),
    GET: Layout(_KEY),
    ADD: Layout(_KEY, _I64),
    CHECK: Layout(_KEY, is_list=True),
    WAIT: Layout(_KEY, is_list=True),
    NUM_KEYS: Layout(),
    DELETE: Layout(_KEY),
    APPEND: Layout(_KEY, _VALUE),
    MULTI_GET: Layout(_KEY, is_list=True),
    MULTI_SET: Layout(_KEY, _VALUE, is_list=True),
    CANCEL_WAIT: Layout(),
    PING: Layout(_U32),
    QUEUE_PUSH: Layout(_KEY, _VALUE),
    QUEUE_POP: Layout(_KEY),
    QUEUE_LEN: Layout(_KEY),
    LIST_KEYS: Layout(),
    BARRIER: Layout(_KEY, _I64),
}


class Decoder:
    """Cuts a stream of bytes into a client's messages.

    It keeps what was read of an unfinished message, so that no byte is looked at twice however small the pieces are,
    and gives one message at a time, so that the reader can stop while its answers are stuck.
    """

    def __init__(self) -> None:
        self._layouts = _OPENING
        self._buffer = b""
        self._offset = 0
        self._chunks: list[bytes] = []
        self.missing = 0  # bytes that are needed at least before there can be another message
        self.held = 0  # bytes that an unfinished message takes
        self._size = 0
        self._operation = -1
        self._total = -1
        self.fields: list[bytes | int] = []  # of the message that `next_operation` named; lists are flat

    def feed(self, data: bytes) -> None:
        """Take what came in."""
        if not self._chunks and self._offset < len(self._buffer):
            data = self._buffer[self._offset :] + data
        elif self._chunks:
            self._chunks.append(data)
            self.missing -= len(data)
            self.held += len(data) + PIECE_COST
            if self.missing > 0:
                return
            data = b"".join(self._chunks)
            self._chunks.clear()
        self._buffer = data
        self._offset = 0

    @property
    def unread(self) -> int:
        """Bytes that came in and were not looked at."""
        return len(self._buffer) - self._offset

    def next_operation(self) -> int:
        """Read one message into `fields`, and return its operation, or -1 while none is complete.

        Raises `WireError` if a limit is passed, the operation is unknown, or the stream doesn't begin as it must.
        """
        if self._offset >= len(self._buffer):
            if self._operation < 0:
                # Nothing is kept of the last message, which may have been large, while the next is waited for.
                self._buffer = b""
                self._offset = 0
                self.fields = []
                return -1
            if self._chunks:
                return -1
        if self._operation < 0:
            self._begin(self._buffer[self._offset])
            self._offset += 1
        operation = self._operation
        layout = self._layouts[operation]
        if self._total < 0 and not self._read_count(len(layout.kinds)):
            return -1
        if len(self.fields) < self._total and not self._read_fields(layout.kinds):
            return -1
        self._operation = -1
        self._layouts = LAYOUTS
        self.held = 0
        return operation

    def _begin(self, operation: int) -> None:
        layout = self._layouts.get(operation)
        if layout is None:
            if self._layouts is _OPENING or operation == VALIDATE:
                message = f"operation {operation} where a connection is opened or open"
                raise WireError(message)
            message = f"operation {operation} is unknown to this store"
            raise WireError(message, UNKNOWN)
        self._operation = operation
        self._total = -1 if layout.is_list else len(layout.kinds)
        self._size = 0
        self.fields = []

    def _read_count(self, width: int) -> bool:
        if len(self._buffer) - self._offset < U64.size:
            return self._wait_for(U64.size)
        count: int = U64.unpack_from(self._buffer, self._offset)[0]
        if count > COUNT_LIMIT:
            message = f"a list of {count} strings, over the limit of {COUNT_LIMIT}"
            raise WireError(message, "list")
        self._offset += U64.size
        self._total = count * width
        return True

    def _read_fields(self, kinds: tuple[int, ...]) -> bool:
        # Every message of every client comes through here: no call that can be done without.
        buffer, fields, width, end = self._buffer, self.fields, len(kinds), len(self._buffer)
        start = self._offset
        for number in range(len(fields), self._total):
            kind = kinds[number % width]
            body = start + (_U32_SIZE if kind == _U32 else _U64_SIZE)
            if kind > 0 and body <= end:
                length = _unpack_length(buffer, start)[0]
                if length > kind:
                    message = f"a string of {length} bytes, over the limit of {kind}"
                    raise WireError(message, "string")
                stop = body + length
            else:
                stop = body
            if stop > end:
                self._offset = start
                return self._wait_for(stop - start)
            if kind > 0:
                fields.append(buffer[body:stop])
            else:
                fields.append((U32 if kind == _U32 else I64).unpack_from(buffer, start)[0])
            start = stop
        self._offset = start
        return True

    def _wait_for(self, length: int) -> bool:
        """Put the unread rest aside until the next field, of so many bytes, can be there; returns False."""
        self._size += self._offset
        if self._size + length > MESSAGE_LIMIT:
            message = f"a message of more than {MESSAGE_LIMIT} bytes"
            raise WireError(message, "message")
        rest = self._buffer[self._offset :]
        self.held = self._size + len(rest) + FIELD_COST * len(self.fields)
        self.missing = length - len(rest)
        self._chunks.append(rest)
        self._buffer = b""
        self._offset = 0
        return False


def encode(operation: int, *fields: bytes | int) -> bytes:
    """Return a message of an operation as bytes; counts and numbers are ints."""
    parts = [bytes((operation,))]
    for field in fields:
        if isinstance(field, int):
            parts.append(I64.pack(field))
        else:
            parts += (U64.pack(len(field)), field)
    return b"".join(parts)


def encode_opening(nonce: int) -> bytes:
    """Return what a client sends first; the server returns the nonce as a u32."""
    return bytes((VALIDATE,)) + U32.pack(MAGIC) + bytes((PING,)) + U32.pack(nonce)
