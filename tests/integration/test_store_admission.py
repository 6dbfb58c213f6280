"""A store with a token against raw sockets: what a stranger gets."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

import pytest

from elastic_run.loop import Loop
from elastic_run.store.tcpstore import admission, server, wire
from elastic_run.store.tcpstore.admission import TokenRequirement
from elastic_run.store.tcpstore.listener import open_listener
from elastic_run.store.tcpstore.server import StoreServer
from elastic_run.store.tcpstore.token_proof import AGENT, derive_key, make_nonce, prove
from tests.support import impostor
from tests.support.store import NONCE, Peer
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKEN = b"the token of this job"
KEY = derive_key(TOKEN)
AGENTS_KEY = b"/elastic-run/job/k/head"
GREETING = bytes((wire.VALIDATE,)) + wire.U32.pack(wire.MAGIC)


class Bench:
    """A server with a token on the test's own loop."""

    def __init__(self, loop: Loop, *, is_shared: bool) -> None:
        self.loop = loop
        self.refused: list[str] = []
        requirement = TokenRequirement(TOKEN, is_shared, self.refused.append)
        self.server = StoreServer(loop, open_listener(), requirement=requirement)
        self.peers: list[Peer] = []

    def peer(self, *, greets: bool = True) -> Peer:
        """Connect, and prove nothing."""
        self.peers.append(Peer(self.loop, self.server.address[1], greets=greets))
        return self.peers[-1]

    def challenged(self) -> tuple[Peer, bytes, bytes, bytes]:
        """Connect and ask for a challenge; returns the peer, its nonce, the server's nonce and the server's proof."""
        peer, nonce = self.peer(greets=False), make_nonce()
        peer.send(wire.encode_challenge(nonce))
        answer = peer.take_string()
        return peer, nonce, answer[: wire.NONCE_SIZE], answer[wire.NONCE_SIZE :]

    def agent(self) -> Peer:
        """Connect and prove the token."""
        peer, ours, theirs, _ = self.challenged()
        peer.ask(wire.PROVE, prove(KEY, AGENT, ours, theirs))
        return peer

    def make_older(self) -> admission.Admission:
        """Let the connections that have proved nothing so far have come a minute ago."""
        waiting = self.server._admission
        assert waiting is not None
        waiting._waiting.update({connection: since - 60.0 for connection, since in waiting._waiting.items()})
        return waiting

    def assert_untouched(self) -> None:
        """Assert that an agent finds what `seed` has written, and nothing else."""
        agent = self.agent()
        agent.ask(wire.LIST_KEYS)
        assert [agent.take_string() for _ in range(agent.take_number())] == [AGENTS_KEY]
        agent.ask(wire.GET, AGENTS_KEY)
        assert agent.take_string() == b"the job"

    def seed(self) -> None:
        """Write the one key, as an agent."""
        agent = self.agent()
        agent.ask(wire.SET, AGENTS_KEY, b"the job")
        agent.ask(wire.CHECK, 1, AGENTS_KEY)
        assert agent.take(1) == wire.READY
        agent.close()

    def close(self) -> None:
        """Close all."""
        for peer in self.peers:
            peer.close()
        self.server.close()


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Make servers on one loop."""
    with Loop() as loop, contextlib.ExitStack() as stack:

        def make(*, is_shared: bool = False) -> Bench:
            bench = Bench(loop, is_shared=is_shared)
            stack.callback(bench.close)
            bench.seed()
            return bench

        yield make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A server that only agents use."""
    return make_bench()


QUESTIONS = {
    "set": wire.encode(wire.SET, AGENTS_KEY, b"x"),
    "set-elsewhere": wire.encode(wire.SET, b"/mine", b"x" * 1024),
    "get": wire.encode(wire.GET, AGENTS_KEY),
    "add": wire.encode(wire.ADD, AGENTS_KEY, 1),
    "append": wire.encode(wire.APPEND, AGENTS_KEY, b"x"),
    "delete": wire.encode(wire.DELETE, AGENTS_KEY),
    "compare-set": wire.encode(wire.COMPARE_SET, AGENTS_KEY, b"the job", b"x"),
    "check": wire.encode(wire.CHECK, 1, AGENTS_KEY),
    "wait": wire.encode(wire.WAIT, 1, AGENTS_KEY),
    "multi-get": wire.encode(wire.MULTI_GET, 1, AGENTS_KEY),
    "multi-set": wire.encode(wire.MULTI_SET, 1, AGENTS_KEY, b"x"),
    "num-keys": wire.encode(wire.NUM_KEYS),
    "list-keys": wire.encode(wire.LIST_KEYS),
    "push": wire.encode(wire.QUEUE_PUSH, AGENTS_KEY, b"x"),
    "pop": wire.encode(wire.QUEUE_POP, AGENTS_KEY),
    "len": wire.encode(wire.QUEUE_LEN, AGENTS_KEY),
    "barrier": wire.encode(wire.BARRIER, AGENTS_KEY, 1),
    "look": wire.encode(wire.LOOK, 1, AGENTS_KEY),
    "wait-look": wire.encode(wire.WAIT_LOOK, 1, AGENTS_KEY),
    "stream-append": wire.encode(wire.STREAM_APPEND, AGENTS_KEY, b"x"),
    "cancel": wire.encode(wire.CANCEL_WAIT),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_stranger_gets_no_answer(bench: Bench, question: bytes) -> None:
    """Every operation of a client without a proof closes its connection, unanswered and without effect."""
    stranger = bench.peer()
    stranger.send(question)
    assert stranger.wait_closed() == b""
    bench.assert_untouched()
    assert len(bench.refused) == 1
    assert f"127.0.0.1:{stranger.socket.getsockname()[1]}" in bench.refused[0]


def test_every_operation_is_tried() -> None:
    """The test above asks for every operation that reads or writes."""
    asked = {question[0] for question in QUESTIONS.values()}
    assert asked == set(wire.LAYOUTS) - set(wire.UNPROVED)


def test_who_proves_the_token_is_served(bench: Bench) -> None:
    """The server proves itself, and a client that does so is an agent: its proof has no answer of its own."""
    peer, ours, theirs, proof = bench.challenged()
    assert proof == prove(KEY, b"job store server", ours, theirs)
    peer.ask(wire.PROVE, prove(KEY, AGENT, ours, theirs))
    peer.ask(wire.GET, AGENTS_KEY)
    assert peer.take_string() == b"the job"
    assert bench.refused == []


def test_a_recorded_proof_is_worth_nothing(bench: Bench) -> None:
    """The proof of one connection, and the whole of what was sent on it, open no other one."""
    peer, ours, theirs, _ = bench.challenged()
    proof = prove(KEY, AGENT, ours, theirs)
    peer.ask(wire.PROVE, proof)
    peer.ask(wire.GET, AGENTS_KEY)
    assert peer.take_string() == b"the job"
    replaying = bench.peer(greets=False)
    replaying.send(wire.encode_challenge(ours) + wire.encode(wire.PROVE, proof) + wire.encode(wire.LIST_KEYS))
    assert len(replaying.wait_closed()) == wire.U64.size + wire.NONCE_SIZE + wire.PROOF_SIZE
    bench.assert_untouched()


def test_the_servers_proof_is_not_the_clients(bench: Bench) -> None:
    """A server that is sent its own proof, of this connection or another one, lets nobody in."""
    stranger, ours, theirs, proof = bench.challenged()
    # The other connection is challenged with the server's own nonce.
    other = bench.peer(greets=False)
    other.send(wire.encode_challenge(theirs))
    reflected = other.take_string()[wire.NONCE_SIZE :]
    other.ask(wire.PROVE, reflected)
    stranger.ask(wire.PROVE, proof)
    assert stranger.wait_closed() == b""
    assert other.wait_closed() == b""
    assert ours != theirs
    bench.assert_untouched()


@pytest.mark.parametrize(
    "words",
    [
        wire.encode(wire.PROVE, b"x" * wire.PROOF_SIZE),
        wire.encode(wire.CHALLENGE, b"short"),
        wire.encode(wire.CHALLENGE, b""),
        wire.encode(wire.CHALLENGE, b"x" * 33),
        wire.encode(wire.PROVE, b"x" * 33),
        bytes((wire.PING,)) * 4096,
    ],
    ids=["no-challenge", "short", "empty", "long", "long-proof", "pings"],
)
def test_a_wrong_proof_is_closed(bench: Bench, words: bytes) -> None:
    """A proof without a challenge, a nonce or proof of another length, and bytes without end are refused."""
    stranger = bench.peer()
    stranger.send(words)
    stranger.wait_closed()
    bench.assert_untouched()


def test_a_proof_without_a_challenge_is_told(bench: Bench) -> None:
    """It is no defect of the server."""
    stranger = bench.peer()
    stranger.ask(wire.PROVE, b"x" * wire.PROOF_SIZE)
    assert stranger.wait_closed() == b""
    assert len(bench.refused) == 1


def test_a_second_challenge_is_refused(bench: Bench) -> None:
    """A connection gets one proof of the server's, no more."""
    stranger, *_ = bench.challenged()
    stranger.send(wire.encode(wire.CHALLENGE, make_nonce()))
    assert stranger.wait_closed() == b""


def test_large_messages_are_refused_before_they_come(bench: Bench) -> None:
    """A stranger makes the server hold no more than a kilobyte."""
    stranger = bench.peer()
    stranger.send(wire.encode(wire.MULTI_SET, 131072))
    assert stranger.wait_closed() == b""


def test_a_silent_connection_ends(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who proves nothing in time is hung up on; an agent that is silent is not."""
    monkeypatch.setattr(admission, "_PROVE_WITHIN", 0.05)
    bench = make_bench()
    agent, silent, greeting = bench.agent(), bench.peer(greets=False), bench.peer()
    agent.ask(wire.GET, AGENTS_KEY)
    assert agent.take_string() == b"the job"
    assert silent.wait_closed() + greeting.wait_closed() == b""
    agent.ask(wire.GET, AGENTS_KEY)
    assert agent.take_string() == b"the job"
    assert len(bench.refused) == 1


def test_a_connection_has_its_own_time_to_prove_the_token(bench: Bench) -> None:
    """One that came later is not hung up on with an older one."""
    older = bench.peer()
    waiting = bench.make_older()
    bench.peer().assert_silent()
    waiting._expire()
    assert older.wait_closed() == b""
    assert waiting.waiting == 1


def test_silent_strangers_hold_nobody_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more strangers wait than may, the oldest makes room for an agent."""
    monkeypatch.setattr(admission, "_MOST_WAITING", 8)
    monkeypatch.setattr(admission, "_SHORTEST", 0.02)
    monkeypatch.setattr(server, "_ACCEPT_AGAIN", 0.02)
    strangers = [bench.peer(greets=False) for _ in range(40)]
    bench.assert_untouched()
    assert sum(stranger.is_closed for stranger in strangers) >= 32
    assert bench.server.connections <= 2


def test_strangers_leave_descriptors_to_agents(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers that say nothing take a quarter of the descriptors at most, so that agents are never turned away."""
    monkeypatch.setattr(admission, "_SHORTEST", 0.02)
    monkeypatch.setattr(server, "_ACCEPT_AGAIN", 0.02)
    bench = make_bench()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        strangers = [bench.peer(greets=False) for _ in range(450)]
        bench.assert_untouched()
        assert sum(stranger.is_closed for stranger in strangers) >= 450 - 1024 // 4 - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("limit", "left"), [(1024, 50), (200, 1)])
def test_the_last_descriptor_is_taken_from_a_stranger(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, limit: int, left: int
) -> None:
    """Where few descriptors are left, or none, an agent gets that of a stranger, and is not turned away."""
    monkeypatch.setattr(server, "_ACCEPT_AGAIN", 0.02)
    monkeypatch.setattr(admission, "_PROVE_WITHIN", 3600.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    fillers: list[int] = []
    try:
        stranger = bench.peer()
        bench.make_older()
        while not fillers or fillers[-1] < limit - 1 - left:
            fillers.append(os.dup(0))
        bench.assert_untouched()
        assert stranger.wait_closed() == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def test_strangers_are_no_clients(bench: Bench) -> None:
    """Connections without a proof don't count as clients: they can't keep the host from ending."""
    bench.peer()
    agent = bench.agent()
    agent.ask(wire.GET, AGENTS_KEY)
    assert agent.take_string() == b"the job"
    bench.loop.run_until(lambda: bench.server.connections == 1, bench.loop.now() + DEADLINE)
    assert bench.server.connections == 1


def test_kinds_of_refusals_are_told_once(bench: Bench) -> None:
    """However many strangers come, each kind of refusal is told once."""
    for _ in range(5):
        stranger = bench.peer()
        stranger.ask(wire.LIST_KEYS)
        stranger.wait_closed()
        wrong, *_ = bench.challenged()
        wrong.ask(wire.PROVE, b"x" * wire.PROOF_SIZE)
        wrong.wait_closed()
    assert len(bench.refused) == 2


# --- a port that workers use as well ---------------------------------------------------------------------------------
def test_workers_need_no_token(make_bench: Callable[..., Bench]) -> None:
    """On a shared port workers are served without a proof, and see none of the agents' keys."""
    bench = make_bench(is_shared=True)
    worker = bench.peer()
    worker.ask(wire.SET, b"/mine", b"x" * 100_000)
    worker.ask(wire.LIST_KEYS)
    assert [worker.take_string() for _ in range(worker.take_number())] == [b"/mine"]
    worker.ask(wire.CHECK, 1, AGENTS_KEY)
    assert worker.take(1) == wire.NOT_READY
    bench.assert_untouched()


def test_a_worker_may_be_silent(make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared port a worker's connection may be opened for later; one that says nothing at all is closed."""
    monkeypatch.setattr(admission, "_PROVE_WITHIN", 0.05)
    bench = make_bench(is_shared=True)
    opened, older, silent = bench.peer(), bench.peer(greets=False), bench.peer(greets=False)
    older.send(GREETING)  # torch 2.4 sends no more than this
    assert silent.wait_closed() == b""
    for worker in (opened, older):
        worker.ask(wire.SET, b"/mine", b"x")
        worker.ask(wire.GET, b"/mine")
        assert worker.take_string() == b"x"


def test_a_shared_port_keeps_strangers_from_the_agents(make_bench: Callable[..., Bench]) -> None:
    """On a shared port a client that begins with an agents' key has to have proved the token."""
    bench = make_bench(is_shared=True)
    stranger = bench.peer()
    stranger.ask(wire.GET, AGENTS_KEY)
    assert stranger.wait_closed() == b""
    late = bench.peer()
    late.ask(wire.GET, b"/mine")
    assert late.take_string() == b""
    late.send(wire.encode(wire.CHALLENGE, make_nonce()))
    assert late.wait_closed() == b""
    bench.assert_untouched()


# --- other clients -------------------------------------------------------------------------------------------------
def test_torchs_client_sees_nothing_new(make_bench: Callable[..., Bench]) -> None:
    """The opening of torch's clients is answered with their own nonce, whatever the port is used for."""
    for is_shared in (False, True):
        peer = make_bench(is_shared=is_shared).peer(greets=False)
        peer.send(wire.encode_opening(NONCE))
        assert peer.take(wire.U32.size) == wire.U32.pack(NONCE)
        peer.assert_silent()


@pytest.mark.parametrize("is_shared", [False, True], ids=["own port", "port shared with workers"])
def test_forged_and_replayed_proofs_are_worth_nothing(*, is_shared: bool) -> None:
    """Twenty thousand messages of a stranger who has recorded a member read nothing, change nothing, fill nothing."""
    outcome = impostor.run(17, 20_000, is_shared=is_shared)
    assert outcome.messages >= 19_000
    assert outcome.growth < 16 << 20
