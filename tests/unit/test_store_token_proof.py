"""The proofs of the token: what they depend on, and what is not one."""

from __future__ import annotations

import hmac
import os

import pytest

from elastic_run.store.tcpstore import admission
from elastic_run.store.tcpstore.token_proof import AGENT, SERVER, derive_key, is_proof, make_nonce, prove
from elastic_run.store.tcpstore.wire import NONCE_SIZE, PROOF_SIZE

KEY = derive_key(b"a token")
CLIENT_NONCE, SERVER_NONCE = b"c" * NONCE_SIZE, b"s" * NONCE_SIZE


@pytest.mark.parametrize("role", [SERVER, AGENT])
def test_both_ends_make_the_same_proof(role: bytes) -> None:
    """A proof is accepted by the other end, which has the same token and the same nonces."""
    proof = prove(derive_key(b"a token"), role, CLIENT_NONCE, SERVER_NONCE)
    assert len(proof) == PROOF_SIZE
    assert is_proof(proof, KEY, role, CLIENT_NONCE, SERVER_NONCE)


@pytest.mark.parametrize(
    "proof",
    [
        prove(derive_key(b"another token"), AGENT, CLIENT_NONCE, SERVER_NONCE),
        prove(hmac.new(b"a token", digestmod="sha256"), AGENT, CLIENT_NONCE, SERVER_NONCE),
        prove(KEY, SERVER, CLIENT_NONCE, SERVER_NONCE),
        prove(KEY, AGENT, SERVER_NONCE, CLIENT_NONCE),
        prove(KEY, AGENT, b"o" * NONCE_SIZE, SERVER_NONCE),
        prove(KEY, AGENT, CLIENT_NONCE, b"o" * NONCE_SIZE),
        prove(KEY, AGENT, CLIENT_NONCE, SERVER_NONCE)[:-1],
        b"\0" * PROOF_SIZE,
        b"",
    ],
    ids=["token", "underived", "reflected", "swapped", "replayed", "replayed-at-client", "cut", "zeros", "empty"],
)
def test_nothing_else_is_a_proof(proof: bytes) -> None:
    """Another token, another role, another connection's nonces and less than all of it are no proof."""
    assert not is_proof(proof, KEY, AGENT, CLIENT_NONCE, SERVER_NONCE)


def test_nonces_are_new() -> None:
    """A nonce has its full length and never comes twice."""
    nonces = {make_nonce() for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) for nonce in nonces} == {NONCE_SIZE}


@pytest.mark.parametrize(
    ("limit", "most"), [(1000, 250), (65536, 4096), (16384, 4096), (16380, 4095), (2, 1), (-1, 4096)]
)
def test_connections_without_a_proof_take_a_quarter_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    """At most 4096 connections may be without a proof, and a quarter of the descriptors; one always may."""
    monkeypatch.setattr(os, "sysconf", lambda _: limit)
    assert admission._find_most_waiting() == most
