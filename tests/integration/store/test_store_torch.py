"""Torch's own client and process groups on our store, and our client on torch's server: no difference can be told."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_run.store.tcpstore.client import StoreClient
from elastic_run.store.tcpstore.worker_store import open_worker_store
from tests.compat.torch_versions import (
    expected_sums,
    perform_gloo_cycles,
    perform_operations,
    perform_operations_on_torchs_server,
)
from tests.support.store import ServedStore


def test_every_operation_of_torchs_client() -> None:
    """Torch's client gets from our server, for every operation it has, what it gets from torch's own server."""
    with ServedStore() as store, ThreadPoolExecutor() as pool:
        theirs = pool.submit(perform_operations_on_torchs_server, sys.executable)
        ours = perform_operations(sys.executable, store.port)
        assert ours == theirs.result()
        assert store.unknown == []
    operations = {line.split(" ")[0] for line in ours}
    assert operations >= {"set", "get", "add", "compare_set", "multi_get", "queue_pop", "barrier", "clone", "prefix"}


@pytest.mark.long
def test_ten_process_groups_in_one_life() -> None:
    """Two workers form, use and part ten gloo groups in one life over the agent's store, under a prefix each."""
    with ServedStore() as store:
        assert perform_gloo_cycles(sys.executable, store.port, prefix="/worker/attempt_") == expected_sums()
        assert store.unknown == []


@pytest.mark.long
def test_rank_0_serves_on_the_port_that_was_kept() -> None:
    """In mode rank0 torch's rank 0 can listen on the port that the agent holds for it."""
    store = open_worker_store(by_agent=False, port=None)
    try:
        sums = perform_gloo_cycles(sys.executable, store.port, cycles=1, use_agent_store=store.use_agent_store)
    finally:
        store.close()
    assert sums == expected_sums(1)


@pytest.mark.long
def test_our_client_on_torchs_server() -> None:
    """Our client's operations on torch's server give what they give on ours."""
    program = (
        "import sys; from torch.distributed import TCPStore;"
        "s = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False); print(s.port, flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "RES_OPTIONS": "attempts:0"}
    with (
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        ) as torch,
        ServedStore() as store,
    ):
        assert torch.stdout is not None
        port = int(torch.stdout.readline())
        assert converse(port) == converse(store.port)
        torch.kill()


def converse(port: int) -> list[object]:
    """Perform each of our client's operations, and return what they gave."""
    with StoreClient("127.0.0.1", port, timeout=20) as client, client.clone() as other:
        client.set("k", "v")
        client.append("k", b"w")
        client.multi_set(["a", "b"], ["1", "x" * 5_000_000])
        client.queue_push("q", "1")
        values: list[object] = [
            other.get("k"),
            client.add("n", 3),
            client.compare_set("k", "vw", "x"),
            client.compare_set("no", "x", "y"),
            other.multi_get(["a", "k"]),
            len(other.get("b")),
            (client.check(["a", "n"]), client.check(["no"])),
            client.queue_len("q"),
            client.queue_pop("q"),
            client.num_keys(),
            sorted(client.list_keys()),
            (client.delete_key("a"), client.delete_key("a")),
        ]
        client.barrier("one", 1)
        with pytest.raises(TimeoutError):
            client.wait(["k", "no"], 0.05)
        with pytest.raises(TimeoutError):
            client.barrier("two", 2, 0.05)
        return [*values, client.get("k")]
