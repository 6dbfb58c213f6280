"""The store of a round with one node."""

from __future__ import annotations

import pytest

from elastic_run.rendezvous import local
from elastic_run.rendezvous.local import LocalStore, make_local_store
from elastic_run.store.errors import StoreTimeoutError


def test_values_are_kept_as_bytes() -> None:
    """Text and bytes come back as bytes, singly and together, and are counted and removed."""
    store = LocalStore()
    store.set("a", "ä")
    store.multi_set(["b", "c"], [b"1", "2"])
    store.append("c", "3")
    assert store.get("a") == "ä".encode()
    assert store.multi_get(["b", "c"]) == [b"1", b"23"]
    assert store.num_keys() == 3
    assert store.delete_key("b")
    assert not store.delete_key("b")
    assert (store.check(["a", "c"]), store.check(["a", "b"])) == (True, False)


def test_counters_and_comparison() -> None:
    """A counter begins at 0; a value is replaced only if it is the expected one."""
    store = LocalStore()
    assert (store.add("n", 2), store.add("n", 3), store.get("n")) == (2, 5, b"5")
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "wrong", "second") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"


def test_a_missing_key_fails_at_once() -> None:
    """Nobody else can set a key, so asking for a missing one is an error that names it and doesn't block."""
    store = LocalStore()
    store.set("there", "")
    store.wait(["there"])
    for ask in (lambda: store.get("gone"), lambda: store.multi_get(["there", "gone"]), lambda: store.wait(["gone"], 9)):
        with pytest.raises(StoreTimeoutError, match=r"^key 'gone' is not in the store of this round"):
            ask()


def test_as_many_values_as_keys() -> None:
    """Keys without values are refused."""
    with pytest.raises(ValueError, match="shorter"):
        LocalStore().multi_set(["a", "b"], ["1"])


def test_a_program_without_torch_gets_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is not imported for it."""
    monkeypatch.setattr(local, "find_torch_stores", lambda: None)
    assert isinstance(make_local_store(), LocalStore)
