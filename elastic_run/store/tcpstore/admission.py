"""The server's side of the token: which connections may see the agents' keys, and what one may do before its proof.

Rules
- Before its proof a connection gets no answer but those of the opening. It may send `_MOST_BYTES`, and has
  `_PROVE_WITHIN` seconds. Where workers use the port as well, a client whose first key is not an agent's sees the
  workers' keys only.
- `_MOST_WAITING` connections may be without a proof at a time, and they may take a quarter of the descriptors. Beyond
  that the oldest makes room once it has had `_SHORTEST` seconds, and until then others wait in the backlog: a thousand
  nodes that come at once all get in, and silent strangers delay no node.
  On a shared port a connection that begins as a worker's do is out of these bounds.
- A refusal is told once for each kind, with the peer's address: a stranger must not fill the log.
"""

from __future__ import annotations

import os

from elastic_run.records import dataclass
from elastic_run.store.errors import UnprovedError, WireError
from elastic_run.store.tcpstore import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from hmac import HMAC

    from elastic_run.loop import Loop, Timer
    from elastic_run.store.tcpstore.connection import Connection

__all__ = ["Admission", "TokenRequirement"]

#: Enough for the opening, the proof and a first question, so that these come in one read.
_MOST_BYTES = 1024
_MOST_WAITING = 4096
#: What they may take of the descriptors that this process may have: the others are for agents and workers.
_SHARE = 4
_PROVE_WITHIN = 10.0
_SHORTEST = 1.0

#: Kinds of refusals, with what is told of them.
_OTHER_TOKEN = "it has another token than this job"  # noqa: S105 - no secret
_NO_TOKEN = "it has no token, and this job has one"  # noqa: S105 - no secret
_SILENT = f"it has not proved the token within {_PROVE_WITHIN:.0f} s"
_CROWDED = "too many connections wait with no proof of the token, and it is the oldest of them"


@dataclass
class TokenRequirement:
    """What agents have to prove to a server.

    Args:
        token: The secret that the nodes of the job share.
        is_shared: Whether workers use the same port, without a proof and with keys of their own.
        on_refused: Called once for each kind of refusal, with the reason and the peer's address.
    """

    __slots__ = ("is_shared", "on_refused", "token")
    token: bytes
    is_shared: bool
    on_refused: Callable[[str], None]


class Admission:
    """Lets those clients in that prove the token.

    Args:
        loop: The loop whose thread this lives in.
        requirement: What is to be proved.
        greet: Answers the messages of the opening.
        on_agent: Called with a connection that has proved the token.
        on_worker: Called with the first message of a worker.
    """

    def __init__(
        self,
        loop: Loop,
        requirement: TokenRequirement,
        *,
        greet: Callable[[Connection, int, list[bytes | int]], None],
        on_agent: Callable[[Connection], None],
        on_worker: Callable[[Connection, int, list[bytes | int]], None],
    ) -> None:
        self._loop = loop
        self._requirement = requirement
        self._key: HMAC | None = None
        self._greet = greet
        self._on_agent = on_agent
        self._on_worker = on_worker
        self._told: set[str] = set()
        # Since when connections have neither proved the token nor, on a shared port, begun as workers do. Oldest first.
        self._waiting: dict[Connection, float] = {}
        # The client's nonce and ours, of those that were challenged.
        self._nonces: dict[Connection, tuple[bytes, bytes]] = {}
        self._timer: Timer | None = None

    @property
    def waiting(self) -> int:
        """The number of connections that have neither proved the token nor, on a shared port, begun as workers do."""
        return len(self._waiting)

    def make_room(self, *, is_full: bool = False) -> bool:
        """See to it that another connection can be taken.

        Args:
            is_full: Whether a connection that waits has to make room for it in any case.

        Returns:
            Whether it can be taken.
        """
        if not self._waiting or (len(self._waiting) < _find_most_waiting() and not is_full):
            return not is_full
        oldest, since = next(iter(self._waiting.items()))
        if self._loop.now() - since < _SHORTEST:
            return False
        self._refuse(oldest, _CROWDED)
        return True

    def add(self, connection: Connection) -> None:
        """Take a new connection."""
        connection.on_message = self._meet
        if not self._requirement.is_shared:
            connection.allow(wire.UNPROVED, _MOST_BYTES)
        self._waiting[connection] = self._loop.now()
        if self._timer is None:
            self._timer = self._loop.call_later(_PROVE_WITHIN, self._expire)

    def remove(self, connection: Connection, error: WireError | None = None) -> None:
        """Forget a connection that is closed."""
        self._forget(connection)
        if isinstance(error, UnprovedError):
            self._tell(connection, str(error))

    def close(self) -> None:
        """Stop waiting for anybody."""
        self._waiting.clear()
        self._nonces.clear()
        if self._timer is not None:
            self._timer.cancel()

    # --- messages ------------------------------------------------------------------------------------------------
    def _meet(self, connection: Connection, operation: int, fields: list[bytes | int]) -> None:
        if operation == wire.CHALLENGE:
            self._challenge(connection, fields[0])
        elif operation == wire.PROVE:
            self._check(connection, fields[0])
        elif operation == wire.PING and fields[0] == wire.AGENT_NONCE:
            connection.reply(wire.U32.pack(wire.PROOF_WANTED))
            self._tell(connection, _NO_TOKEN)
        elif operation in (wire.VALIDATE, wire.PING):
            self._greet(connection, operation, fields)
            if self._requirement.is_shared:
                self._end_wait(connection)  # a worker's spare connection may begin like this and say no more for hours
        elif wire.names_agents(fields):
            raise UnprovedError
        else:
            self._on_worker(connection, operation, fields)

    def _challenge(self, connection: Connection, nonce: bytes | int) -> None:
        # Imported only with a token, and in the server's thread: hashing costs milliseconds to import.
        from elastic_run.store.tcpstore import token_proof  # noqa: PLC0415

        if connection in self._nonces or not isinstance(nonce, bytes) or len(nonce) != wire.NONCE_SIZE:
            raise UnprovedError
        if self._key is None:
            self._key = token_proof.derive_key(self._requirement.token)
        own = token_proof.make_nonce()
        self._nonces[connection] = nonce, own
        proof = token_proof.prove(self._key, token_proof.SERVER, nonce, own)
        connection.reply(wire.U64.pack(len(own) + len(proof)) + own + proof)

    def _check(self, connection: Connection, proof: bytes | int) -> None:
        from elastic_run.store.tcpstore import token_proof  # noqa: PLC0415 - see above

        nonces = self._nonces.get(connection)
        if self._key is None or nonces is None or not isinstance(proof, bytes):
            raise UnprovedError
        if not token_proof.is_proof(proof, self._key, token_proof.AGENT, *nonces):
            raise UnprovedError(_OTHER_TOKEN)
        self._forget(connection)
        connection.allow(wire.LAYOUTS, None)
        self._on_agent(connection)

    def _forget(self, connection: Connection) -> None:
        self._nonces.pop(connection, None)
        self._end_wait(connection)

    def _end_wait(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    # --- time ----------------------------------------------------------------------------------------------------
    def _expire(self) -> None:
        """Close whose time is over. The timer is not cancelled when a proof comes: it is due once, and then rests."""
        self._timer = None
        now = self._loop.now()
        for connection, since in tuple(self._waiting.items()):
            left = since + _PROVE_WITHIN - now
            if left > 0:
                self._timer = self._loop.call_later(left, self._expire)
                return
            self._refuse(connection, _SILENT)

    # --- refusals ------------------------------------------------------------------------------------------------
    def _refuse(self, connection: Connection, reason: str) -> None:
        connection.close(UnprovedError(reason))

    def _tell(self, connection: Connection, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._requirement.on_refused(f"{reason} ({connection.peer})")


def _find_most_waiting() -> int:
    """Return how many connections may be without a proof; the limit of descriptors may have been raised meanwhile."""
    limit = os.sysconf("SC_OPEN_MAX")
    return min(_MOST_WAITING, max(limit // _SHARE, 1)) if limit > 0 else _MOST_WAITING
