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


# --- types ------------------------------------------------------------------------------------------------------------
_ROOT = Path(__file__).parents[3]
_BINARIES = Path(sys.executable).parent


@pytest.mark.long
def test_no_public_type_is_unknown() -> None:
    """Every public name has a type that pyright knows, torch's own left aside."""
    # It takes the interpreter that is first on PATH, whatever --pythonpath says.
    environment = {**os.environ, "PATH": os.pathsep.join([str(_BINARIES), os.environ["PATH"]])}
    # On a busy machine it takes minutes. The limit is below pytest's, so that a failure names the command.
    command = [str(_BINARIES / "basedpyright"), "--verifytypes", "elastic_run", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    names = {symbol["name"] for symbol in symbols if symbol["isExported"]}
    assert {"elastic_run.launcher.elastic_launch", "elastic_run.worker.sampler.ElasticSampler.track"} <= names
    assert not [each for each in symbols if not each["isTypeKnown"] and not each["isTypeAmbiguous"]]
