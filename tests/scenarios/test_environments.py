"""What `--explain` says in the environments that schedulers, operators and wrappers make.

A file in `environments/` begins with where its variables come from. `@host NAME` is the machine's name, `@gpus N` the
number of its GPUs, `@terminal` a terminal at stdin. `@step 41.0` is the step of Slurm in which the process is seen to
run, `@step none` means no step; without that line nothing shows a step, as in a container. Then come the variables. The
times of a recorded job are moved to the year 2286, since a time that is over does not count.
Each `$` line is a command, and the lines below it are all that it prints and its exit code if that is
not 0. After a deliberate change rewrite them all with `ELASTIC_RUN_REWRITE=1` and review the diff.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_run.cli import make_config as config
from elastic_run.run import run_command

FILES = sorted((Path(__file__).parent / "environments").glob("*.txt"))
_DIRECTORY = "/home/user/job"
_PYTHON = "/usr/bin/python3"
#: Stands for the number of the process itself.
_OWN_PID = "(own)"
_IS_REWRITTEN = bool(os.environ.get("ELASTIC_RUN_REWRITE"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Stand in a directory with a script, on a machine with an address, and without any variable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text('nnodes = 2\nmax-restarts = 3\nrole = "trainer"\n', encoding="utf-8")
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setattr("elastic_run.cli.make_config.own_interpreter", lambda: _PYTHON)
    monkeypatch.setattr("elastic_run.rendezvous.addresses.find_outward_address", lambda: "10.0.0.7")
    monkeypatch.setattr("elastic_run.store.worker_store.choose_loopback", lambda: ("localhost", ()))
    monkeypatch.setattr("os.isatty", lambda _: False)
    monkeypatch.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: None)
    return monkeypatch


def prepare(machine: pytest.MonkeyPatch, line: str) -> None:
    """Set what a line of the first part says."""
    word, _, value = line.partition(" ")
    if word == "@host":
        machine.setattr("os.uname", lambda: SimpleNamespace(nodename=value, sysname="Linux"))
        machine.setattr("socket.gethostname", lambda: value)
        machine.setattr("elastic_run.schedulers.kubernetes.full_hostname", lambda: value)
    elif word == "@gpus":
        machine.setattr(config, "_DRIVERS", ("/",))
        machine.setattr("elastic_run.cluster.devices.device_count", lambda *_, **__: int(value))
    elif word == "@step":
        machine.setattr("elastic_run.schedulers.slurm.read_running_step", lambda: "" if value == "none" else value)
    elif word == "@terminal":
        machine.setattr("os.isatty", lambda _: True)
    else:
        name, _, text = line.partition("=")
        machine.setenv(name, text.replace(_OWN_PID, str(os.getpid())))


def play(text: str, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the file with what its commands print today."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("$ "))
    machine.setattr(config, "_DRIVERS", ())
    for line in lines[:first]:
        if line and not line.startswith("#"):
            prepare(machine, line)
    played = lines[:first]
    for line in lines[first:]:
        if line.startswith("$ "):
            code: object = 0
            try:
                run_command(shlex.split(line)[2:])
            except SystemExit as ended:
                code = ended.code
            out, err = capsys.readouterr()
            printed = f"{err}{out}".replace(str(Path.cwd()), _DIRECTORY)
            played += [line, *printed.splitlines(), *([f"(exit code {code})"] if code else []), ""]
    return "\n".join(played)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_environment(path: Path, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The explanation of an environment is the one that was reviewed, and nothing was left behind."""
    text = path.read_text(encoding="utf-8")
    played = play(text, machine, capsys)
    if _IS_REWRITTEN:
        path.write_text(played, encoding="utf-8")
        text = played
    assert played == text
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["job.toml", "train.py"]
