"""Values of a program, and the explanation of a start by other ways than the command."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import launch as legacy
from elastic_run.agent.api import WorkerSpec
from elastic_run.launcher import LaunchConfig, elastic_launch
from elastic_run.run import main, parse_args, run, run_command

if TYPE_CHECKING:
    from pathlib import Path


# --- values of a program ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nproc_per_node": 10**400}, "^nproc_per_node is above the limit of 65536 workers on a node$"),
        ({"role": "\xe9" * 3000}, "^role: .* has 6000 bytes, and 4096 are allowed$"),
        ({"run_id": "x" * 5000}, "^run_id: .* has 5000 bytes, and 4096 are allowed$"),
        ({"run_id": "\udcff"}, r"^run_id: '\\udcff' is not UTF-8$"),
        ({"max_restarts": -1}, "^max_restarts: '-1' is not a whole number from 0 up$"),
    ],
)
def test_a_value_that_can_not_be_meant_is_refused(values: dict[str, Any], said: str) -> None:
    """Such a name was too long for the nodes' messages, and so many workers were counted for minutes."""
    with pytest.raises(ValueError, match=said):
        LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, **values})


def test_no_number_is_no_interval() -> None:
    """As torch refuses an interval of 0."""
    with pytest.raises(AssertionError, match="monitor_interval must be above 0, got nan"):
        WorkerSpec("worker", 1, None, entrypoint="true", monitor_interval=math.nan)  # type: ignore[arg-type]


def test_no_name_and_no_endpoint_are_empty() -> None:
    """A program may pass on flags that its user has left out; torch runs such a job."""
    left_out: Any = None
    config = LaunchConfig(1, 1, 1, rdzv_backend="local", run_id=left_out, rdzv_endpoint=left_out)
    assert (config.run_id, config.rdzv_endpoint) == ("", "")
    assert elastic_launch(config, "true")() == {0: None}


# --- --explain --------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a directory with a script, without variables of a launcher and without a way to start anything."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("PET_", "TORCH", "OMP_", "SLURM_")):
            monkeypatch.delenv(name)
    (tmp_path / "train.py").touch()

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    for name in ("launch_job", "make_agent_context", "elastic_launch"):
        monkeypatch.setattr(f"elastic_run.launcher.{name}", refuse)
    return tmp_path


def test_a_program_gets_the_explanation_and_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    """`main` prints it and returns, since nothing failed."""
    main(["--explain", "--role=r", "train.py"])
    assert "  --role=r                                  flag\n" in capfd.readouterr().out


def test_a_value_that_a_program_has_set_is_said_to_be_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A namespace does not tell where its values come from; those that are no default are the program's."""
    args = parse_args(["--explain", "train.py"])
    args.role = "r"
    run(args)
    out = capsys.readouterr().out
    assert "  --role=r                                  the calling program\n" in out
    assert "--master-port" not in out


def test_the_legacy_front_door_explains_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the workers has the argument that this front door adds."""
    legacy.run_legacy_command(["--explain", "train.py"])
    assert "-u train.py '--local-rank=${local_rank}'\n" in capsys.readouterr().out


def test_nothing_is_made_or_set(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the log directory is made nor a variable set; the values are shown nevertheless."""
    run_command(["--explain", "--nproc-per-node=2", "--log-dir=logs/deep", "--tee=3", "train.py"])
    assert [path.name for path in place.iterdir()] == ["train.py"]
    assert "OMP_NUM_THREADS" not in os.environ
    out = capsys.readouterr().out
    assert "--log-dir=logs/deep" in out
    assert "OMP_NUM_THREADS=1 " in out


def test_the_handler_of_a_plugin_is_not_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code of others may open connections when it makes a handler."""
    monkeypatch.setattr("elastic_run.cli.checks._check_plugin_backend", lambda _: None)
    monkeypatch.setattr("elastic_run.launch_config.get_rendezvous_handler", lambda _: pytest.fail("it was made"))
    run_command(["--explain", "--rdzv-backend=mine", "--nnodes=2", "--rdzv-id=j", "train.py"])
    assert "mine (plug-in), job j: the store is at an address that the plug-in knows\n" in capsys.readouterr().out


def test_a_host_without_a_network_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A store at loopback is of no use to other nodes, and the explanation says so before they wait."""
    monkeypatch.setattr("elastic_run.rendezvous.addresses.find_outward_address", lambda: "127.0.0.1")
    run_command(["--explain", "--nnodes=2", "train.py"])
    assert "at 127.0.0.1, which only this host can reach, on a free port" in capsys.readouterr().out
