"""What a store takes from outside at most: each bound once, with its reason.

Torch's own bounds come first: a client that meets one would meet it at torch's server too. The others are ours, for the
sums that torch leaves unbounded. A job of torch never meets them: the largest content known is that of Gloo groups, in
which each of N workers leaves about 8 bytes for each other one (136 with torch 2.6 and before). That grows with the
hosts, so the bound does as well. A stranger mostly has one address.

The protocol knows no refusal, so a client that passes a bound loses its connection, and the owner says which bound.
"""

from __future__ import annotations

import sys

_KIB = 1024
_MIB = 1024 * _KIB

# --- torch's ---------------------------------------------------------------------------------------------------------
#: Bytes of a key with its prefix, and of a value.
KEY_LIMIT = 8 * _KIB
VALUE_LIMIT = 8 * _MIB
#: Strings of one list. A list of pairs may hold twice as many strings.
COUNT_LIMIT = 128 * _KIB

# --- ours ------------------------------------------------------------------------------------------------------------
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

# --- what small things cost beside their bytes, as CPython 3.11 measures them ----------------------------------------
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
