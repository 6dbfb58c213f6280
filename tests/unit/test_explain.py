"""`--explain` by other ways than the command: programs, the legacy front door, plug-ins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elastic_run import launch as legacy
from elastic_run.run import main, parse_args, run, run_command

if TYPE_CHECKING:
    from pathlib import Path


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

    for name in ("launch_config.launch_job", "launch_config.make_agent_context", "launcher.elastic_launch"):
        monkeypatch.setattr(f"elastic_run.{name}", refuse)
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
