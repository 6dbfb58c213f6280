"""The types that users see: mypy and pyright (as basedpyright, which brings its own node) over typical programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

_ROOT = Path(__file__).parents[3]
_USAGE = _ROOT / "tests" / "typing"
_BINARIES = Path(sys.executable).parent
_CHECKERS = {
    "mypy": (_BINARIES / "mypy", "--config-file", _ROOT / "pyproject.toml"),
    "pyright": (_BINARIES / "basedpyright", "--pythonpath", sys.executable),
}
#: A program that takes the drop-in's types at their word, and is wrong about three of them.
_WRONG = """
from elastic_run import LaunchConfig, timer
from elastic_run.multiprocessing.errors import ProcessFailure

timer.expires(after="soon")
LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=None)
print(ProcessFailure(0, 1, 2, "").signal_name() + 1)
"""


def check(checker: str, *words: Path | str) -> subprocess.CompletedProcess[str]:
    """Run a type checker in the repository."""
    command = [str(word) for word in (*_CHECKERS[checker], *words)]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize("checker", _CHECKERS)
def test_typical_programs_have_the_types_that_they_should(checker: str) -> None:
    """Everything in tests/typing is as its assert_type says, in strict mode, without an ignore that isn't needed."""
    done = check(checker, *(["-p", _USAGE] if checker == "pyright" else [_USAGE / "usage.py"]))
    assert done.returncode == 0, done.stdout


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


@pytest.mark.parametrize("checker", _CHECKERS)
def test_a_wrong_program_is_found(checker: str, tmp_path: Path) -> None:
    """The package's types are not Any: each wrong line is told."""
    path = tmp_path / "wrong.py"
    path.write_text(_WRONG, encoding="utf-8")
    done = check(checker, path)
    assert done.returncode == 1, done.stderr
    wrong = {int(line.split(":")[1]) for line in done.stdout.splitlines() if "wrong.py:" in line and " error" in line}
    assert wrong == {5, 6, 7}, done.stdout
