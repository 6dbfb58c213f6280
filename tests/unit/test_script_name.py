"""The name of what the workers run: the same for honest nodes of one job, another for another job."""

from __future__ import annotations

import functools
import sys

import pytest

from elastic_run.agent.script_name import name_script
from elastic_run.multiprocessing.interpreter import RUN_PATH_CODE


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
        (sys.executable, ["-u", "-c", RUN_PATH_CODE, "here/train.py", "1"], "train.py"),
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


def test_an_interpreter_of_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper in PYTHON_EXEC counts as an interpreter: other nodes may have none."""
    monkeypatch.setenv("PYTHON_EXEC", "/opt/wrapped.sh")
    assert name_script("/opt/wrapped.sh", ["-u", "train.py"]) == "train.py"
