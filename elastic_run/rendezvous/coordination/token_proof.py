"""The proof that one end of a connection knows the job's token.

Rules
- A proof is an HMAC-SHA256 over the role and both nonces. Both nonces are new for each connection, so a recorded proof
  is worth nothing on another one. The role is signed, so the agent's proof can't be sent back as the node's.
- The key is derived from the token for this purpose alone: a proof is never a signature of anything else.
- An agent proves itself to every stranger that asks, so the token can be guessed offline if it is short: it has to be
  random.
- The connection is not encrypted, and its messages are not signed.
"""

from __future__ import annotations

import hmac

__all__ = ["NODE", "SERVER", "derive_key", "prove"]

#: The two roles; none is the beginning of the other, and both nonces have a fixed length.
SERVER, NODE = b"agent that is asked", b"node that asks"
_PURPOSE = b"elastic-run: key of connections between the nodes of a job, version 1"
_HASH = "sha256"


def derive_key(token: bytes) -> hmac.HMAC:
    """Return the key of proofs, as a hash that has taken it in already: a thousand nodes may come at once.

    Args:
        token: The secret that the nodes of the job share.
    """
    return hmac.new(hmac.digest(token, _PURPOSE, _HASH), digestmod=_HASH)


def prove(key: hmac.HMAC, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that one end of a connection knows the token.

    Args:
        key: What `derive_key` returned.
        role: `SERVER` or `NODE`, the end that proves itself.
        client_nonce: The nonce of the node that asks.
        server_nonce: The nonce of the agent that is asked.
    """
    signing = key.copy()
    signing.update(role + client_nonce + server_nonce)
    return signing.digest()
