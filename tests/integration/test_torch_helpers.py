"""Small modules of torch's that programs import beside the launcher, with stores of torch's and a real etcd."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils import store as torchs_meeting

from elastic_run.agent.health_check_server import HealthCheckServer, create_healthcheck_server
from elastic_run.rendezvous import EtcdServer
from elastic_run.rendezvous.etcd_server import stop_etcd
from elastic_run.utils import distributed, process_state
from elastic_run.utils import store as meeting
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store() -> Any:
    """Give a store of torch's that all threads may use."""
    return dist.HashStore()  # type: ignore[attr-defined] # not in torch's stubs


def in_threads(count: int, call: Callable[[int], object]) -> list[Any]:
    """Call a function once for each rank, at the same time; an exception is the result."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except Exception as error:  # noqa: BLE001 - it is looked at
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return results


def test_ranks_exchange_values_with_ranks_of_torchs(store: Any) -> None:
    """Half of the ranks call torch's function, half ours, and all get the values of all."""

    def exchange(rank: int) -> list[bytes]:
        module = (meeting, torchs_meeting)[rank % 2]
        values: list[bytes] = module.synchronize(store, str(rank).encode(), rank, 4, "exchange", timeout=DEADLINE)
        return values

    assert in_threads(4, exchange) == [[b"0", b"1", b"2", b"3"]] * 4


def test_a_timeout_is_put_back(store: Any) -> None:
    """A store has its own timeout after a meeting, and after one that failed."""
    before = store.timeout
    with pytest.raises(ValueError, match="not 0:00:07"), meeting.store_timeout(store, 7):
        raise ValueError(f"not {store.timeout}")  # noqa: EM102, TRY003 - it is looked at below
    assert store.timeout == before


def test_a_barrier_says_who_is_missing(store: Any) -> None:
    """Rank 0 names the ranks that did not come, the others point to rank 0; without ranks it is torch's timeout."""

    def come(rank: int) -> None:
        if rank != 1:
            meeting.barrier(
                store, 3, "door", 0.2, rank=rank, rank_tracing_decoder=lambda n: f"host{n}", trace_timeout=1
            )

    first, absent, third = in_threads(3, come)
    assert absent is None
    assert "missing_ranks=[host1]" in str(first)
    assert "missing_ranks=[<rank 0 (host0) knows>]" in str(third)
    assert isinstance(first, meeting.DistStoreError)
    with pytest.raises(meeting.DistStoreError):
        meeting.barrier(store, 2, "other", 0.1)
    with pytest.raises(AssertionError, match="needs rank"):
        meeting.barrier(store, 2, "third", rank_tracing_decoder=str)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        meeting.nothing  # noqa: B018 - that is the point


def test_a_barrier_opens_when_all_are_there(store: Any) -> None:
    """All ranks leave it, whoever's function they called."""
    modules = (meeting, torchs_meeting)
    assert in_threads(4, lambda rank: modules[rank % 2].barrier(store, 4, "door", DEADLINE)) == [None] * 4


def test_torchs_store_is_made_for_those_who_want_it() -> None:
    """On a free port for one, on a given port for several; a taken port and a missing one are said so."""
    single = distributed.create_c10d_store(is_server=True, server_addr="127.0.0.1", timeout=DEADLINE)
    single.set("key", "value")
    assert single.get("key") == b"value"
    port = distributed.get_free_port()
    kept = []  # a server that is forgotten ends, and others may still read

    def connect(rank: int) -> bytes:
        made = distributed.create_c10d_store(rank == 0, "127.0.0.1", port, 2, DEADLINE)
        kept.append(made)
        made.set(str(rank), "there")
        meeting.barrier(made, 2, "end", DEADLINE)
        value: bytes = made.get(str(1 - rank))
        return value

    assert in_threads(2, connect) == [b"there"] * 2
    with pytest.raises(RuntimeError, match=f"port {single.port} of 127.0.0.1 is taken"):
        distributed.create_c10d_store(True, "127.0.0.1", single.port)
    with pytest.raises(ValueError, match="server_port has to be given for a world of 2"):
        distributed.create_c10d_store(True, "127.0.0.1", world_size=2)
    with pytest.raises(ValueError, match="retries must be at least 1"):
        distributed.create_c10d_store(True, "127.0.0.1", retries=0)


def test_a_process_s_state_is_a_letter() -> None:
    """A sleeping, a stopped and an ended process; state D is the uninterruptible one."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        wait_until(lambda: process_state.read_proc_state(process.pid) == "S")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state.read_proc_state(process.pid) == "T")
        process.kill()
    assert process_state.read_proc_state(process.pid) is None
    states = ("D", "D+", "S", None)
    assert [process_state.is_uninterruptible_state(state) for state in states] == [True, True, False, False]


def test_the_health_check_server_is_a_seam(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps what it is given, serves nothing, and says so."""
    server = create_healthcheck_server(lambda: 7, 8080, 60)
    assert isinstance(server, HealthCheckServer)
    assert server.alive_callback() == 7
    with caplog.at_level(logging.WARNING):
        server.start()
    server.stop()
    assert "nothing answers on 8080" in caplog.text


@pytest.mark.parametrize("package", ["elastic_run", "torch.distributed.elastic"])
def test_a_worker_under_the_worker_server(tmp_path: Path, package: str) -> None:
    """It answers on its socket while the function runs, and an exception is recorded."""
    body = f"""
import os, socket
from {package}.control_plane import worker_main
@worker_main()
def main():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("socket")
        client.sendall(b"POST /handler/ping HTTP/1.0\\r\\n\\r\\n")
        print(client.recv(4096).decode().split()[1], flush=True)
    raise ValueError("after it")
main()
"""
    (tmp_path / "worker.py").write_text(body, encoding="utf-8")
    more = {"PYTHONPATH": str(ROOT), "TORCH_WORKER_SERVER_SOCKET": "socket", "TORCHELASTIC_ERROR_FILE": "error.json"}
    command = [sys.executable, "worker.py"]
    done = subprocess.run(
        command, env=os.environ | more, cwd=tmp_path, capture_output=True, text=True, timeout=2 * DEADLINE, check=False
    )
    assert done.stdout.split() == ["200"], done.stderr
    assert done.returncode == 1
    if (
        package == "elastic_run"
    ):  # torch's records nothing here: its @record sees only the making of the context manager
        assert "ValueError: after it" in (tmp_path / "error.json").read_text(encoding="utf-8")


@pytest.mark.system
def test_a_local_etcd_is_started_and_stopped(tmp_path: Path) -> None:
    """It answers when `start` returns, its endpoint is where it says, and `stop` leaves nothing of its own."""
    server = EtcdServer()
    own = Path(str(server._own_dir))
    server.start(timeout=int(DEADLINE), stderr=subprocess.DEVNULL)
    process = server._process
    assert process is not None
    assert server.get_endpoint() == f"localhost:{server.get_port()}"
    with urlopen(f"http://{server.get_endpoint()}/version") as answer:
        assert b"etcdserver" in answer.read()
    client = server.get_client()
    client.write("/key", "value")
    assert client.read("/key").value == "value"
    server.stop()
    server.stop()
    assert process.poll() is not None
    assert not own.exists()
    given = EtcdServer(str(tmp_path / "data"))
    given.start(timeout=int(DEADLINE), stderr=subprocess.DEVNULL)
    given.stop()
    assert (tmp_path / "data").exists()


def test_an_etcd_that_cannot_run_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program, one that ends at once, one that is silent, no python-etcd: an exception of the right class each."""
    server = EtcdServer(str(tmp_path))
    monkeypatch.setattr(server, "_program", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="nothing"):
        server.start()
    monkeypatch.setattr(server, "_program", "false")
    with pytest.raises(RuntimeError, match="false has ended with exit code 1"):
        server.start(num_retries=2)
    program = tmp_path / "silent"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 1000\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(server, "_program", str(program))
    with pytest.raises(TimeoutError, match=r"doesn't answer at localhost:\d+ after 0 s"):
        server.start(timeout=0, num_retries=1)
    monkeypatch.setitem(sys.modules, "etcd", None)
    with pytest.raises(ModuleNotFoundError, match="pip install python-etcd"):
        server.get_client()
    stop_etcd(None)
    server.stop()
