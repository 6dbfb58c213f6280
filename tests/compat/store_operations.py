"""Torch's own TCPStore client performs every operation it knows, and prints what each gave, one line each.

Run as a script under any torch: `python store_operations.py PORT`. It leaves the judgement to its caller, who compares
the lines with those that the same client printed against torch's own server.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # torch doesn't list its own names

if TYPE_CHECKING:
    from collections.abc import Callable

_LONG = timedelta(seconds=20)
#: What a wait gets that must run out of time.
_SHORT = timedelta(milliseconds=100)
_MIB = 1 << 20


class Script:
    """Performs operations on a store and writes down what they gave.

    Args:
        port: Where the store is.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.store = self.client()

    def client(self, timeout: timedelta = _LONG, world_size: int | None = None) -> Any:
        """Return a new connection, with this timeout for what it waits for."""
        client = TCPStore("127.0.0.1", self._port, world_size, is_master=False, timeout=_LONG, wait_for_workers=True)
        client.set_timeout(timeout)
        return client

    def note(self, what: str, operation: Callable[[], object]) -> None:
        """Perform one operation and print its result, or the kind of its error."""
        try:
            given = repr(operation())
        except (RuntimeError, ValueError) as error:
            given = f"raises {type(error).__name__}"
        print(f"{what} -> {given[:200]}", flush=True)  # noqa: T201

    def run(self) -> None:
        """Perform them all."""
        self.values()
        self.comparisons()
        self.counters()
        self.lists()
        self.waits()
        self.prefixes()
        self.sizes()
        if hasattr(TCPStore, "queue_push"):
            self.queues()
        if hasattr(TCPStore, "barrier"):
            self.barriers()
        if hasattr(TCPStore, "clone"):
            self.clones()
        self.refusals()
        self.note("keys at the end", self.store.num_keys)

    def values(self) -> None:
        """Set, get, check, delete, and the rendezvous of a world."""
        store = self.store
        self.note("set", lambda: store.set("key", "value"))
        self.note("get", lambda: store.get("key"))
        self.note("set again", lambda: (store.set("key", "other"), store.get("key")))
        self.note("set empty", lambda: (store.set("empty", ""), store.get("empty")))
        self.note("set beyond ASCII", lambda: (store.set("clé €", "ключ"), store.get("clé €")))
        self.note("set empty key", lambda: (store.set("", "nameless"), store.get("")))
        self.note("check", lambda: (store.check(["key"]), store.check(["key", "no"]), store.check([])))
        self.note("num_keys", store.num_keys)
        self.note("delete_key", lambda: (store.delete_key("key"), store.delete_key("key"), store.check(["key"])))
        self.note("world of one", lambda: self.client(world_size=1).num_keys())

    def comparisons(self) -> None:
        """compare_set in each of its cases."""
        for label, key, expected, desired in (
            ("missing, one expected", "c", "x", "y"),
            ("missing, none expected", "c", "", "y"),
            ("missing, none expected, none desired", "c2", "", ""),
            ("another expected", "c", "z", "w"),
            ("none expected of one", "c", "", "w"),
            ("as expected", "c", "y", "w"),
            ("emptied", "c", "w", ""),
            ("empty as expected", "c", "", "v"),
        ):
            self.note(f"compare_set {label}", partial(self.compare, key, expected, desired))

    def compare(self, key: str, expected: str, desired: str) -> object:
        """Compare and set once, and look whether the key is there."""
        return self.store.compare_set(key, expected, desired), self.store.check([key])

    def counters(self) -> None:
        """Add, on what add, set and append left."""
        store = self.store
        self.note("add", lambda: (store.add("n", 1), store.add("n", 41), store.add("n", -50), store.get("n")))
        self.note("add to text", lambda: (store.set("t", "12"), store.add("t", 3), store.get("t")))
        self.note("add to space and rest", lambda: (store.set("t", " \t+7 apples"), store.add("t", 1)))
        self.note("add to minus", lambda: (store.set("t", "-0012"), store.add("t", 1)))
        self.note("add beyond 64 bits", lambda: (store.set("t", str(2**63 - 1)), store.add("t", 2), store.get("t")))
        self.note("append", lambda: (store.append("a", "1"), store.append("a", "2"), store.get("a")))
        self.note("add to appended", lambda: (store.add("a", 30), store.append("a", "0"), store.get("a")))

    def lists(self) -> None:
        """Many keys at once."""
        store = self.store
        keys = [f"many/{number}" for number in range(2000)]
        self.note("multi_set", lambda: store.multi_set(["m1", "m2", "m1"], ["1", "2", "3"]))
        self.note("multi_get", lambda: store.multi_get(["m2", "m1", "m2"]))
        self.note("multi of none", lambda: (store.multi_set([], []), store.multi_get([])))
        self.note("multi_set many", lambda: store.multi_set(keys, keys))
        self.note("multi_get many", lambda: store.multi_get(keys) == [key.encode() for key in keys])
        self.note("check many", lambda: (store.check(keys), store.check([*keys, "no"])))
        self.note("delete many", lambda: sum(store.delete_key(key) for key in keys))
        if hasattr(TCPStore, "list_keys"):
            self.note("list_keys", lambda: sorted(store.list_keys()))

    def waits(self) -> None:
        """Wait for what is there, for what comes, and in vain."""
        store = self.store
        self.note("wait for what is there", lambda: store.wait(["m1", "m2"], _SHORT))
        self.note("wait for nothing", lambda: store.wait([], _SHORT))
        self.note("wait in vain", lambda: store.wait(["m1", "no"], _SHORT))
        self.note("go on after it", lambda: store.get("m1"))
        impatient = self.client(_SHORT)
        self.note("get in vain", lambda: impatient.get("no"))
        self.note("multi_get in vain", lambda: impatient.multi_get(["m1", "no"]))
        self.note("go on after them", lambda: (impatient.add("n", 1), impatient.get("m2")))
        for label, appear in (
            ("set", lambda key: store.set(key, "there")),
            ("add", lambda key: store.add(key, 5)),
            ("append", lambda key: store.append(key, "there")),
            ("compare_set", lambda key: store.compare_set(key, "", "there")),
            ("multi_set", lambda key: store.multi_set(["m1", key], ["1", "there"])),
        ):
            self.note(f"woken by {label}", partial(self.meet, f"w/{label}", appear))

    def meet(self, key: str, appear: Callable[[str], object]) -> object:
        """Let eight clients get a key that isn't there yet, and make it appear."""
        got: list[bytes] = []
        clients = [self.client() for _ in range(8)]

        def get(client: Any) -> None:
            client.add(key + "/ready", 1)
            got.append(client.get(key))

        threads = [threading.Thread(target=get, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        while self.store.add(key + "/ready", 0) < len(threads):
            pass
        appear(key)
        for thread in threads:
            thread.join()
        return got

    def prefixes(self) -> None:
        """The same through one and two prefixes."""
        outer: Any = PrefixStore("outer", self.store)
        inner: Any = PrefixStore("inner", outer)
        self.note("prefix set", lambda: (inner.set("k", "v"), inner.get("k"), outer.get("inner/k")))
        self.note("prefix on the wire", lambda: self.store.get("outer/inner/k"))
        self.note("prefix add", lambda: (inner.add("n", 2), outer.add("inner/n", 3)))
        self.note("prefix multi", lambda: (inner.multi_set(["a", "b"], ["1", "2"]), inner.multi_get(["b", "a"])))
        self.note("prefix compare_set", lambda: (inner.compare_set("k", "v", "w"), inner.append("k", "x")))
        self.note("prefix check", lambda: (inner.check(["k"]), inner.check(["no"]), inner.num_keys()))
        self.note("prefix wait", lambda: (inner.wait(["k"], _SHORT), inner.wait(["no"], _SHORT)))
        self.note("prefix delete", lambda: (inner.delete_key("k"), outer.check(["inner/k"])))

    def sizes(self) -> None:
        """Values up to the limit, and keys."""
        store = self.store
        largest = "x" * (8 * _MIB)
        self.note("8 MiB", lambda: (store.set("big", largest), store.get("big") == largest.encode()))
        self.note(
            "8 MiB again", lambda: store.multi_get(["big", "m1", "big"]) == [largest.encode(), b"1", largest.encode()]
        )
        self.note("append to 8 MiB", lambda: (store.append("big", "y"), len(store.get("big")), store.delete_key("big")))
        self.note("longest key", lambda: (store.set("k" * 8191, "1"), store.delete_key("k" * 8191)))

    def queues(self) -> None:
        """Push, pop, length, and a pop that waits."""
        store = self.store
        self.note("queue_len of none", lambda: store.queue_len("q"))
        self.note("queue_push", lambda: (store.queue_push("q", "1"), store.queue_push("q", "2"), store.queue_len("q")))
        self.note("a queue as a key", lambda: (store.check(["q"]), store.num_keys(), store.delete_key("q")))
        self.note("queue_pop", lambda: (store.queue_pop("q"), store.queue_pop("q", False), store.check(["q"])))
        self.note("queue_pop of none", lambda: store.queue_pop("q", False))
        self.note("queue_pop in vain", lambda: self.client(_SHORT).queue_pop("q"))
        self.note("queue_pop woken", self.pop_all)
        prefixed: Any = PrefixStore("p", store)
        self.note("prefix queue", lambda: (prefixed.queue_push("q", "3"), store.queue_pop("p/q")))

    def pop_all(self) -> object:
        """Let four clients wait for a queue that gets four values one by one."""
        got: list[bytes] = []

        def pop(client: Any) -> None:
            while True:
                try:
                    got.append(client.queue_pop("w"))
                except torch.distributed.QueueEmptyError:
                    continue  # another client was faster between the wait and the pop
                return

        threads = [threading.Thread(target=pop, args=(self.client(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(4):
            self.store.queue_push("w", str(number))
        for thread in threads:
            thread.join()
        return sorted(got), self.store.queue_len("w")

    def barriers(self) -> None:
        """A barrier of one, of three, and in vain."""
        store = self.store
        self.note("barrier of one", lambda: (store.barrier("b1", 1), store.barrier("b1", 1), store.get("b1")))
        self.note("barrier in vain", lambda: store.barrier("b2", 2, _SHORT))
        self.note("barrier after all", lambda: store.barrier("b2", 2, _SHORT))
        self.note("barrier of three", self.cross)

    def cross(self) -> object:
        """Let three clients come to a barrier."""
        threads = [threading.Thread(target=lambda: self.client().barrier("b3", 3)) for _ in range(2)]
        for thread in threads:
            thread.start()
        self.store.barrier("b3", 3)
        for thread in threads:
            thread.join()
        return self.store.get("b3")

    def clones(self) -> None:
        """A clone sees what its origin did, and has a connection of its own."""
        clone = self.store.clone()
        self.note("clone", lambda: (self.store.set("cl", "1"), clone.get("cl"), clone.add("cl", 1)))
        self.note("clone in vain", lambda: clone.wait(["no"], _SHORT))
        self.note("origin after it", lambda: self.store.get("cl"))

    def refusals(self) -> None:
        """What closes a client's connection, and harms no other."""
        for label, refuse in (
            ("add to words", lambda client: (client.set("t", "many"), client.add("t", 1))),
            ("add to nothing", lambda client: (client.set("t", ""), client.add("t", 1))),
            ("add to too much", lambda client: (client.set("t", "9" * 30), client.add("t", 1))),
            ("too long a key", lambda client: (client.set("k" * 8192, "1"), client.get("m1"))),
            ("too long a value", lambda client: (client.set("v", "x" * (8 * _MIB + 1)), client.get("m1"))),
        ):
            self.note(label, partial(refuse, self.client()))
            self.note("others after it", lambda: self.store.get("m1"))


if __name__ == "__main__":
    print(f"torch {torch.__version__}", flush=True)  # noqa: T201
    Script(int(sys.argv[1])).run()
