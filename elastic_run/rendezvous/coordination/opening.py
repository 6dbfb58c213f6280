"""How a node comes to an agent's port: what both sides say before the first document.

- The node says which job it belongs to, and who it is. The agent answers as `core.job.coordinator_search` has it: it
  coordinates the job, follows another agent, or searches; or this node has no place there (`REFUSED`).
- With a token both sides prove that they know it: the agent in its answer, the node in front of its first document. A
  proof is an HMAC-SHA256 over the role, so that the agent's can't be sent back as the node's, and both nonces, which
  are new for each connection. The key is derived from the token for this purpose alone.
- An agent proves itself to every stranger that asks, so the token can be guessed offline if it is short: it has to be
  random. The connection is not encrypted, and its messages are not signed.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from elastic_run.core.job.codec import MessageError, from_document, to_message
from elastic_run.core.job.coordinator_search import COORDINATES, FOLLOWS, SEARCHES
from elastic_run.records import dataclass, replace
from elastic_run.rendezvous.coordination.link import (
    LARGEST_OPENING,
    MESSAGE,
    NAME,
    PREAMBLE,
    PROTOCOL,
    FrameReader,
    encode_frame,
)
from elastic_run.store.connecting import connect_once, format_endpoint, reason_of
from elastic_run.store.errors import CLOSED, FOREIGN, SILENT, StoreConnectionError, StoreTokenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from hmac import HMAC
    from typing import Any, TypeVar

    T = TypeVar("T")

#: The two roles; none is the beginning of the other, and both nonces have a fixed length.
SERVER, NODE = b"agent that is asked", b"node that asks"
_PURPOSE = b"elastic-run: key of connections between the nodes of a job, version 1"
_HASH = "sha256"

REFUSED = "refused"
_ROLES = (COORDINATES, FOLLOWS, SEARCHES, REFUSED)
_RECEIVE = 1 << 14


@dataclass(frozen=True, slots=True)
class Hello:
    """Which node comes."""

    job: str
    node: str  # "" for a look that joins nothing
    host: str
    nonce: str = ""  # with a token: random bytes, as hexadecimal digits
    successor: str = ""  # where the node listens, if it holds the lease in place of the agent to which it comes
    term: int = 0  # of that lease


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent answers."""

    role: str  # a word of `core.job.coordinator_search`, or `REFUSED`
    node: str = ""
    standing: int = 0  # see `core.job.coordinator_search.Answer`
    term: int = 0  # of the coordinator: a node that joins promises to follow it
    to: str = ""  # where the coordinator listens that the agent follows
    detail: str = ""  # with `REFUSED`: the reason, a sentence for the user
    nonce: str = ""  # with a token: the agent's random bytes
    proof: str = ""

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            message = f"{self.role!a:.80} is no role"
            raise MessageError(message)


@dataclass(frozen=True, slots=True)
class Identity:
    """What an agent says of itself to others (see `Hello`), and the lease in which they have to answer."""

    job: str
    node: str
    host: str
    lease: float
    credentials: Credentials | None

    def make_hello(self, *, joins: bool) -> Hello:
        """Return what this agent says first; one that only looks joins nothing."""
        return Hello(self.job, self.node if joins else "", self.host)


class Credentials:
    """Proofs of one job's token."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._key: HMAC | None = None

    def prove(self, role: bytes, client_nonce: str, server_nonce: str) -> str:
        """Return the proof that one end of a connection knows the token: that of `SERVER` or that of `NODE`."""
        # Imported only with a token: hashing costs milliseconds to import.
        import hmac

        if self._key is None:
            # A hash that has taken the key in already: a thousand nodes may come at once.
            self._key = hmac.new(hmac.digest(self._token, _PURPOSE, _HASH), digestmod=_HASH)
        signing = self._key.copy()
        signing.update(role + client_nonce.encode() + server_nonce.encode())
        return signing.hexdigest()

    def is_proof(self, proof: object, role: bytes, client_nonce: str, server_nonce: str) -> bool:
        """Tell whether a proof is the right one, in a time that doesn't depend on the proof."""
        import hmac

        expected = self.prove(role, client_nonce, server_nonce)
        return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)


def make_nonce() -> str:
    """Return random digits that were never used before."""
    return os.urandom(32).hex()


def read_opening(kind: type[T], message: dict[str, Any]) -> T:
    """Return a `Hello` or an `Answer`; raise `MessageError` for garbage."""
    found = from_document(kind, message)
    for name in kind.__slots__:  # type: ignore[attr-defined] # both have it
        value = getattr(found, name)
        # What is not printable would move the cursor of a terminal that shows it.
        if isinstance(value, str) and not value.isprintable():
            text = f"{name} must be a printable text, not {value!a:.80}"
            raise MessageError(text)
    return found


# --- the node's side -------------------------------------------------------------------------------------------------
def ask(
    endpoint: tuple[str, int], hello: Hello, timeout: float, credentials: Credentials | None, *, dark_after: float
) -> tuple[Answer, socket.socket | None, bytes]:
    """Come to an agent's port, and return the answer.

    With it come, of an agent that coordinates, the connection, on which the node's proof was sent, and what was read
    behind the answer. Raises `StoreTokenError` if the agent has another token or another protocol.
    """
    name = format_endpoint(*endpoint)
    hello = replace(hello, nonce=make_nonce() if credentials else "")
    deadline = time.monotonic() + timeout
    connected = connect_once(*endpoint, timeout, dark_after=dark_after)
    try:
        connected.sendall(PREAMBLE + encode_frame(MESSAGE, to_message(hello)))
        answer, rest = _receive_answer(connected, deadline, name)
        try:
            _check_token(answer, hello, credentials, name)
        except StoreTokenError:
            if hello.node and hello.nonce and answer.role == COORDINATES:
                # So the other side's user is told as well.
                with suppress(OSError):
                    connected.sendall(encode_frame(MESSAGE, {"kind": "proof", "proof": ""}))
            raise
        if answer.role != COORDINATES or not hello.node:
            connected.close()
            return answer, None, b""
        if credentials is not None:
            proof = credentials.prove(NODE, hello.nonce, answer.nonce)
            connected.sendall(encode_frame(MESSAGE, {"kind": "proof", "proof": proof}))
    except OSError as error:
        connected.close()
        if isinstance(error, StoreConnectionError):
            raise
        reason = reason_of(error)
        cause = f"{name} takes connections but sends no answer" if reason == SILENT else f"{name}: {error.strerror}"
        raise StoreConnectionError(cause, reason) from error
    except BaseException:
        connected.close()
        raise
    return answer, connected, rest


def _receive_answer(connected: socket.socket, deadline: float, name: str) -> tuple[Answer, bytes]:
    reader = FrameReader(LARGEST_OPENING)
    while True:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        data = connected.recv(_RECEIVE)
        if not data:
            message = f"{name} closed the connection"
            raise StoreConnectionError(message, CLOSED)
        reader.rest += data
        if reader.rest.startswith(NAME):
            told = reader.rest.partition(b"\n")[0].removeprefix(NAME)
            other = told.decode() if told.isdigit() else "of another kind"
            remedy = "install the same release of elastic-run"
            message = f"the job at {name} uses protocol {other}, this node {PROTOCOL}: {remedy}"
            raise StoreTokenError(message)
        try:
            for _, content in reader.read():
                return read_opening(Answer, content), bytes(reader.rest)
        except MessageError as error:
            message = f"what listens at {name} is no agent of elastic-run"
            raise StoreConnectionError(message, FOREIGN) from error


def _check_token(answer: Answer, hello: Hello, credentials: Credentials | None, name: str) -> None:
    if credentials is None:
        if answer.nonce:
            message = f"the job at {name} has a token, and this node was given none"
            raise StoreTokenError(message)
        return

    if not answer.nonce:
        message = f"the job at {name} has no token, and this node was given one"
        raise StoreTokenError(message)
    if not credentials.is_proof(answer.proof, SERVER, hello.nonce, answer.nonce):
        message = f"the job at {name} has another token than this node"
        raise StoreTokenError(message)
