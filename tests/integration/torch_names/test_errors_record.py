"""Scripts under `@record`, of ours and of torch's, as workers of real jobs, and the odd ways in which they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]

ROOT = Path(__file__).parents[3]
PACKAGES = {"ours": "elastic_run", "torch's": "torch.distributed.elastic"}
#: The same, where one of them shows the way of both.
OURS_OR_LONG = [
    pytest.param(PACKAGES["ours"], id="ours"),
    pytest.param(PACKAGES["torch's"], id="torch's", marks=pytest.mark.long),
]
SCRIPT = """
import os, sys
from {package}.multiprocessing.errors import record
@record
def main():
    {body}
main()
"""


def script(directory: Path, body: str, package: str = "elastic_run") -> Path:
    """Write a script whose main function is recorded."""
    path = directory / "train.py"
    path.write_text(SCRIPT.format(package=package, body=body.replace("\n", "\n    ")), encoding="utf-8")
    return path


def run_alone(directory: Path, body: str, error_file: str = "error.json") -> subprocess.CompletedProcess[str]:
    """Run a script as a worker would run, without a launcher."""
    more = {"PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": error_file}
    command = [sys.executable, str(script(directory, body))]
    return subprocess.run(
        command, env=os.environ | more, cwd=directory, capture_output=True, text=True, timeout=2 * DEADLINE, check=False
    )


def recorded(directory: Path) -> dict[str, Any]:
    """Return what stands in the one error.json below a directory."""
    (path,) = directory.glob("**/error.json")
    message: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["message"]
    return message


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_a_recorded_failure_is_the_cause_in_the_report(launch: Launch, tmp_path: Path, package: str) -> None:
    """Whoever's decorator it is: the exception of the rank that failed is in its error.json and in the report."""
    body = "if os.environ['RANK'] == '1':\n    raise ValueError('bad batch 17')"
    path = script(tmp_path, body, package)
    job = launch("--standalone", "--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", path, cwd=tmp_path)
    assert job.wait_exit(deadline=2 * DEADLINE) == 1
    assert recorded(tmp_path)["message"] == "ValueError: bad batch 17"
    (failure,) = tmp_path.glob("logs/**/failure.json")
    root = json.loads(failure.read_text(encoding="utf-8"))["root_cause"]
    assert (root["rank"], root["exception"]["type"], root["exception"]["message"]) == (1, "ValueError", "bad batch 17")
    assert "ValueError: bad batch 17" in job.stderr


@pytest.mark.parametrize("package", OURS_OR_LONG)
def test_a_launcher_above_reads_the_inner_job_s_cause(launch: Launch, tmp_path: Path, package: str) -> None:
    """An elastic-run inside a worker hands its root cause up; the outer report tells it, whoever's record it was."""
    inner = script(tmp_path, "raise ValueError('bad batch 17')", package)
    outer = tmp_path / "outer.sh"
    outer.write_text(f"exec {sys.executable} -m elastic_run --standalone {inner} 2>/dev/null\n", encoding="utf-8")
    flags = ["--standalone", "--no-python", f"--log-dir={tmp_path / 'logs'}"]
    job = launch(*flags, "sh", outer, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert job.wait_exit(deadline=2 * DEADLINE) == 1
    assert recorded(tmp_path)["errorCode"] == 1
    assert "ValueError: bad batch 17" in job.stderr


@pytest.mark.parametrize("package", OURS_OR_LONG)
def test_what_a_script_launched_itself_is_handed_up(tmp_path: Path, package: str) -> None:
    """Under our decorator the children's root cause is recorded, whether our launcher raised it or torch's."""
    cause = {"message": {"message": "ValueError: in the child", "extraInfo": {"timestamp": "7", "py_callstack": ""}}}
    (tmp_path / "child.json").write_text(json.dumps(cause), encoding="utf-8")
    body = f"""
from {package}.multiprocessing.errors import ChildFailedError, ProcessFailure
raise ChildFailedError("child.py", {{0: ProcessFailure(0, 7, 3, "child.json")}})"""
    assert run_alone(tmp_path, body).returncode == 1
    message = recorded(tmp_path)
    assert (message["message"], message["errorCode"]) == ("ValueError: in the child", 3)


def test_a_recorded_function_in_a_recorded_function_is_recorded_once(tmp_path: Path) -> None:
    """The file holds the innermost exception with its whole traceback, whole and not twice."""
    body = """
@record
def step():
    raise KeyError("weights")
step()"""
    done = run_alone(tmp_path, body)
    assert done.returncode == 1
    message = recorded(tmp_path)
    assert message["message"] == "KeyError: 'weights'"
    assert "in step" in message["extraInfo"]["py_callstack"]
    assert "in main" in message["extraInfo"]["py_callstack"]
    assert done.stderr.count("KeyError: 'weights'") == 1


@pytest.mark.parametrize(
    ("body", "code", "stderr"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("sys.exit(None)", 0, ""),
        ("os._exit(7)", 7, ""),
    ],
)
def test_an_exit_is_no_exception(tmp_path: Path, body: str, code: int, stderr: str) -> None:
    """SystemExit keeps its code and its message, and leaves no error file."""
    done = run_alone(tmp_path, body)
    assert (done.returncode, done.stderr.strip()) == (code, stderr)
    assert not (tmp_path / "error.json").exists()


ODD = {
    "recursion": ("def down():\n    down()\ndown()", "RecursionError: maximum recursion depth exceeded"),
    "unpicklable": (
        "class Odd(Exception):\n    def __reduce__(self):\n        raise TypeError\nraise Odd(lambda: 1)",
        "Odd: <function main.<locals>.<lambda>",
    ),
    "no repr": (
        "class Odd(Exception):\n    def __repr__(self):\n        raise TypeError\n    __str__ = __repr__\nraise Odd",
        "Odd: <its __str__ raised TypeError>",
    ),
    "huge": ("raise ValueError('x' * 1_000_000)", "ValueError: xxx"),
    "null": ("raise ValueError('a\\0b\\x1b[31m')", "ValueError: a\0b\x1b[31m"),
    "cycle": (
        "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        "ValueError: a",
    ),
    "memory": ("raise MemoryError", "MemoryError: "),
    "from": (
        "try:\n    raise OSError(5, 'lost')\nexcept OSError as e:\n    raise ValueError('a') from e",
        "ValueError: a",
    ),
}
if sys.version_info >= (3, 11):
    ODD["group"] = (
        "raise ExceptionGroup('two failed', [ValueError('a'), ExceptionGroup('inner', [OSError(5, 'lost')])])",
        "ExceptionGroup: two failed (2 sub-exceptions)",
    )
    ODD["note"] = ("e = ValueError('a')\ne.add_note('in batch 17')\nraise e", "ValueError: a")


@pytest.mark.parametrize(("body", "summary"), ODD.values(), ids=ODD)
def test_odd_exceptions_are_recorded(tmp_path: Path, body: str, summary: str) -> None:
    """Whatever is raised, the file has its summary and traceback, and the script ends as it would have without."""
    done = run_alone(tmp_path, body)
    assert done.returncode == 1
    message = recorded(tmp_path)
    assert message["message"].startswith(summary)
    assert (
        message["extraInfo"]["py_callstack"]
        .lstrip("+ ")
        .lstrip()
        .startswith(("Traceback", "Exception Group", "ValueErr"))
    )


@pytest.mark.parametrize("name", sorted({"from", "group"} & ODD.keys()))
def test_every_part_of_an_exception_is_recorded(tmp_path: Path, name: str) -> None:
    """The callstack has what an exception came from, or the members of a group."""
    run_alone(tmp_path, ODD[name][0])
    callstack = recorded(tmp_path)["extraInfo"]["py_callstack"]
    assert "ValueError: a" in callstack
    assert "[Errno 5] lost" in callstack


def test_a_full_disk_does_not_hide_the_exception(tmp_path: Path) -> None:
    """The file can't be written: a warning names it, and the exception is the script's own."""
    done = run_alone(tmp_path, "raise ValueError('bad batch 17')", "/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: bad batch 17"
    assert "the error file /dev/full can't be written: No space left on device" in done.stderr


def test_a_missing_directory_does_not_hide_the_exception(tmp_path: Path) -> None:
    """Nobody made the directory of the error file: a warning names it, and the exception is the script's own."""
    done = run_alone(tmp_path, "raise ValueError('bad batch 17')", str(tmp_path / "no" / "such" / "error.json"))
    assert done.stderr.splitlines()[-1] == "ValueError: bad batch 17"
    assert "can't be written: No such file or directory" in done.stderr
