"""How a store is found and opened, and the proofs of the token."""

from __future__ import annotations

import errno
import hmac
import socket
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.coordination.opening import NODE, SERVER, Credentials, make_nonce
from elastic_run.store import connecting
from elastic_run.store import worker_store as listener
from elastic_run.store.connecting import Backoff, notice_darkness, reason_of, resolve
from elastic_run.store.errors import CLOSED, REFUSED, SILENT, UNREACHABLE, StoreConnectionError

if TYPE_CHECKING:
    import _socket


# --- how an address is looked up, and how long a connection may be dark -----------------------------------------------
def test_a_name_without_an_address_is_told_with_the_name_servers_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no name server that does not answer."""

    def look_up(*_: object) -> list[connecting.Address]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(connecting, "_look_up", look_up)
    with pytest.raises(StoreConnectionError, match=r"^the name 'n1' has no address \(Name or service not known\)$"):
        resolve("n1", 1, 60.0)


def test_the_kernel_breaks_a_connection_that_is_dark_for_so_long() -> None:
    """Also one that waits for the confirmation of what it has sent."""
    with socket.socket() as connection:
        notice_darkness(connection, 30.0)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        idle, interval, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert 20 <= idle + interval * count <= 40


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ECONNREFUSED, REFUSED),
        (errno.ETIMEDOUT, SILENT),
        (errno.EHOSTUNREACH, UNREACHABLE),
        (errno.ENETUNREACH, UNREACHABLE),
        (errno.ECONNRESET, CLOSED),
    ],
)
def test_what_the_system_says_of_a_connection_has_one_word(error: int, reason: str) -> None:
    """How long a node tries again, and what its user is told, depends on it."""
    assert reason_of(OSError(error, "")) == reason


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is the drawn part of its bound, which doubles until pauses are as long as they get."""
    drawn = iter([b"\xff" * 4, b"\x80\0\0\0", b"\xff" * 4, b"\xff" * 4])
    monkeypatch.setattr("os.urandom", lambda _: next(drawn))
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next_pause() for _ in range(4)] == pytest.approx([0.1, 0.1, 0.4, 0.5])


# --- how a port is opened ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_without_ipv6_a_public_port_is_one_of_ipv4(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """The kernel has no IPv6, or it is switched off."""
    bind = listener._bind

    def bind_without_ipv6(host: str, port: int) -> _socket.socket:
        if ":" in host:
            raise OSError(error, "no IPv6 here")
        return bind(host, port)

    monkeypatch.setattr(listener, "_bind", bind_without_ipv6)
    (opened,) = listener.open_listeners([])
    assert opened.getsockname()[0] == "0.0.0.0"  # noqa: S104 - compared
    opened.close()


# --- proofs of the token ----------------------------------------------------------------------------------------------
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
