"""A light node whose store speaks TCPStore's protocol."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from elastic_run.core.protocol import job_keys
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from elastic_run.store.jobstore.signed import _ENTRY as _ENTRY_KIND
from elastic_run.store.jobstore.signed import _HEARTBEAT, _KEY, SignedStore
from elastic_run.store.tcpstore import token_proof, wire
from elastic_run.store.tcpstore.agent_client import NOTHING
from tests.benchmarks.crowd.exchange import BYTE, NONCE, NUMBER, PRESENT, STRING, Question
from tests.benchmarks.crowd.light_node import LightNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.benchmarks.crowd.exchange import Script
    from tests.benchmarks.crowd.light_node import Asking

_ENTRY = b"+"
_LOG_START = f"k/{job_keys.LOG_START}"
_OPENING = Question(wire.encode_opening(wire.AGENT_NONCE), (NONCE,))
#: Seconds until a heartbeat is tried again that came while something else was said.
_SOON = 0.01
_CANCEL = wire.encode(wire.CANCEL_WAIT)
_TOKEN = os.environ.get("CROWD_TOKEN", "").encode()
_PROOF_KEY = token_proof.derive_key(_TOKEN)
#: Signs what nodes of the crowd's one job write, where there is a token.
_SIGNED = SignedStore(MemoryJobStore(JobSpace(), "crowd"), _TOKEN) if _TOKEN else None


class LightC10dNode(LightNode):
    """One node of a job in our store; CROWD_TOKEN is the job's token, if there is one."""

    _proof = b""
    #: The wait that the server is in, as it was sent.
    _awaiting = b""

    def _open(self) -> Asking[None]:
        if not _TOKEN:
            yield _OPENING
            return
        ours = token_proof.make_nonce()
        answer = (yield Question(wire.encode_challenge(ours), (STRING,)))[0]
        theirs, proof = answer[: wire.NONCE_SIZE], answer[wire.NONCE_SIZE :]
        assert token_proof.is_proof(proof, _PROOF_KEY, token_proof.SERVER, ours, theirs)
        self._proof = wire.encode(wire.PROVE, token_proof.prove(_PROOF_KEY, token_proof.AGENT, ours, theirs))

    def _get(self, keys: Sequence[str]) -> Asking[list[bytes | None]]:
        values = yield self._look([f"k/{key}" for key in keys])
        return [
            None if value == NOTHING else self._remove_signature(_KEY, key, value)
            for key, value in zip(keys, values, strict=True)
        ]

    def _create(self, key: str, value: bytes) -> Asking[bytes]:
        changes = ((f"k/{key}", b"", self._add_signature(_KEY, key, value)), (_LOG_START, NOTHING, NOTHING))
        data = b"".join(wire.encode(wire.COMPARE_SET, self._key(one), old, new) for one, old, new in changes)
        there = (yield Question(data, (STRING, STRING)))[0]
        return self._remove_signature(_KEY, key, there) or b""

    def _append(self, value: bytes) -> Asking[None]:
        stream = job_keys.FACTS
        entry = _ENTRY + self._add_signature(_ENTRY_KIND, stream, value)
        number = yield Question(wire.encode(wire.STREAM_APPEND, self._key(f"s/{stream}"), entry), (NUMBER,))
        assert wire.I64.unpack(number[0])[0] > 0

    def _heartbeat(self) -> Asking[None]:
        key = self._key(f"b/{self._node}")
        value = self._add_signature(_HEARTBEAT, self._node, b"%d" % (time.monotonic_ns() // 1_000_000))
        heartbeat = wire.encode(wire.MULTI_SET, 1, key, value)
        yield Question(heartbeat + wire.encode(wire.CHECK, 1, key), (BYTE,))

    def _read_heartbeat(self, node: str) -> Asking[int | None]:
        value = (yield self._look([f"b/{node}"]))[0]
        heartbeat = None if value == NOTHING else self._remove_signature(_HEARTBEAT, node, value)
        return int(heartbeat) if heartbeat is not None and heartbeat.isdigit() else None

    def _begin_heartbeats(self) -> None:
        """Write a heartbeat while the wait goes on; what else is said, is said first."""
        if self._awaiting:
            self._loop.call_later(self._config.keep_alive_interval, self._begin_heartbeats)
            self._log_reader.interrupt(self._say_meanwhile(self._send_due()))
        else:
            self._loop.call_later(_SOON, self._begin_heartbeats)

    def _say_meanwhile(self, asking: Asking[None]) -> Script:
        """Call the wait off before each question, and begin it again behind it, in one piece."""
        answers: list[bytes] | None = None
        while True:
            try:
                question = next(asking) if answers is None else asking.send(answers)
            except StopIteration:
                return
            assert isinstance(question, Question)
            cancelled = yield Question(_CANCEL + question.data + self._awaiting, (BYTE,))
            if cancelled[0] == wire.WAIT_OVER:  # just then; the second wait is answered as well
                yield Question(b"", (PRESENT, PRESENT, BYTE))
            answers = yield Question(b"", question.kinds)

    def _wait(self, key: str) -> Asking[bytes]:
        keys = self._key(f"k/{key}"), self._key(_LOG_START)
        self._awaiting = wire.encode(wire.WAIT_LOOK, len(keys), *keys)
        found = yield Question(self._awaiting, (BYTE, PRESENT, PRESENT))
        self._awaiting = b""
        return self._remove_signature(_KEY, key, found[1]) or b""

    # --- the token ---------------------------------------------------------------------------------------------------
    def _add_signature(self, kind: bytes, place: str, value: bytes) -> bytes:
        return _SIGNED._add_signature(kind, place, value) if _SIGNED is not None else value

    def _remove_signature(self, kind: bytes, place: str, value: bytes) -> bytes | None:
        return _SIGNED._remove_signature(kind, place, value) if _SIGNED is not None else value

    # --- the protocol ------------------------------------------------------------------------------------------------
    def _look(self, keys: Sequence[str]) -> Question:
        # The first question on each connection is such a look: the proof goes in front of it.
        proof, self._proof = self._proof, b""
        look = wire.encode(wire.LOOK, len(keys), *map(self._key, keys))
        return Question(proof + look, (PRESENT,) * len(keys))

    def _key(self, key: str) -> bytes:
        return f"/{self._path}/{key}".encode()
