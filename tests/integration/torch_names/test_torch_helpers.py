"""torch's helpers under our launcher, and the types that programs see."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_run.agent.health_check_server import HealthCheckServer, create_healthcheck_server
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
