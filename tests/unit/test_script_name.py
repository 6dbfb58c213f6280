"""The name of what the workers run, and versions of torch: the same for honest nodes, told where they differ."""

from __future__ import annotations

import functools
import re
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from elastic_run.agent.script_name import find_script_file, name_script, program_name
from elastic_run.cluster.torch_devices import find_torch_version
from elastic_run.core.job.documents import NodeInfo, ScriptFile
from elastic_run.core.job.membership import Refused
from elastic_run.core.job.round_forming import describe_versions
from elastic_run.multiprocessing.fork_exec import make_run_path_code
from tests.support.small_job import SmallJob

if TYPE_CHECKING:
    from pathlib import Path


# --- the name of what the workers run ---------------------------------------------------------------------------------
class Trainer:
    """A worker as a program of users has it."""

    def __call__(self) -> None:
        """Train."""

    def train(self) -> None:
        """Train."""


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (sys.executable, ["-u", "/home/anna/train.py", "--lr", "1"], "train.py"),
        ("/usr/bin/python3.12", ["-u", "train.py"], "train.py"),
        ("python", ["-X", "dev", "-W", "error", "./train.py", "-m", "x"], "train.py"),
        (sys.executable, ["-u", "-m", "package.train", "--lr", "1"], "-m package.train"),
        (sys.executable, ["-u", "-c", make_run_path_code(), "here/train.py", "1"], "train.py"),
        (sys.executable, ["-c", "print(1)"], "-c"),
        (sys.executable, ["-u", "program/"], "program"),
        (sys.executable, ["-u", "-", "x"], "-"),
        (sys.executable, [], sys.executable.rpartition("/")[2]),
        ("./train.sh", ["-u", "node1"], "train.sh"),
        ("/opt/bin/tool", [], "tool"),
        (Trainer.train, [1], "Trainer.train"),
        (functools.partial(functools.partial(Trainer.train, Trainer())), [], "Trainer.train"),
        (Trainer(), [], "Trainer"),
        (f"/bin/{'x' * 300}", [], "x" * 255),
    ],
)
def test_the_name_of_what_workers_run(entrypoint: object, args: list[object], name: str) -> None:
    """A path counts by its last part, an interpreter by what it runs, a function by its qualified name."""
    assert name_script(entrypoint, args) == name


@pytest.mark.parametrize(
    ("entrypoint", "args", "name"),
    [
        (sys.executable, ("-u", "here/train.py", "x"), "here/train.py"),
        (sys.executable, ("-u", "-m", "package.train", "x"), "package.train"),
        (sys.executable, ("-u", "-c", make_run_path_code(), "here/train.py", "x"), "here/train.py"),
        ("sh", ("-c", "true"), "sh"),
        (Trainer.train, (), "Trainer.train"),
    ],
)
def test_the_name_for_reports(entrypoint: object, args: tuple[object, ...], name: str) -> None:
    """A report names the script as it was typed, also one that --run-path runs, and never the code around it."""
    assert program_name(entrypoint, args) == name


def test_an_interpreter_of_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper in PYTHON_EXEC counts as an interpreter: other nodes may have none."""
    monkeypatch.setenv("PYTHON_EXEC", "/opt/wrapped.sh")
    assert name_script("/opt/wrapped.sh", ["-u", "train.py"]) == "train.py"


@pytest.mark.parametrize("entrypoint", [sys.executable, "./train.py", "train.py"])
def test_the_file_of_a_script(entrypoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script counts by its path and its content, whether an interpreter is named or not."""
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    args = ["-u", "train.py", "--lr", "1"] if entrypoint == sys.executable else ["--lr", "1"]
    file = find_script_file(entrypoint, args)
    assert file == ScriptFile(str(script), "8-ed90a708")
    script.write_text("print(2)")
    changed = find_script_file(entrypoint, args)
    assert changed is not None
    assert changed.digest != file.digest


@pytest.mark.parametrize("words", [["-m", "package.train"], ["-c", "1"], ["-"], ["missing.py"], ["."], []])
def test_what_has_no_file(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, code, stdin, a directory and a file that isn't there count by their name alone."""
    monkeypatch.chdir(tmp_path)
    assert find_script_file("python", words) is None
    assert find_script_file(print, words) is None


def test_files_of_one_name() -> None:
    """They are one script where their path or their content is the same, and two where both differ."""
    job = SmallJob(max_nodes=9)
    job.add("a", script="train.py", script_file=ScriptFile("/a/train.py", "1"))
    for name, path, digest in (("b", "/a/train.py", "2"), ("c", "/b/train.py", "1"), ("d", "/b/train.py", "2")):
        job.add(name, script="train.py", script_file=ScriptFile(path, digest))
    job.add("e", script="train.py")
    refused = {name: one for name, told in job.commands.items() for one in told if isinstance(one, Refused)}
    assert list(refused) == ["d"]
    assert "is '/b/train.py' here and '/a/train.py' in the job" in refused["d"].detail


# --- versions of torch ------------------------------------------------------------------------------------------------
def nodes(*versions: str) -> list[NodeInfo]:
    """Return nodes h0, h1, ... with these versions."""
    return [NodeInfo(f"h{number}", 1, 1, torch=version) for number, version in enumerate(versions)]


def test_equal_and_unknown_versions_are_not_told() -> None:
    """A node that does not tell its version is no other one."""
    assert describe_versions(nodes()) == ""
    assert describe_versions(nodes("2.13.0", "", "2.13.0")) == ""


def test_the_odd_one_is_named_first() -> None:
    """The fewest hosts come first; many hosts are folded."""
    told = describe_versions(nodes("2.13.0", "2.13.0", "2.4.0", "2.13.0", "2.13.0"))
    assert told == "torch 2.4.0 on h2; torch 2.13.0 on h[0-1,3-4]"
    assert len(describe_versions(nodes(*(f"{number}" * 99 for number in range(9))))) < 300


def test_the_version_is_that_of_the_torch_that_python_imports() -> None:
    """It is read from the file of the first torch on the path."""
    assert find_torch_version(sys.path) == str(torch.__version__)


def test_a_path_without_torch_and_a_file_without_version(tmp_path: Path) -> None:
    """Neither is an error."""
    assert find_torch_version([str(tmp_path)]) == ""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("debug = False\n", encoding="utf-8")
    assert find_torch_version(["/nowhere", str(tmp_path)]) == ""
    assert re.fullmatch(r"[\d.]+\S*", find_torch_version(sys.path))
