"""Functions for programs with a store of torch's: which ranks are missing at a barrier, and which ports are tried."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.utils import distributed
from elastic_run.utils import store as torch_store

if TYPE_CHECKING:
    from collections.abc import Callable


class StoreError(RuntimeError):
    """The error of a store if a key does not come in time."""


class Store:
    """A store in which some keys are; it notes for which others it waits, and how long."""

    def __init__(self, *keys: str) -> None:
        self.keys = set(keys)
        self.waits: list[tuple[str, timedelta]] = []
        self.timeout = timedelta(seconds=5)

    def set(self, key: str, _: str) -> None:
        """Set a value."""
        self.keys.add(key)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        """Wait for a value."""
        if keys[0] not in self.keys:
            self.waits.append((keys[0], limit))
            raise StoreError


@pytest.fixture(autouse=True)
def _stands_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "_store_error", lambda: StoreError)


def find_missing(store: Any, rank: int, size: int = 20) -> list[str] | None:
    """Return the ranks that one rank finds missing."""
    return torch_store._find_missing(store, size, "barrier", rank, lambda number: f"host{number}", timedelta(seconds=1))


def test_sixteen_missing_ranks_are_looked_for() -> None:
    """Rank 0 waits for the first of them only; meanwhile the present ranks write their keys. Then it writes its own."""
    present = {f"barrier3{torch_store._PRESENT}", f"barrier5{torch_store._PRESENT}"}
    store = Store(*present)
    missing = [number for number in range(1, 20) if number not in {3, 5}][:16]
    assert find_missing(store, 0) == [f"host{number}" for number in missing]
    assert [limit.total_seconds() for _, limit in store.waits] == [1.0] + [0.001] * 15
    assert store.keys == {*present, f"barrier0{torch_store._PRESENT}", f"barrier{torch_store._TOLD}"}
    assert find_missing(Store(*present), 0, size=7) == ["host1", "host2", "host4", "host6"]


def test_other_ranks_point_to_rank_0_or_know_nothing() -> None:
    """They wait until rank 0 has looked for the missing ranks. If rank 0 is missing too, the error is torch's own."""
    assert find_missing(Store(f"barrier{torch_store._TOLD}"), 3) == ["<rank 0 (host0) knows>"]
    store = Store()
    assert find_missing(store, 3) is None
    assert store.waits == [(f"barrier{torch_store._TOLD}", timedelta(seconds=6))]
    assert store.keys == {f"barrier3{torch_store._PRESENT}"}


@pytest.mark.parametrize(("port", "tries"), [(29500, 1), (-1, 3)])
@pytest.mark.parametrize("words", ["EADDRINUSE", "Address already in use"])
def test_only_free_ports_are_tried_again(monkeypatch: pytest.MonkeyPatch, port: int, tries: int, words: str) -> None:
    """A free port is chosen again if it is taken. A port that the program names is an error at once."""
    asked: list[int] = []

    def make(_host: str, number: int, *_: object) -> object:
        asked.append(number)
        raise RuntimeError(words)

    monkeypatch.setattr(distributed, "_make_torch_store", make)
    monkeypatch.setattr(distributed, "get_free_port", lambda: 1000 + len(asked))
    with pytest.raises(RuntimeError, match=r"^port \d+ of node0 is taken$"):
        distributed.create_c10d_store(True, "node0", port)
    assert asked == ([29500] if port > 0 else [1000, 1001, 1002])[:tries]
    words = "no route"
    with pytest.raises(RuntimeError, match=r"^no route$"):
        distributed.create_c10d_store(True, "node0", port)
    assert len(asked) == tries + 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_is_there_when_all_have_come(monkeypatch: pytest.MonkeyPatch, *, waits: bool) -> None:
    """The store is returned when all ranks have come. A timeout is an error. A program may choose not to wait."""
    store = Store()
    refuse: list[Callable[[], None]] = []

    def come(*_: object, **options: object) -> None:
        assert options == {"key_prefix": "_tcp_store/num_members", "barrier_timeout": 7}
        refuse[0]()

    def fail() -> None:
        raise StoreError

    monkeypatch.setattr(distributed, "_make_torch_store", lambda *_: store)
    monkeypatch.setattr(torch_store, "barrier", come)
    refuse[:] = [lambda: None]
    arguments: tuple[Any, ...] = (True, "node0", 29500, 2, 7, waits)
    assert distributed.create_c10d_store(*arguments) is store
    refuse[:] = [fail]
    if waits:
        with pytest.raises(TimeoutError, match="not all 2 members have joined within 7 s"):
            distributed.create_c10d_store(*arguments)
    else:
        assert distributed.create_c10d_store(*arguments) is store


@pytest.mark.parametrize("options", [{"world_size": 2}, {"retries": 0}])
def test_a_store_that_nobody_could_find_is_refused(options: dict[str, Any]) -> None:
    """With several ranks the port must be known, and at least one try must be allowed."""
    with pytest.raises(ValueError, match=r"server_port has to be given for a world of 2|at least 1, got 0"):
        distributed.create_c10d_store(True, "node0", **options)
