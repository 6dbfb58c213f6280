"""error.json written by torch and by us, read by us and by torch: one format, both ways."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import errors as torch_errors

from elastic_run.multiprocessing import errors
from tests.support.endings import worker_end

OURS, TORCHS = "elastic_run.multiprocessing.errors", "torch.distributed.elastic.multiprocessing.errors"
ROOT = Path(__file__).parents[2]

#: How a worker may end -> its main function's body.
ENDS = {
    "exception": "raise ValueError('bad batch 17')",
    "chained": "try:\n        {}['a']\n    except KeyError as error:\n        raise OSError(5, 'lost') from error",
    "unicode": "raise RuntimeError('日本 \\udcff')",
    "system exit": "raise SystemExit(3)",
    "system exit 0": "raise SystemExit(0)",
    "success": "pass",
}


def run_worker(tmp_path: Path, package: str, body: str) -> tuple[int, dict[str, Any] | None]:
    """Run a worker with @record of a package; return its exit code and what it recorded."""
    script, error_file = tmp_path / "worker.py", tmp_path / f"{package}.json"
    script.write_text(f"from {package} import record\n@record\ndef main():\n    {body}\nmain()\n", encoding="utf-8")
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(error_file), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, check=False)
    return done.returncode, json.loads(error_file.read_text(encoding="utf-8")) if error_file.exists() else None


def shape(value: object) -> object:
    """Return what a JSON value is made of, without its contents."""
    return {key: shape(part) for key, part in value.items()} if isinstance(value, dict) else type(value).__name__


@pytest.mark.parametrize("end", ENDS)
def test_record_writes_what_torch_s_writes(tmp_path: Path, end: str) -> None:
    """Same exit code, same structure, same message, and a traceback with the same end."""
    ours, torchs = (run_worker(tmp_path, package, ENDS[end]) for package in (OURS, TORCHS))
    assert ours[0] == torchs[0]
    assert shape(ours[1]) == shape(torchs[1])
    if ours[1] is not None and torchs[1] is not None:
        mine, theirs = ours[1]["message"], torchs[1]["message"]
        assert mine["message"] == theirs["message"]
        ends = [message["extraInfo"]["py_callstack"].splitlines()[-4:] for message in (mine, theirs)]
        assert ends[0] == ends[1]
        assert abs(int(mine["extraInfo"]["timestamp"]) - int(theirs["extraInfo"]["timestamp"])) < 60


def test_our_record_needs_no_torch(tmp_path: Path) -> None:
    """A script that only wants to be recorded starts without torch."""
    code, _ = run_worker(tmp_path, OURS, "import sys; assert 'torch' not in sys.modules")
    assert code == 0


def fields(failure: object) -> dict[str, Any]:
    """Return the fields that a torch program reads."""
    names = ("local_rank", "pid", "exitcode", "error_file", "error_file_data", "timestamp")
    return {name: getattr(failure, name) for name in names} | {"signal": failure.signal_name()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", [OURS, TORCHS])
@pytest.mark.parametrize("exitcode", [1, -9])
def test_each_reads_the_other_s_file_alike(tmp_path: Path, package: str, exitcode: int) -> None:
    """Torch's ProcessFailure and ours agree on every field, whoever wrote the file."""
    run_worker(tmp_path, package, ENDS["chained"])
    path = str(tmp_path / f"{package}.json")
    ours, torchs = errors.ProcessFailure(2, 7, exitcode, path), torch_errors.ProcessFailure(2, 7, exitcode, path)
    assert fields(ours) == fields(torchs)
    assert ours.message == torchs.message
    assert ours.timestamp_isoformat() == torchs.timestamp_isoformat()


@pytest.mark.parametrize("exitcode", [1, -9])
def test_failures_without_a_file_are_alike(exitcode: int) -> None:
    """The marks of a missing file, and the sentence on a signal, are torch's."""
    ours, torchs = errors.ProcessFailure(2, 7, exitcode, "/no"), torch_errors.ProcessFailure(2, 7, exitcode, "/no")
    assert fields(ours) | {"timestamp": 0} == fields(torchs) | {"timestamp": 0}
    assert abs(ours.timestamp - torchs.timestamp) < 60
    if exitcode < 0:
        assert ours.message == torchs.message


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


def test_names_and_signatures_are_torch_s() -> None:
    """A program that imports torch's module finds the same here."""
    for name in torch_errors.__all__:
        assert hasattr(errors, name)
    ours, torchs = (dataclasses.fields(package.ProcessFailure) for package in (errors, torch_errors))
    assert [(field.name, field.init) for field in ours] == [(field.name, field.init) for field in torchs]
    for part in ("record", "get_error_handler", "ErrorHandler.record_exception", "ErrorHandler.dump_error_file"):
        names = [list(inspect.signature(_find(package, part)).parameters) for package in (errors, torch_errors)]
        assert names[0] == names[1]
    assert {name for name in vars(torch_errors.ErrorHandler) if not name.startswith("__")} <= set(
        dir(errors.ErrorHandler)
    )


def _find(package: object, path: str) -> Any:  # noqa: ANN401 - a class or function
    for name in path.split("."):
        package = getattr(package, name)
    return package
