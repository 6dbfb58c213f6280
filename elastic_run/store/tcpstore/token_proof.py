"""Challenge and answer: both ends of a connection to the job store prove that they know the job's token.

Rules
- The client sends a nonce. The server answers with a nonce of its own and its proof. The client checks that proof
  before it sends anything of the job, and sends its own proof in front of its first question. So a connection takes as
  many round trips with a token as without one.
- A proof is an HMAC-SHA256 over the role and both nonces. Both nonces are new for each connection, so a recorded proof
  is worth nothing on another one. The role is signed, so the server's proof can't be sent back as the client's.
- The key is derived from the token for this purpose alone: a proof is never a signature of a value (`jobstore.signed`).
- Proofs are compared in constant time.
- The server proves itself to every stranger that asks, so the token can be guessed offline if it is short: it has to be
  random.
- The connection is not encrypted, and its messages are not signed. Values are signed as well (`jobstore.signed`).
"""

from __future__ import annotations

import hmac
import logging
import os

from elastic_run.store.errors import FOREIGN, StoreConnectionError, StoreTokenError, make_full_error
from elastic_run.store.tcpstore import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.store.stream import Stream

__all__ = ["AGENT", "SERVER", "ClientAuthentication", "derive_key", "is_proof", "make_nonce", "prove"]

_log = logging.getLogger(__name__)

#: The two roles; none is the beginning of the other, and both nonces have a fixed length.
SERVER, AGENT = b"job store server", b"job store client"
_PURPOSE = b"elastic-run: key of connections to the job store, version 1"
_HASH = "sha256"


def derive_key(token: bytes) -> hmac.HMAC:
    """Return the key of proofs, as a hash that has taken it in already: a thousand nodes may come at once.

    Args:
        token: The secret that the nodes of the job share.
    """
    return hmac.new(hmac.digest(token, _PURPOSE, _HASH), digestmod=_HASH)


def make_nonce() -> bytes:
    """Return random bytes that were never used before."""
    return os.urandom(wire.NONCE_SIZE)


def prove(key: hmac.HMAC, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that one end of a connection knows the token.

    Args:
        key: What `derive_key` returned.
        role: `SERVER` or `AGENT`, the end that proves itself.
        client_nonce: The client's nonce, of `wire.NONCE_SIZE` bytes.
        server_nonce: The server's, likewise.
    """
    signing = key.copy()
    signing.update(role + client_nonce + server_nonce)
    return signing.digest()


def is_proof(proof: bytes, key: hmac.HMAC, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bool:
    """Tell whether a proof is the right one, in a time that doesn't depend on the proof.

    Args:
        proof: What the other end has sent.
        key: What `derive_key` returned.
        role: The role of the end that has sent it.
        client_nonce: The client's nonce.
        server_nonce: The server's.
    """
    return hmac.compare_digest(proof, prove(key, role, client_nonce, server_nonce))


class ClientAuthentication:
    """The client's side, shared by all connections of one node to the stores of its job.

    A store that can't answer a challenge (torch's own server) is used all the same, with a warning: its values are
    signed. Not so once a store has proved itself: then every store of this job must.

    Args:
        token: The secret that the nodes of the job share.

    Attributes:
        is_foreign: Whether the store is known to be one that can't answer a challenge.
    """

    def __init__(self, token: bytes) -> None:
        self.is_foreign = False
        self._key = derive_key(token)
        self._was_proved = False
        self._has_warned = False

    @property
    def accepts_foreign(self) -> bool:
        """Whether a store may be used that can't answer a challenge."""
        return not self._was_proved

    def challenge(self, stream: Stream, name: str, timeout: float) -> bytes:
        """Open a connection and let the server prove itself.

        Args:
            stream: The connection, on which nothing was sent yet.
            name: The store for messages.
            timeout: Seconds for the answer.

        Returns:
            The message with this node's proof, to be sent in front of the first question.

        Raises:
            StoreTokenError: The store has another token, or none.
            StoreConnectionError: It isn't one of our stores, or closed the connection.
            StoreTimeoutError: It did not answer in time.
        """
        ours = make_nonce()
        stream.send(wire.encode_challenge(ours), timeout)
        size = wire.U64.unpack(stream.receive(wire.U64.size, timeout))[0]
        if size == 0:
            message = f"the job at {name} has no token, and this node was given one"
            raise StoreTokenError(message)
        if size & 0xFFFFFFFF == wire.STORE_FULL:
            raise make_full_error(size >> 32)
        if size != wire.NONCE_SIZE + wire.PROOF_SIZE:
            message = "the answer is not a TCPStore's"
            raise StoreConnectionError(message, FOREIGN)
        theirs = stream.receive(wire.NONCE_SIZE, timeout)
        if not is_proof(stream.receive(wire.PROOF_SIZE, timeout), self._key, SERVER, ours, theirs):
            stream.send(wire.encode(wire.PROVE, b""), timeout)  # the server's side says so, too
            message = f"the job at {name} has another token than this node"
            raise StoreTokenError(message)
        self._was_proved = True
        return wire.encode(wire.PROVE, prove(self._key, AGENT, ours, theirs))

    def accept_foreign(self, name: str) -> None:
        """Note that the store can't answer a challenge, and say it once."""
        self.is_foreign = True
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "elastic-run: the store at %s is not served by elastic-run and can't check the token: what the nodes "
                "write is signed, but everybody who reaches the store can read, delete and fill it",
                name,
            )
