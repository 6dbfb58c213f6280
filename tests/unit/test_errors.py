"""Errors of workers, from process to process: recorded, read with suspicion, handed to the launcher above."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.multiprocessing.errors import (
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
    get_error_handler,
    handlers,
    record,
)
from elastic_run.multiprocessing.errors.error_file import find_exception, read_error_file, write_parent_error_file
from tests.support.job_results import captured, worker_end

if TYPE_CHECKING:
    from pathlib import Path


class QuietHandler(ErrorHandler):
    """Leaves faulthandler as pytest set it up."""

    def initialize(self) -> None:
        """Do nothing."""


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name this process's error file."""
    path = tmp_path / "parent.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def load(path: Path) -> Any:
    """Return a JSON file's contents."""
    return json.loads(path.read_text(encoding="utf-8"))


def recorded(path: Path, message: object) -> str:
    """Write an error file and return its path."""
    path.write_text(json.dumps({"message": message}), encoding="utf-8")
    return str(path)


def test_a_program_s_own_handler_hears_of_each_step() -> None:
    """A handler learns the function's name first, and a success last; what it raises then is not recorded."""
    steps: list[str] = []

    class Telling(QuietHandler):
        def initialize(self) -> None:
            steps.append(f"initialize {str(self._fn_name).rpartition('.')[2]}")

        def record_exception(self, e: BaseException) -> None:
            steps.append(f"record {e!r}")

        def record_success(self) -> None:
            steps.append("success")
            raise KeyError

    def work(number: int) -> float:
        return 1 / number

    with pytest.raises(KeyError):
        record(work, Telling())(1)
    with pytest.raises(ZeroDivisionError):
        record(partial(work, 0), Telling())()
    assert steps == [
        "initialize work",
        "success",
        "initialize None",
        "record ZeroDivisionError('division by zero')",
    ]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_handler_may_add_to_a_death_by_signal(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a failure by a signal is the handler's, unless it raises; other failures are not shown to it."""

    class Adding(ErrorHandler):
        def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
            if is_broken:
                raise RuntimeError
            return f"{message}: a fault of the GPU, see {error_file}"

    monkeypatch.setattr(handlers, "get_error_handler", Adding)
    text = str(ChildFailedError("t", {0: ProcessFailure(0, 7, -9, ""), 1: ProcessFailure(1, 8, 1, "")}))
    assert text.count("a fault of the GPU, see <N/A>") == (not is_broken)
    assert "Signal 9 (SIGKILL) received by PID 7" in text


def test_faulthandler_is_switched_on_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in native code leaves a stack; a stderr without a descriptor is a warning."""
    enabled: list[bool] = []
    monkeypatch.setattr(faulthandler, "enable", lambda *, all_threads: enabled.append(all_threads))
    get_error_handler().initialize()
    assert enabled == [True]

    def refuse(*, all_threads: bool) -> None:
        raise RuntimeError(all_threads)

    monkeypatch.setattr(faulthandler, "enable", refuse)
    with pytest.warns(UserWarning, match="faulthandler can't be enabled: RuntimeError"):
        get_error_handler().initialize()


def test_a_long_message_is_recorded_and_a_huge_one_keeps_both_ends(error_file: Path) -> None:
    """A message may list all that a checkpoint lacks; of a larger one the begin and the end are recorded."""
    get_error_handler().record_exception(ValueError(f"<{'x' * 100_000}>"))
    assert f"<{'x' * 100_000}>" in json.loads(error_file.read_text(encoding="utf-8"))["message"]["message"]
    get_error_handler().record_exception(ValueError(f"<{'x' * 1_000_000}>"))
    message = json.loads(error_file.read_text(encoding="utf-8"))["message"]["message"]
    assert len(message) < 200_000
    assert (message.startswith("ValueError: <xxx"), " [...] " in message, message.endswith("xxx>")) == (True,) * 3


def test_a_corrupt_file_of_a_child_is_replaced_by_a_sentence(error_file: Path, tmp_path: Path) -> None:
    """The launcher above learns that there was one, and the exit code."""
    (tmp_path / "child.json").write_text('{"message": ', encoding="utf-8")
    get_error_handler().dump_error_file(str(tmp_path / "child.json"), 3)
    message = load(error_file)["message"]
    assert message["message"] == f"{tmp_path / 'child.json'}: its error.json is not valid JSON"
    assert message["errorCode"] == 3
    get_error_handler().dump_error_file(str(tmp_path / "none.json"))
    assert load(error_file)["message"]["message"] == f"{tmp_path / 'none.json'}: there is none"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "its error.json is not valid JSON"),
        ('{"message": "half', "its error.json is not valid JSON"),
        ("\x00\xff", "its error.json is not valid JSON"),
        ("[" * 100_000, "its error.json is not valid JSON"),
        ("[]", "its error.json has no message"),
        ('{"messages": 1}', "its error.json has no message"),
        ("x" * 5_000_000, "its error.json can't be read: it has 5000000 bytes"),
    ],
)
def test_a_broken_error_file_is_one_clause(tmp_path: Path, text: str, problem: str) -> None:
    """Empty, cut short, binary, nested beyond measure, something else or huge: never an exception."""
    (tmp_path / "error.json").write_text(text, encoding="latin-1")
    file = read_error_file(str(tmp_path / "error.json"))
    assert (file.data, file.exception, file.problem) == (None, None, problem)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A directory, a pipe that would block us, and nothing at all."""
    os.mkfifo(tmp_path / "pipe")
    assert read_error_file(str(tmp_path)).problem == "its error.json can't be read: it is a directory"
    assert read_error_file(str(tmp_path / "pipe")).problem == "its error.json can't be read: it is not a file"
    assert read_error_file(str(tmp_path / "none")).problem == ""
    assert read_error_file("").problem == ""


def test_the_error_file_wins_over_stderr(tmp_path: Path) -> None:
    """It was written on purpose; where it is missing or broken, stderr tells."""
    path = tmp_path / "error.json"
    good = recorded(path, {"message": "E: x"})
    assert getattr(find_exception(good, captured("value_error"), 1, was_stopped=False).exception, "type", "") == "E"
    path.write_text("", encoding="utf-8")
    file = find_exception(good, captured("value_error"), 1, was_stopped=False)
    assert getattr(file.exception, "type", "") == "ValueError"
    assert file.problem == "its error.json is not valid JSON"
    assert find_exception("", "", 1, was_stopped=False).exception is None


def test_the_launcher_above_gets_what_stderr_told(tmp_path: Path) -> None:
    """Where the worker left no file, the same structure is made from its traceback, or from how it ended."""
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "parent.json")}
    write_parent_error_file(worker_end(0, 1, captured("value_error")), environ)
    message = load(tmp_path / "parent.json")["message"]
    assert message["message"] == "ValueError: loss is not finite: 3"
    assert message["errorCode"] == 1
    file = read_error_file(str(tmp_path / "parent.json"))
    assert getattr(file.exception, "where", "") == "value_error.py:5 in compute"
    assert file.timestamp == 1795169472
    write_parent_error_file(worker_end(3, -9, "step 1"), environ)
    assert load(tmp_path / "parent.json")["message"]["message"] == "rank 3 ended with signal 9"
    write_parent_error_file(worker_end(3, 7), environ)
    assert load(tmp_path / "parent.json")["message"]["message"] == "rank 3 ended with exit code 7"


def test_the_first_failure_is_the_given_root_or_the_earliest(tmp_path: Path) -> None:
    """Seconds are too coarse to tell; a launcher that knows better says so."""
    late = recorded(tmp_path / "late.json", {"message": "E: x", "extraInfo": {"timestamp": "9"}})
    early = recorded(tmp_path / "early.json", {"message": "F: y", "extraInfo": {"timestamp": "8"}})
    failures = {0: ProcessFailure(0, 1, 1, late), 1: ProcessFailure(1, 2, -11, early)}
    assert ChildFailedError("t", failures).get_first_failure()[0] == 1
    assert ChildFailedError("t", failures, root_rank=0).get_first_failure()[0] == 0
    assert ChildFailedError("t", failures, root_rank=5).get_first_failure()[0] == 1
    copy = pickle.loads(pickle.dumps(ChildFailedError("t", failures, root_rank=0)))  # noqa: S301 - our own
    assert copy.get_first_failure()[0] == 0
    with pytest.raises(AssertionError):
        ChildFailedError("t", {})


def test_the_exception_s_text_is_for_readers(tmp_path: Path) -> None:
    """A message of a megabyte is shown with its middle cut out; the failure has all of it."""
    said = "E: " + "x" * 1_000_000 + "the end"
    file = recorded(tmp_path / "e.json", {"message": said, "extraInfo": {"py_callstack": said, "timestamp": "8"}})
    failure = ProcessFailure(0, 1, 1, file)
    text = str(ChildFailedError("train.py", {0: failure}))
    assert len(text) < 10_000
    assert text.count(" more characters ... ") == 1
    assert text.count("xthe end\n") == 1
    assert failure.message["message"] == said


def test_a_failure_has_a_sentence_where_no_file_tells(tmp_path: Path) -> None:
    """Signal or exit code, and what is wrong with its error.json."""
    failure = ProcessFailure(0, 7, -9, "/nowhere/error.json")
    assert (failure.error_file, failure.message) == ("<N/A>", "Signal 9 (SIGKILL) received by PID 7")
    assert ProcessFailure(0, 7, 1, str(tmp_path)).message == (
        "exit code 1; what it said stands on its stderr (its error.json can't be read: it is a directory). "
        "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    )
    assert ProcessFailure(0, 7, -99, "").signal_name() == "<N/A>"
    assert ProcessFailure(0, 7, 1, "").signal_name() == "<N/A>"
    plain = ProcessFailure(0, 7, 1, recorded(tmp_path / "plain.json", "plain"))
    assert plain.message == "plain"
    assert len(plain.timestamp_isoformat()) == len("2026-01-31_23:59:59")
