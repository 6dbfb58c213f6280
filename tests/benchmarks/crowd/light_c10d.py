"""A light node whose store speaks TCPStore's protocol."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from elastic_run.core import job_keys
from elastic_run.rendezvous.elastic.link import BIRTH
from elastic_run.store import c10d, wire
from elastic_run.store.client import NOTHING
from tests.benchmarks.crowd.exchange import BYTE, NONCE, NUMBER, STRING, Question
from tests.benchmarks.crowd.light_node import LightNode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.benchmarks.crowd.light_node import Asking

_ENTRY = b"+"
_LOG_START = f"k/{job_keys.LOG_START}"
_OPENING = Question(wire.encode_opening(os.getpid()), (NONCE,))


class LightC10dNode(LightNode):
    """One node of a job in our store."""

    def _open(self) -> Asking[None]:
        yield _OPENING

    def _get(self, keys: Sequence[str]) -> Asking[list[bytes | None]]:
        values = yield self._look([f"k/{key}" for key in keys])
        return [None if value == NOTHING else value for value in values]

    def _create(self, key: str, value: bytes) -> Asking[bytes]:
        creation, start = self._compare_set(f"k/{key}", b"", value), self._look([_LOG_START])
        return (yield Question(creation.data + start.data, (STRING, STRING)))[0]

    def _append(self, value: bytes) -> Asking[None]:
        stream = job_keys.FACTS
        number = (yield Question(wire.encode(wire.ADD, self._key(c10d._count(stream)), 1), (NUMBER,)))[0]
        slot = wire.I64.unpack(number)[0]
        filling = self._compare_set(c10d._slot(stream, slot), b"", _ENTRY + value)
        floor = self._look([c10d._floor(stream)])
        yield Question(filling.data + floor.data, (STRING, STRING))

    def _beat(self) -> Asking[None]:
        key = self._key(f"b/{self._node}")
        beat = wire.encode(wire.MULTI_SET, 1, key, b"%d" % (time.monotonic_ns() // 1_000_000))
        yield Question(beat + wire.encode(wire.CHECK, 1, key), (BYTE,))

    def _read_beat(self, node: str) -> Asking[int | None]:
        beat = (yield self._look([f"b/{node}"]))[0]
        return int(beat) if beat.isdigit() else None

    def _begin_following(self) -> Asking[None]:
        yield self._look([f"k/{BIRTH}"])

    def _wait(self, key: str) -> Asking[bytes]:
        yield Question(wire.encode(wire.WAIT, 1, self._key(f"k/{key}")), (BYTE,))
        return (yield self._look([f"k/{key}", _LOG_START]))[0]

    # --- the protocol ------------------------------------------------------------------------------------------------
    def _look(self, keys: Sequence[str]) -> Question:
        questions = [self._compare_set(key, NOTHING, NOTHING) for key in keys]
        return Question(b"".join(question.data for question in questions), (STRING,) * len(questions))

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> Question:
        return Question(wire.encode(wire.COMPARE_SET, self._key(key), expected, desired), (STRING,))

    def _key(self, key: str) -> bytes:
        return f"/{self._path}/{key}".encode()
