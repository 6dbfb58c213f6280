"""The job store over torch's TCPStore protocol, on our server or torch's.

Rules
- A stream's entries lie in numbered slots. A writer takes a number by counting up, then fills the slot by
  compare-and-set: never a plain set, so a slot is filled once. The work for an entry is constant, however many
  nodes write. A server of ours does both at once, so that no gap comes from there.
- A writer that died between the two leaves a gap. A reader that has seen one for a second fills it with VOID the same
  way. A writer that comes too late for its slot takes another one.
- Trimming first raises the stream's floor, then deletes. A writer asks for the floor after it has filled its slot:
  below the log's start no reader has seen its entry, and it takes another slot.
- A reader that has nothing to read waits in the server for the next slot. It looks at the counter again now and then:
  the next slot may become a gap while it waits. What it has seen behind a gap it keeps: a filled slot never changes.
- The store knows no time: nothing expires, and what is left behind dies with the server.
- Objects that share a connection take turns in it, an operation each. `wait` and `wait_beside` of one of them let the
  operations of the other one pass.
"""

# ruff: noqa: D102 - JobStore says what the methods promise
from __future__ import annotations

import time
from contextlib import contextmanager

from elastic_run.store.errors import SILENT, StoreConnectionError, StoreTimeoutError
from elastic_run.store.job_path import job_path
from elastic_run.store.jobstore.api import ENTRIES_AT_ONCE, JobStore
from elastic_run.store.tcpstore.agent_client import NOTHING, AgentClient
from elastic_run.store.tcpstore.stream_keys import count_key, floor_key, slot_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elastic_run.store.tcpstore.token_proof import ClientAuthentication

#: Seconds that a slot may stay empty while later ones are filled.
_GAP_LIVES = 1.0
#: Seconds between looks at the counter while a slot is waited for.
_LOOK_AGAIN = 2.0
_VOID = b"-"
_ENTRY = b"+"


class C10dJobStore(JobStore):
    """A job's part of a TCPStore.

    Args:
        host: The server's name or address, IPv6 without brackets.
        port: Its port.
        run_id: The job.
        timeout: Seconds to try to reach the server, to wait for a reply, and until a server that went dark is noticed.
        tries_again: Whether to go on trying, within the timeout, where nobody listens yet.
        authentication: Where the job has a token.
        shared: The connection of another object, to use in place of opening one.

    Raises:
        StoreConnectionError: The server can't be reached, or isn't a TCPStore.
        StoreTokenError: The server's token is another one than ours, or one of both has none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        run_id: str,
        *,
        timeout: float = 10.0,
        tries_again: bool = True,
        authentication: ClientAuthentication | None = None,
        shared: AgentClient | None = None,
    ) -> None:
        self.run_id = run_id
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.is_shared = shared is not None
        self._authentication = authentication
        # By stream: a slot found empty, and when that was.
        self._gaps: dict[str, tuple[int, float]] = {}
        # By stream: slots behind a gap, with what they hold.
        self._ahead: dict[str, dict[int, bytes]] = {}
        if shared is not None:
            self._client = shared
            return
        with _silence_closes():
            self._client = AgentClient(
                host,
                port,
                timeout,
                f"/{job_path(run_id)}/",
                tries_again=tries_again,
                authentication=authentication,
            )

    # --- streams -------------------------------------------------------------------------------------------------
    def append(self, stream: str, value: bytes) -> None:
        with self._turn():
            while not self._client.append_entry(_stream(stream), _ENTRY + value):
                pass  # that slot was voided or trimmed: we were too slow

    def read(self, stream: str, position: int, timeout: float) -> tuple[list[bytes], int]:
        deadline = time.monotonic() + timeout
        with self._turn():
            while True:
                newest = self._client.add(_count(stream), 0)
                if newest < position:
                    position = 0  # another server than the one that gave it: this one begins anew
                    self._ahead.clear()
                if newest > position:
                    entries, position = self._take(stream, position, newest)
                    if entries:
                        return entries, position
                left = deadline - time.monotonic()
                if left <= 0:
                    return [], position
                self._wait_for_slot(stream, position + 1, left)

    def _take(self, stream: str, position: int, newest: int) -> tuple[list[bytes], int]:
        """Return the entries up to the first gap, and the position behind them or behind what was trimmed."""
        slots = range(position + 1, min(newest, position + ENTRIES_AT_ONCE) + 1)
        known = {slot: value for slot, value in self._ahead.pop(stream, {}).items() if slot > position}
        unknown = [slot for slot in slots if slot not in known]
        found = self._client.look([_slot(stream, slot) for slot in unknown])
        known.update({slot: value for slot, value in zip(unknown, found, strict=True) if value is not None})
        filled = []
        while (value := known.pop(position + 1, None)) is not None:
            filled.append(value)
            position += 1
        self._ahead[stream] = known
        if filled:
            return [value[1:] for value in filled if value[:1] == _ENTRY], position
        return [], self._pass_gap(stream, position + 1)

    def _pass_gap(self, stream: str, slot: int) -> int:
        """Void an empty slot whose time is over; returns the position to go on from."""
        floor = self._read_floor(stream)
        if floor >= slot:
            return floor
        now = time.monotonic()
        if self._gaps.get(stream, (0, 0.0))[0] != slot:
            self._gaps[stream] = (slot, now)
        elif now - self._gaps[stream][1] >= _GAP_LIVES:
            self._client.compare_set(_slot(stream, slot), b"", _VOID)
        return slot - 1

    def _wait_for_slot(self, stream: str, slot: int, left: float) -> None:
        gap, since = self._gaps.get(stream, (0, 0.0))
        pause = max(since + _GAP_LIVES - time.monotonic(), 0.0) if gap == slot else _LOOK_AGAIN
        self._client.has_come([_slot(stream, slot)], min(left, pause))

    def trim(self, stream: str, position: int) -> None:
        with self._turn():
            floor = self._read_floor(stream)
            while floor < position:
                expected = b"%d" % floor if floor else b""
                there = _number(self._client.compare_set(_floor(stream), expected, b"%d" % position))
                if there == position:
                    self._client.delete_keys([_slot(stream, slot) for slot in range(floor + 1, position + 1)])
                floor = there

    def _read_floor(self, stream: str) -> int:
        value = self._client.look([_floor(stream)])[0]
        return 0 if value is None else _number(value)

    # --- keys ----------------------------------------------------------------------------------------------------
    def create(self, key: str, value: bytes) -> bytes:
        with self._turn():
            return self._client.compare_set(_key(key), b"", value)

    def replace(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with self._turn():
            there = self._client.compare_set(_key(key), expected or b"", value)
            # The protocol returns what was expected also where the key isn't there.
            return there if there == value or expected is None else self._client.look([_key(key)])[0]

    def create_beside(self, key: str, value: bytes, other: str) -> tuple[bytes, bytes | None]:
        with self._turn():
            there, beside = self._client.compare_sets([(_key(key), b"", value), (_key(other), NOTHING, NOTHING)])
        return there, None if beside == NOTHING else beside

    def wait(self, key: str, timeout: float) -> bytes | None:
        return self._wait([_key(key)], timeout)[0]

    def wait_beside(self, key: str, other: str, timeout: float) -> tuple[bytes | None, bytes | None]:
        value, beside = self._wait([_key(key), _key(other)], timeout)
        return value, beside

    def _wait(self, keys: Sequence[str], timeout: float) -> list[bytes | None]:
        """Wait for the first of some keys, and return what lies at all of them."""
        with _silence_closes():
            return self._client.wait_look(keys, timeout)

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._turn():
            return self._client.look([_key(key) for key in keys])

    def write(self, values: Mapping[str, bytes]) -> None:
        with self._turn():
            self._client.write([_key(key) for key in values], list(values.values()))

    def delete(self, keys: Sequence[str]) -> None:
        with self._turn():
            self._client.delete_keys([_key(key) for key in keys])

    # --- heartbeats ---------------------------------------------------------------------------------------------------
    def write_heartbeat(self, node: str, value: bytes, last: bytes | None = None) -> bool:
        with self._turn():
            if last is not None:
                # Where the key isn't there, the protocol returns what was expected.
                return self._client.compare_set(_heartbeat(node), last, value) == value
            self._client.write([_heartbeat(node)], [value])
            return True

    def fetch_heartbeats(self, nodes: Sequence[str]) -> list[bytes | None]:
        with self._turn():
            return self._client.get_all([_heartbeat(node) for node in nodes])

    @property
    def reads_beside(self) -> bool:
        return True

    def fetch_heartbeats_beside(self, nodes: Sequence[str], other: str) -> tuple[list[bytes | None], bytes | None]:
        with self._turn():
            *heartbeats, beside = self._client.look([*map(_heartbeat, nodes), _key(other)])
        return heartbeats, beside

    def forget_heartbeats(self, nodes: Sequence[str]) -> None:
        with self._turn():
            self._client.delete_keys([_heartbeat(node) for node in nodes])

    # --- the whole -----------------------------------------------------------------------------------------------
    def remove_job(self) -> None:
        with self._turn():
            self._client.delete_keys(self._client.list_keys())

    def clone(self) -> C10dJobStore:
        client = self._client
        return C10dJobStore(
            client.host, client.port, self.run_id, timeout=client.timeout, authentication=self._authentication
        )

    def share(self) -> C10dJobStore:
        client = self._client
        return C10dJobStore(client.host, client.port, self.run_id, authentication=self._authentication, shared=client)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with _silence_closes(), self._client.turn():
            yield

    def set_timeout(self, timeout: float) -> None:
        self._client.set_timeout(timeout)

    def close(self) -> None:
        if not self.is_shared:
            self._client.close()


@contextmanager
def _silence_closes() -> Iterator[None]:
    """The protocol has one error for a store that doesn't answer, however that shows."""
    try:
        yield
    except StoreTimeoutError as error:
        raise StoreConnectionError(str(error), SILENT) from error


def _key(key: str) -> str:
    return f"k/{key}"


def _heartbeat(node: str) -> str:
    return f"b/{node}"


def _stream(stream: str) -> bytes:
    return f"s/{stream}".encode()


def _count(stream: str) -> bytes:
    return count_key(_stream(stream))


def _floor(stream: str) -> bytes:
    return floor_key(_stream(stream))


def _slot(stream: str, slot: int) -> bytes:
    return slot_key(_stream(stream), slot)


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() else 0
