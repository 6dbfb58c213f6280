"""torch's helpers under our launcher, and the types that programs see."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from elastic_run.agent.health_check_server import HealthCheckServer, create_healthcheck_server
from elastic_run.rendezvous import EtcdServer
from elastic_run.rendezvous.etcd_server import stop_etcd
from tests.support.wait import DEADLINE

ROOT = Path(__file__).parents[3]


def test_the_health_check_server_is_a_seam(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps what it is given, serves nothing, and says so."""
    server = create_healthcheck_server(lambda: 7, 8080, 60)
    assert isinstance(server, HealthCheckServer)
    assert server.alive_callback() == 7
    with caplog.at_level(logging.WARNING):
        server.start()
    server.stop()
    assert "nothing answers on 8080" in caplog.text


@pytest.mark.parametrize("package", ["elastic_run", pytest.param("torch.distributed.elastic", marks=pytest.mark.long)])
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


# --- types ------------------------------------------------------------------------------------------------------------
_ROOT = Path(__file__).parents[3]
_BINARIES = Path(sys.executable).parent


@pytest.mark.long
def test_no_public_type_is_unknown() -> None:
    """Every public name has a type that pyright knows, torch's own left aside."""
    # It takes the interpreter that is first on PATH, whatever --pythonpath says.
    environment = {**os.environ, "PATH": os.pathsep.join([str(_BINARIES), os.environ["PATH"]])}
    command = [str(_BINARIES / "basedpyright"), "--verifytypes", "elastic_run", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    names = {symbol["name"] for symbol in symbols if symbol["isExported"]}
    assert {"elastic_run.launcher.elastic_launch", "elastic_run.worker.sampler.ElasticSampler.track"} <= names
    assert not [each for each in symbols if not each["isTypeKnown"] and not each["isTypeAmbiguous"]]
