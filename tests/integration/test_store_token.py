"""Our client with a token: against our own server, torch's, and a server that only says that it is one."""

from __future__ import annotations

import socket
import threading

import pytest

from elastic_run.store.errors import StoreConnectionError, StoreTokenError
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.tcpstore import wire
from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.token_proof import ClientAuthentication
from tests.support.job_stores import torchs_server
from tests.support.store import LOOPBACK, ServedStore
from tests.support.wait import DEADLINE

TOKEN = b"the token of this job"
GREETING = bytes((wire.VALIDATE,)) + wire.U32.pack(wire.MAGIC)


def test_our_clients_prove_themselves() -> None:
    """A client with the token is served, and so is each of its clones."""
    with (
        ServedStore(TOKEN) as served,
        C10dJobStore(LOOPBACK, served.port, "job", authentication=ClientAuthentication(TOKEN)) as store,
        store.clone() as other,
    ):
        store.write({"head": b"1"})
        assert other.get(["head"]) == [b"1"]
        assert served.refused == []


@pytest.mark.parametrize(
    ("served_token", "client", "words", "told"),
    [
        (b"a", b"b", "has another token than this node", "another token"),
        (b"a", None, "has a token, and this node was given none", "no token"),
        (None, b"b", "has no token, and this node was given one", ""),
    ],
)
def test_different_tokens_are_told_on_both_sides(
    served_token: bytes | None, client: bytes | None, words: str, told: str
) -> None:
    """Where the tokens differ, or one side has none, the client says so and the server too."""
    proving = None if client is None else ClientAuthentication(client)
    with ServedStore(served_token) as served:
        with pytest.raises(StoreTokenError, match=words):
            C10dJobStore(LOOPBACK, served.port, "job", timeout=DEADLINE, authentication=proving)
        with StoreClient(LOOPBACK, served.port, DEADLINE):
            pass  # a turn of the server later it has told
        assert all(told in line for line in served.refused)
        assert len(served.refused) == bool(told)


def test_a_false_server_is_given_nothing() -> None:
    """A server that can't prove the token gets a nonce from our client, and an empty proof: nothing of the job."""
    received = bytearray()

    def impersonate(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(4096):
                if not received:
                    connection.sendall(wire.U64.pack(64) + b"n" * 64)
                received.extend(data)

    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=impersonate, args=(listener,))
        thread.start()
        with pytest.raises(StoreTokenError, match="another token"):
            C10dJobStore(LOOPBACK, listener.getsockname()[1], "job", authentication=ClientAuthentication(TOKEN))
        thread.join(DEADLINE)
    assert bytes(received[:6]) == GREETING + bytes((wire.CHALLENGE,))
    assert bytes(received[6 + 8 + wire.NONCE_SIZE :]) == wire.encode(wire.PROVE, b"")


@pytest.mark.parametrize("kind", ["libuv", "older"])
def test_torchs_own_store_is_used_with_a_warning(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A store that can't check the token is used, and one line says so; not after another one has proved the token."""
    proving = ClientAuthentication(TOKEN)
    with torchs_server(kind) as port:
        with C10dJobStore(LOOPBACK, port, "job", authentication=proving) as store, store.clone() as other:
            store.write({"head": b"1"})
            assert other.get(["head"]) == [b"1"]
        assert [record.getMessage() for record in caplog.records if "can't check the token" in record.getMessage()]
        assert len(caplog.records) == 1
        with ServedStore(TOKEN) as served:
            C10dJobStore(LOOPBACK, served.port, "job", authentication=proving).close()
        # Once a store of the job has proved the token, all must.
        with pytest.raises(StoreConnectionError):
            C10dJobStore(LOOPBACK, port, "job", timeout=1.0, tries_again=False, authentication=proving)


def test_a_foreign_store_that_becomes_ours_must_prove_itself() -> None:
    """Where our own server takes the place of a store that could not check the token, it is challenged."""
    proving = ClientAuthentication(TOKEN)
    proving.accept_foreign("elsewhere")
    with ServedStore(TOKEN) as served, C10dJobStore(LOOPBACK, served.port, "job", authentication=proving) as store:
        store.write({"head": b"1"})
        assert not proving.accepts_foreign
