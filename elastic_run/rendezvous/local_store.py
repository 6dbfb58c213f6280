"""The store of a round that has one node: torch's Store methods over a dictionary, for agents written against torch.

There is no other node that could ever set a missing key. So asking for one fails at once, with the error that torch
gives after its timeout, instead of blocking the agent. In a program that has imported torch the store is torch's own,
so that `PrefixStore("x", store)` and `init_process_group(store=store)` take it; torch is never imported here.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.rendezvous.api import Store
    from elastic_run.store.tcpstore.memory_store import MemoryStore

__all__ = ["LocalStore", "find_torch_stores", "make_local_store"]


def make_local_store() -> Store:
    """Return an empty store for the one agent of a round: torch's where the program has imported torch, else ours."""
    torch_stores = find_torch_stores()
    if torch_stores is None:
        return LocalStore()
    made: Store = torch_stores.HashStore()
    return made


def find_torch_stores() -> Any | None:
    """Return `torch.distributed` where the program has it, built with its stores and imported to the end."""
    module = sys.modules.get("torch.distributed")
    return module if hasattr(module, "TCPStore") and hasattr(module, "HashStore") else None


class LocalStore:
    """Keys and values of one node's agent; text is taken for its UTF-8 bytes, as by torch."""

    def __init__(self) -> None:
        self._made: MemoryStore | None = None

    @property
    def _data(self) -> MemoryStore:
        if self._made is None:
            from elastic_run.store.tcpstore.memory_store import MemoryStore

            self._made = MemoryStore()
        return self._made

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._data.set(_bytes(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value.

        Raises:
            StoreTimeoutError: The key is missing.
        """
        (value,) = self.multi_get([key])
        return value

    def add(self, key: str, amount: int) -> int:
        """Count a key up, from 0 when missing, and return the sum.

        Raises:
            ValueError: The value there is not a number.
        """
        return self._data.add(_bytes(key), amount)

    def append(self, key: str, value: str | bytes) -> None:
        """Put bytes behind a key's value."""
        self._data.append(_bytes(key), _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is the expected one, or missing with nothing expected; return the value now."""
        return self._data.compare_set(_bytes(key), _bytes(expected), _bytes(desired))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the keys' values.

        Raises:
            StoreTimeoutError: One is missing.
        """
        found = self._data.multi_get([_bytes(key) for key in keys])
        values = [value for value in found if value is not None]
        if len(values) < len(found):
            raise _missing(keys[found.index(None)])
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give each key its value.

        Raises:
            ValueError: There are not as many values as keys.
        """
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self._data.check([_bytes(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:  # noqa: ARG002 - torch's signature
        """Return if all keys are there. Nobody else can set one, so the timeout is not used.

        Raises:
            StoreTimeoutError: One is missing.
        """
        for key in keys:
            if not self.check([key]):
                raise _missing(key)

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it was there."""
        return self._data.delete_key(_bytes(key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._data.num_keys()


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def _missing(key: str) -> Exception:
    from elastic_run.store.errors import StoreTimeoutError

    return StoreTimeoutError(f"key {key!r} is not in the store of this round, and no other node could set it")
