"""The proofs of the token: what they depend on, and what is not one."""

from __future__ import annotations

import hmac

import pytest

from elastic_run.rendezvous.coordination.opening import NODE, SERVER, Credentials, make_nonce

_OWN = Credentials(b"a token")
_NODE_NONCE, _SERVER_NONCE = "c" * 64, "5" * 64


@pytest.mark.parametrize("role", [SERVER, NODE])
def test_both_ends_make_the_same_proof(role: bytes) -> None:
    """A proof is accepted by the other end, which has the same token and the same nonces."""
    proof = Credentials(b"a token").prove(role, _NODE_NONCE, _SERVER_NONCE)
    assert _OWN.is_proof(proof, role, _NODE_NONCE, _SERVER_NONCE)


@pytest.mark.parametrize(
    "proof",
    [
        Credentials(b"another token").prove(NODE, _NODE_NONCE, _SERVER_NONCE),
        hmac.new(b"a token", NODE + (_NODE_NONCE + _SERVER_NONCE).encode(), "sha256").hexdigest(),
        _OWN.prove(SERVER, _NODE_NONCE, _SERVER_NONCE),
        _OWN.prove(NODE, _SERVER_NONCE, _NODE_NONCE),
        _OWN.prove(NODE, "0" * 64, _SERVER_NONCE),
        _OWN.prove(NODE, _NODE_NONCE, "0" * 64),
        _OWN.prove(NODE, _NODE_NONCE, _SERVER_NONCE)[:-1],
        "0" * 64,
        "",
        None,
        7,
        "ä" * 64,
    ],
    ids=[
        *("token", "underived", "reflected", "swapped", "replayed", "replayed-at-node", "cut", "zeros", "empty"),
        *("missing", "number", "no-ascii"),
    ],
)
def test_nothing_else_is_a_proof(proof: object) -> None:
    """Another token, another role, another connection's nonces, less than all of it and garbage are no proof."""
    assert not _OWN.is_proof(proof, NODE, _NODE_NONCE, _SERVER_NONCE)


def test_nonces_are_new() -> None:
    """A nonce never comes twice."""
    assert len({make_nonce() for _ in range(1000)}) == 1000
