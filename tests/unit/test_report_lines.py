"""What the launcher says in one line while the job goes on."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.report import lines
from elastic_run.report.text import end_verb
from tests.support.job_results import captured, worker_end

ROOT = worker_end(3, 1, captured("value_error"))
BARE = worker_end(3, -9)
WHO = "rank 3 (local 3, pid 4703) failed with exit code 1 after 12.3 s: ValueError: loss is not finite: 3"


def test_a_restart_is_one_line_with_its_cause() -> None:
    """Who, how, after how long, of what, and what happens now."""
    assert lines.restarting(ROOT, 8, 1, 3) == f"{WHO}; restarting all 8 workers, restart 1 of 3"
    assert lines.restarting(BARE, 1, 2, 0, 0.4, window="5/1h") == (
        "rank 3 (local 3, pid 4703) was killed by SIGKILL after 12.3 s; "
        "restarting the worker in 0.40 s, restart 2 (at most 5/1h)"
    )


def test_a_huge_exception_stays_one_line_of_bearable_length() -> None:
    """Controls and megabytes in a message don't reach the console."""
    text = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: \x1b[2J' + "x" * 1_000_000
    line = lines.failed(worker_end(0, 1, text))
    assert len(line) < 250
    assert line.isprintable()


def test_signals_say_what_they_set_in_motion() -> None:
    """How many workers, how long at most, and how to hurry."""
    assert lines.stopping(15, 8, 30.0) == "SIGTERM received: stopping 8 workers, up to 30 s"
    assert lines.stopping(15, 8, 3e6).endswith("up to 3000000 s")
    assert lines.stopping(2, 1, 5.0) == "SIGINT received: stopping 1 worker, up to 5 s; Ctrl-C again kills them now"
    assert lines.hurrying() == "asked to stop again: killing the workers now"


def test_a_file_that_was_not_written() -> None:
    """Where and why."""
    assert lines.failure_file_not_written("/logs", "No space left on device") == (
        "failure.json could not be written to /logs: No space left on device"
    )


def test_background_processes_are_named() -> None:
    """The line counts the processes that keep running, and has the pid and command of the first ones."""
    assert lines.background([(7, "sleep 100")]) == (
        "1 background process of the workers keeps running: pid 7 (sleep 100) "
        "(--kill-background-processes ends them with the job)"
    )
    several = lines.background([(pid, "x") for pid in range(1, 9)])
    assert several.startswith("8 background processes of the workers keep running: pid 1 (x), pid 2 (x), ")
    assert f"{8 - several.count('pid ')} more (" in several


def test_a_worker_that_was_stopped_for_a_hang_made_no_progress() -> None:
    """The words of a hang stand for the launcher's own verdict, never for a worker that returns its code."""
    hung = worker_end(0, contract.EXIT_HUNG, exception=ExceptionText(contract.HANG, "no progress"))
    assert end_verb(hung) == "made no progress"
    raised = worker_end(0, contract.EXIT_HUNG, exception=ExceptionText("ValueError", "x"))
    assert end_verb(raised) == "failed with exit code 212"
