"""error.json written by torch and by us, read by us and by torch: one format, both ways."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import errors as torch_errors

from elastic_run.multiprocessing import errors
from tests.support.job_results import worker_end

OURS, TORCHS = "elastic_run.multiprocessing.errors", "torch.distributed.elastic.multiprocessing.errors"
ROOT = Path(__file__).parents[3]

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


def test_our_record_needs_no_torch(recordings: dict[str, Recorded]) -> None:
    """A script that only wants to be recorded starts without torch."""
    assert not recordings[OURS].has_torch
    assert recordings[TORCHS].has_torch


def fields(failure: object) -> dict[str, Any]:
    """Return the fields that a torch program reads."""
    names = ("local_rank", "pid", "exitcode", "error_file", "error_file_data", "timestamp")
    return {name: getattr(failure, name) for name in names} | {"signal": failure.signal_name()}  # type: ignore[attr-defined]


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
            errors.write_parent_error_file(worker_end(0, exitcode, error_file=str(child)), os.environ)
        else:
            package = torch_errors if name == "torch" else errors
            package.get_error_handler().dump_error_file(str(child), exitcode)
        written.append(json.loads(path.read_text(encoding="utf-8")))
    assert written[0] == written[1] == written[2]


def test_a_composed_parent_s_file_is_read_by_torch(tmp_path: Path) -> None:
    """Where torch would have written nothing, torch can read what we wrote."""
    path = tmp_path / "parent.json"
    root = worker_end(0, 1, 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: x\n')
    errors.write_parent_error_file(root, {"TORCHELASTIC_ERROR_FILE": str(path)})
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
