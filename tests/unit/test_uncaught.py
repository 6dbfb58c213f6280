"""What a worker tells of the exception that has ended its main thread, and what the agent makes of it."""

from __future__ import annotations

import pytest

from elastic_run.core.failure.hang import (
    Uncaught,
    confirm,
    describe_survival,
    place_failed,
    place_last_words,
    read_uncaught,
)
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.core.failure.stacks import Dump, Place

_ERROR = ExceptionText("ValueError", "shard 7", ("ValueError: shard 7",))
_TOLD = Uncaught(3.5, _ERROR, (("ab", "loader"), ("cd", "sender")))
_SHUTDOWN = '  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown\n'


def text(main: str, *others: str) -> str:
    """Return a text of faulthandler's; other threads are given by their numbers."""
    threads = [f'Thread 0x{other:0>16} (most recent call first):\n  File "x.py", line 1 in run\n' for other in others]
    return "".join((*threads, f"Thread 0x{'1':0>16} (most recent call first):\n{main}"))


def frame(file: str, function: str) -> str:
    """Return a line of a stack."""
    return f'  File "{file}", line 12 in {function}\n'


def test_a_worker_tells_moment_class_message_and_threads() -> None:
    """What is garbage is none."""
    assert read_uncaught("3.5\x1fValueError\x1fshard 7\x1fab loader\x1fcd sender") == _TOLD
    for garbage in ("", "soon\x1fValueError\x1fx", "3.5\x1fValueError"):
        assert read_uncaught(garbage) is None


def test_the_traceback_on_stderr_tells_more_if_it_is_of_that_exception() -> None:
    """It is certain then; of another exception it tells nothing."""
    written = ExceptionText("data.ValueError", "shard 7 of 9", ("x", "y"), is_certain=False)
    assert confirm(written, _TOLD) is written
    assert written.is_certain
    assert confirm(ExceptionText("KeyError", "3"), _TOLD) is confirm(None, _TOLD) is _ERROR


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (None, "threads loader, sender still run"),
        (Dump(text(_SHUTDOWN, "ab", "cd")), "threads loader, sender still run"),
        (Dump(text(_SHUTDOWN, "cd")), "thread sender still runs"),
        (Dump(text(_SHUTDOWN, "ef")), "another thread still runs"),
        (Dump(text(frame("/code/train.py", "save"))), "it is in save (train.py:12)"),
        (
            Dump(text(frame("/x/lib/python3.11/multiprocessing/util.py", "_exit_function"))),
            "a child process still runs",
        ),
        (Dump(problem="has closed its descriptor"), "threads loader, sender still run"),
    ],
)
def test_what_keeps_a_process_alive(dump: Dump | None, expected: str) -> None:
    """The threads that still live, a child process, or the place of an exit function."""
    assert describe_survival(_TOLD, dump) == expected


def test_what_keeps_a_process_without_threads_alive() -> None:
    """The kernel's word, or what is left; of many threads some are named."""
    alone = Uncaught(0.0, _ERROR)
    assert describe_survival(alone, Dump(problem="ignores signal 60")) == "it ignores signal 60"
    assert describe_survival(alone) == "an exit function, a destructor or native code still runs"
    many = Uncaught(0.0, _ERROR, tuple((f"a{number}", f"t{number}") for number in range(5)))
    assert describe_survival(many) == "threads t0, t1, t2 and 2 more still run"


def test_the_places_of_such_ranks() -> None:
    """The report on a hang names the exception, and what the rank does."""
    assert place_failed(_TOLD, Dump()).problem == (
        "has raised ValueError: shard 7, and has not ended: threads loader, sender still run"
    )
    said = "has written ValueError: shard 7 and nothing after it, and "
    assert place_last_words(Place("wait", "/code/train.py", 9), _ERROR).problem == f"{said}is in wait (train.py:9)"
    assert place_last_words(Place(problem="is stopped"), _ERROR).problem == f"{said}is stopped"
