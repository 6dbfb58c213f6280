"""`record`, error files and ChildFailedError: one format with torch's, both ways."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.multiprocessing import errors as torch_errors

from elastic_run.multiprocessing import errors
from elastic_run.multiprocessing.errors.error_file import write_parent_error_file
from tests.support.job_results import worker_end
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from tests.support.launch import Launch


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


@pytest.mark.parametrize("package", OURS_OR_LONG)
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


# --- error.json written by torch and by us, read by us and by torch ---------------------------------------------------
OURS, TORCHS = "elastic_run.multiprocessing.errors", "torch.distributed.elastic.multiprocessing.errors"

#: How a worker may end -> its main function's body.
ENDS = {
    "exception": "raise ValueError('bad batch 17')",
    "chained": "try:\n        {}['a']\n    except KeyError as error:\n        raise OSError(5, 'lost') from error",
    "unicode": "raise RuntimeError('日本 \\udcff')",
    "exit_3": "raise SystemExit(3)",
    "exit_0": "raise SystemExit(0)",
    "success": "pass",
}
#: Forks a worker for each end, so that torch is imported once.
DRIVER = """
import json, os, runpy, sys
from {package} import record
codes = {{}}
for name in sys.argv[1:]:
    worker = os.fork()
    if not worker:
        os.environ["TORCHELASTIC_ERROR_FILE"] = name + ".json"
        runpy.run_path(name + ".py", run_name="__main__")
        sys.exit(0)
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
print(json.dumps({{"codes": codes, "has_torch": "torch" in sys.modules}}))
"""


class Recorded:
    """What workers of a package recorded, and with which codes they ended."""

    def __init__(self, directory: Path, package: str) -> None:
        self.directory = directory
        for name, body in ENDS.items():
            text = f"from {package} import record\n@record\ndef main():\n    {body}\nmain()\n"
            (directory / f"{name}.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-c", DRIVER.format(package=package), *ENDS]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, cwd=directory, stdout=subprocess.PIPE, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        self.codes: dict[str, int] = result["codes"]
        self.has_torch: bool = result["has_torch"]

    def load(self, name: str) -> dict[str, Any] | None:
        """Return what a worker recorded, or None."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            return None
        contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return contents


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """Run every worker with our @record and with torch's."""
    return {package: Recorded(tmp_path_factory.mktemp(package), package) for package in (OURS, TORCHS)}


def shape(value: object) -> object:
    """Return what a JSON value is made of, without its contents."""
    return {key: shape(part) for key, part in value.items()} if isinstance(value, dict) else type(value).__name__


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_record_writes_what_torch_s_writes(recordings: dict[str, Recorded], end: str) -> None:
    """Same exit code, same structure, same message, and a traceback with the same end."""
    ours, torchs = recordings[OURS], recordings[TORCHS]
    assert ours.codes[end] == torchs.codes[end]
    mine, theirs = ours.load(end), torchs.load(end)
    assert shape(mine) == shape(theirs)
    if mine is not None and theirs is not None:
        assert mine["message"]["message"] == theirs["message"]["message"]
        ends = [data["message"]["extraInfo"]["py_callstack"].splitlines()[-3:] for data in (mine, theirs)]
        assert ends[0] == ends[1]


@pytest.mark.long
def test_our_record_needs_no_torch(recordings: dict[str, Recorded]) -> None:
    """A script that only wants to be recorded starts without torch."""
    assert not recordings[OURS].has_torch
    assert recordings[TORCHS].has_torch


def fields(failure: object) -> dict[str, Any]:
    """Return the fields that a torch program reads."""
    names = ("local_rank", "pid", "exitcode", "error_file", "error_file_data", "timestamp")
    return {name: getattr(failure, name) for name in names} | {"signal": failure.signal_name()}  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("package", [OURS, TORCHS])
@pytest.mark.parametrize("exitcode", [1, -9])
def test_each_reads_the_other_s_file_alike(recordings: dict[str, Recorded], package: str, exitcode: int) -> None:
    """ProcessFailure of torch and ours agree on every field, whoever wrote the file."""
    path = str(recordings[package].directory / "chained.json")
    ours: Any = errors.ProcessFailure(2, 7, exitcode, path)
    torchs: Any = torch_errors.ProcessFailure(2, 7, exitcode, path)
    assert fields(ours) == fields(torchs)
    assert ours.message == torchs.message
    assert ours.timestamp_isoformat() == torchs.timestamp_isoformat()


@pytest.mark.parametrize("exitcode", [1, -9])
def test_failures_without_a_file_are_alike(exitcode: int) -> None:
    """The marks of a missing file, and the sentence on a signal, are torch's."""
    ours, torchs = errors.ProcessFailure(2, 7, exitcode, "/no"), torch_errors.ProcessFailure(2, 7, exitcode, "/no")
    mine, theirs = fields(ours), fields(torchs)
    assert abs(mine.pop("timestamp") - theirs.pop("timestamp")) < 60
    if exitcode < 0:
        assert ours.message == torchs.message
        # torch keeps these in one dict for all failures, so they may be left from another one.
        theirs["error_file_data"] = {"message": theirs["error_file_data"]["message"]}
    assert mine == theirs


@pytest.mark.parametrize("exitcode", [1, -11])
@pytest.mark.parametrize("message", [{"message": "E: x", "extraInfo": {"timestamp": "5"}}, "plain"])
def test_the_parent_s_file_is_torch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: object, exitcode: int
) -> None:
    """Copied by our launcher, by our handler and by torch's: the same contents."""
    child = tmp_path / "child.json"
    child.write_text(json.dumps({"message": message}), encoding="utf-8")
    written = []
    for name in ("torch", "handler", "launcher"):
        path = tmp_path / f"{name}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if name == "launcher":
            write_parent_error_file(worker_end(0, exitcode, error_file=str(child)), os.environ)
        else:
            package = torch_errors if name == "torch" else errors
            package.get_error_handler().dump_error_file(str(child), exitcode)
        written.append(json.loads(path.read_text(encoding="utf-8")))
    assert written[0] == written[1] == written[2]


def test_a_composed_parent_s_file_is_read_by_torch(tmp_path: Path) -> None:
    """Where torch would have written nothing, torch can read what we wrote."""
    path = tmp_path / "parent.json"
    root = worker_end(0, 1, 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: x\n')
    write_parent_error_file(root, {"TORCHELASTIC_ERROR_FILE": str(path)})
    failure: Any = torch_errors.ProcessFailure(0, 7, 1, str(path))
    assert failure.message["message"] == "ValueError: x"
    assert failure.message["errorCode"] == 1
    assert "ValueError: x" in str(torch_errors.ChildFailedError("t.py", {0: failure}))


def _failures(package: Any, tmp_path: Path) -> dict[int, Any]:
    recorded = tmp_path / "error.json"
    message = {"message": "ValueError: bad", "extraInfo": {"py_callstack": CALLSTACK, "timestamp": "1700000000"}}
    recorded.write_text(json.dumps({"message": message}), encoding="utf-8")
    ends = {0: (-9, "", 11), 2: (1, str(recorded), 12), 5: (3, "", 13)}
    return {rank: package.ProcessFailure(rank, pid, code, file) for rank, (code, file, pid) in ends.items()}


CALLSTACK = "Traceback (most recent call last):\n  File 'a.py', line 1, in f\nValueError: bad\n"


@pytest.mark.parametrize("ranks", [(0, 2, 5), (2,), (0,)])
def test_the_exception_s_text_is_torchs(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Whoever searches the text of a ChildFailedError finds torch's lines, and where nothing is known torch's words."""
    texts = []
    for package in (torch_errors, errors):
        failures = {rank: failure for rank, failure in _failures(package, tmp_path).items() if rank in ranks}
        text = str(package.ChildFailedError("train.py", failures))
        # Torch asks the name service for the host; the time of what was not recorded is now.
        text = re.sub(r"(?m)^  (time      : 20(?!23)|host      : ).*", "", text)
        texts.append([line.rstrip() for line in text.splitlines() if line.strip()])
    theirs, ours = texts
    assert len(theirs) == len(ours)
    for expected, found in zip(theirs, ours, strict=True):
        said = expected.removeprefix("  traceback : ")
        assert expected == found or (said != expected and said in found)
