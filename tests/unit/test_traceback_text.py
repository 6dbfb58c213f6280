"""The exception that a program died of, found in what real programs left on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import LOST_LINES
from elastic_run.core.failure.traceback_text import parse_exception

if TYPE_CHECKING:
    from elastic_run.core.failure.root_cause import ExceptionText

DATA = Path(__file__).parents[1] / "data" / "stderr"
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    step()\n'


def parse(text: str, exitcode: int | None = None) -> tuple[str, str, str] | None:
    """Return type, message and place of a text's exception."""
    exception = parse_exception(text, exitcode=exitcode)
    return None if exception is None else (exception.type, exception.message, exception.where)


def captured(name: str) -> str:
    """Return a captured stderr, byte for byte."""
    return (DATA / f"{name}.txt").read_bytes().decode()


#: Captured stderr -> type, start of the message, place; None where it ends with no exception.
CAPTURED: dict[str, tuple[str, str, str] | None] = {
    "bare_assertion": ("AssertionError", "", "assertion.py:2 in check"),
    "chained": ("KeyError", "'fallback'", "chained.py:13 in main"),
    "clients_missing": ("torch.distributed.DistStoreError", "Timed out after 4 seconds waiting for", "late.py:2"),
    "coloured": ("ValueError", "loss is not finite: 3", "value_error.py:5 in compute"),
    "coloured_group": ("OSError", "[Errno 5] Input/output error", "group.py:4 in two"),
    "connect_timeout": ("torch.distributed.DistNetworkError", "The client socket has timed out", "late.py:2"),
    "cpp_abort": ("std::runtime_error", "lost device 3", "cpp_abort.py:4 in step"),
    "cuda_assert": ("torch.AcceleratorError", "CUDA error: device-side assert triggered\nSearch", "failure.py:32"),
    "cuda_in_dataloader": ("RuntimeError", "Cannot re-initialize CUDA", "failure.py:54 in __getitem__"),
    "cuda_out_of_memory": ("torch.OutOfMemoryError", "CUDA out of memory. Tried", "train.py:61 in main"),
    "dataloader": ("ValueError", "sample 0 is corrupt", "dataloader.py:5 in __getitem__"),
    "dataloader_killed": ("RuntimeError", "DataLoader worker (pid(s)", "dataloader_killed.py:7"),
    "gloo_own_exception": ("ValueError", "bad batch 17", "gloo_peer.py:9"),
    "gloo_peer_failed": ("RuntimeError", "[/__w/", "gloo_peer.py:14"),
    "gloo_peer_killed": ("RuntimeError", "[/__w/", "gloo_peer.py:14"),
    "gloo_timeout": ("RuntimeError", "[/__w/", "gloo_peer.py:14"),
    "group": ("OSError", "[Errno 5] Input/output error", "group.py:4 in two"),
    "handled": None,
    "handled_then_exit": None,
    "indentation_error": ("IndentationError", "expected an indented block", "indentation_error.py:3"),
    "interleaved": ("KeyError", "'weights'", "interleaved.py:13 in main"),
    "interrupted": ("KeyboardInterrupt", "", "interrupted.py:2"),
    "local_class": ("mod.Inner", "", "excclass.py:5 in a"),
    "missing_script": None,
    "nccl_aborted": ("c10::DistBackendError", "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog", ""),
    "nccl_watchdog": ("c10::DistBackendError", "[PG ID 0 PG GUID", ""),
    "no_module": None,
    "notes": ("RuntimeError", "first line\nsecond line\n  third: line\nwhile reading shard 7", "notes.py:5 in main"),
    "pool": ("ValueError", "bad shard", "mp.py:3 in f"),
    "port_taken": ("torch.distributed.DistNetworkError", "The server socket has failed to listen", "late.py:2"),
    "recursion": ("RecursionError", "maximum recursion depth exceeded", "recursion.py:2 in f"),
    "rich": ("KeyError", "'encoder.weight'", "model.py:40 in load"),
    "segv": ("Fatal Python error", "Segmentation fault", "segv.py:4 in crash"),
    "shell": None,
    "store_gone": ("torch.distributed.DistNetworkError", "Failed to recv, got 0 bytes.", "store_peer.py:6"),
    "syntax_error": ("SyntaxError", "invalid syntax", "syntax_error.py:2"),
    "terminate": ("std::runtime_error", "worker thread: lost device 3", ""),
    "thread_at_end": None,
    "thread": ("OSError", "[Errno 28] No space left on device: 'ckpt.pt'", "thread.py:3 in work"),
    "unraisable": ("FileNotFoundError", "[Errno 2] No such file or directory", "unraisable.py:7 in main"),
    "usage": None,
    "value_error": ("ValueError", "loss is not finite: 3", "value_error.py:5 in compute"),
}


def test_every_captured_stderr_is_in_the_table() -> None:
    """A text in tests/data/stderr without an expectation tests nothing."""
    assert {path.stem for path in DATA.glob("*.txt")} == set(CAPTURED)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_stderr_tells_what_its_program_died_of(name: str) -> None:
    """Type, message and the place in the user's own code are found in what a real program wrote."""
    found, expected = parse(captured(name)), CAPTURED[name]
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found[0], found[1][: len(expected[1])], found[2]) == expected


def parsed(name: str) -> ExceptionText:
    """Return the exception of a captured stderr."""
    exception = parse_exception(captured(name))
    assert exception is not None
    return exception


def test_what_an_exception_was_raised_from_is_told() -> None:
    """The last exception of a chain is the one, with the first and the one before it as its cause."""
    began = "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    assert parsed("chained").cause == f"{began} (by way of ConfigError: config.json can't be read)"


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_where_a_chain_began_is_told(steps: int) -> None:
    """However many exceptions followed from the first, that one is the cause, with the last step from it."""
    chain = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    raised = ["OSError: [Errno 28] No space left", *(f"RuntimeError: step {step} failed" for step in range(steps))]
    exception = parse_exception(chain.join(f"{TRACEBACK}{line}\n" for line in raised))
    assert exception is not None
    assert exception.summary == f"RuntimeError: step {steps - 1} failed"
    way = f" (by way of RuntimeError: step {steps - 2} failed)" if steps > 1 else ""
    assert exception.cause == f"OSError: [Errno 28] No space left{way}"


def test_an_exception_that_a_pool_raises_again_keeps_its_first_place() -> None:
    """The same exception twice in a chain is told once, with the frames of the process where it happened."""
    exception = parsed("pool")
    assert exception.cause == ""
    assert exception.lines[-2:] == ('    raise ValueError("bad shard")', "ValueError: bad shard")


def test_the_lines_of_a_traceback_come_without_markers_and_prefixes() -> None:
    """Code and places are kept, `^^^^` and `[rank1]: ` are not."""
    assert parsed("gloo_own_exception").lines == (
        '  File "/home/anna/project/gloo_peer.py", line 9, in <module>',
        '    raise ValueError("bad batch 17")',
        "ValueError: bad batch 17",
    )
    assert not any("^^" in line for line in parsed("value_error").lines)


def test_a_crash_tells_its_calls_outermost_first() -> None:
    """Faulthandler writes them the other way round."""
    lines = parsed("segv").lines
    assert lines[0].endswith('segv.py", line 7 in <module>')
    assert lines[-1] == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(
    ("text", "exitcode", "expected"),
    [
        (TRACEBACK + "ValueError: x\n", None, "ValueError"),
        (TRACEBACK + "ValueError: x\n", 1, "ValueError"),
        (TRACEBACK + "ValueError: x\n", 3, "ValueError"),
        (TRACEBACK + "ValueError: x\nbye\n", 3, None),
        (TRACEBACK + "ValueError: x\n" + "[W1120 23:52:49.1 x.cpp:1] Warning: destroy\n" * 31, 1, "ValueError"),
        (TRACEBACK + "ValueError: x\n", -9, None),
        (TRACEBACK + "ValueError: x\n", -15, None),
        (TRACEBACK + "ValueError: x\n", -6, "ValueError"),
        ("ERROR:root:saving failed\n" + TRACEBACK + "ValueError: x\n", 1, "ValueError"),
        ("ERROR:root:saving failed\n" + TRACEBACK + "ValueError: x\nepoch 2\n", None, None),
        ("2026-11-20 ERROR " + TRACEBACK + "ValueError: x\nepoch 2\n", 3, None),
        ("Exception ignored in: <f>\n" + TRACEBACK + "ValueError: x\n", 1, None),
    ],
)
def test_only_an_exception_that_the_program_died_of_counts(
    text: str, exitcode: int | None, expected: str | None
) -> None:
    """One that was logged, ignored, outlived, or followed by a kill or a chosen exit code, is not blamed."""
    exception = parse_exception(text, exitcode=exitcode)
    assert (exception.type if exception else None) == expected
    assert exception is None or exception.is_certain


@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK + "ValueError: x\n" + "step\n" * 31,
        TRACEBACK + "ValueError: x\n" + "2026-11-20 10:00:00 step\n" * 31,
        "ERROR:root:saving failed\n" + TRACEBACK + "ValueError: x\nepoch 2\n",
        "2026-11-20 ERROR " + TRACEBACK + "ValueError: x\nepoch 2\n",
        TRACEBACK + f"ValueError: x\n{LOST_LINES}\n",
        TRACEBACK + "KeyError: y\n" + "step\n" * 31 + TRACEBACK + "ValueError: x\n" + "step\n" * 31,
    ],
)
def test_after_exit_code_1_the_last_exception_is_named_whatever_follows(text: str) -> None:
    """It isn't certain, and of what may be its message no more than a few lines are kept."""
    exception = parse_exception(text, exitcode=1)
    assert exception is not None
    assert (exception.type, exception.message.partition("\n")[0], exception.is_certain) == ("ValueError", "x", False)
    assert len(exception.message.splitlines()) <= 20
    assert parse_exception(text, exitcode=2) is None


def test_a_frame_behind_a_dot_of_progress_has_its_place() -> None:
    """The dot has no end of a line."""
    text = TRACEBACK.replace("  File", ".  File") + "ValueError: x\n"
    assert parse(text) == ("ValueError", "x", "train.py:3 in main")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TRACEBACK, None),
        (TRACEBACK + "noise here\n" * 21_000 + "ValueError: x\n", None),
        (TRACEBACK + "noise here\nDEBUG: loud\nloss: 3\nValueError: x\n", "ValueError"),
        (TRACEBACK + "noise here\nEpoch\nValueError: x\n", "ValueError"),
        ("Traceback (most recent call last):\n" + "step 1\n" * 9000 + TRACEBACK[35:] + "ValueError: x\n", "ValueError"),
        (TRACEBACK + "zlib.error: bad\n", "zlib.error"),
        (TRACEBACK + "queue.Empty\n", "queue.Empty"),
        (TRACEBACK + "__main__.main.<locals>.Oops: x\n", "__main__.main.<locals>.Oops"),
        (TRACEBACK + "_Private: x\n", "_Private"),
        (TRACEBACK + "INFO: loud\nValueError: x\n", "ValueError"),
        (TRACEBACK + ".\nodd.: x\nValueError: x\n", "ValueError"),
        (TRACEBACK + TRACEBACK + "ValueError: x\n", "ValueError"),
        ("Traceback (most recent call last):\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        (" 40%|####  | 4/10 " + TRACEBACK + "ValueError: x\n", "ValueError"),
        ("step 1\rstep 2\r" + TRACEBACK.replace("\n", "\r\n") + "ValueError: x\r\n", "ValueError"),
        ("[0]: " + (TRACEBACK + "ValueError: x").replace("\n", "\nother\n[0]: ") + "\n[0]:\n", "ValueError"),
        ("SyntaxError: said in a log\n", None),
        ("step 1\nSyntaxError: said in a log\n", None),
        ("  + Exception Group Traceback (most recent call last):\n  |   cut\n", None),
        ("Fatal Python error: init_fs_encoding: no encodings\n", "Fatal Python error"),
        ("", None),
        ("\x00\xff" * 100, None),
    ],
)
def test_a_text_may_be_broken_anywhere(text: str, expected: str | None) -> None:
    """Missing ends, other threads' lines, odd names, prefixes and carriage returns neither mislead nor raise."""
    exception = parse_exception(text)
    assert (exception.type if exception else None) == expected


def test_lines_of_others_are_no_part_of_a_prefixed_message() -> None:
    """Where each line has its writer's prefix, a message ends where the prefix does."""
    text = ("[rank0]: " + (TRACEBACK + "ValueError: x\nmore").replace("\n", "\n[rank0]: ")) + "\nstep 7\n"
    assert parse(text) == ("ValueError", "x\nmore", "train.py:3 in main")


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("\nnote\n\n", "x\nnote"),
        ("\n[W1120 23:52:49.1 a.cpp:1] Warning: w\n", "x"),
        ("\nTraceback (most recent call last):\n", "x"),
        ("\n100%|####| 4/4\n", "x"),
    ],
)
def test_a_message_ends_where_other_output_begins(after: str, message: str) -> None:
    """Further lines belong to the message until something that can't be part of one."""
    found = parse(TRACEBACK + "ValueError: x" + after)
    assert found is not None
    assert found[1] == message


def test_a_cpp_message_of_several_lines_is_kept_without_its_stack() -> None:
    """What `what()` says goes until the frames begin."""
    text = "terminate called after throwing an instance of 'E'\nnoise\n  what():  one\ntwo\nframe #0: x\n"
    assert parse(text) == ("E", "one\ntwo", "")


def test_two_deaths_in_one_text_are_told_by_the_last() -> None:
    """A second exception that did not follow from the first has no cause."""
    exception = parse_exception(TRACEBACK + "ValueError: x\n" + TRACEBACK + "TypeError: y\n")
    assert exception is not None
    assert (exception.type, exception.cause) == ("TypeError", "")


def test_a_stack_of_several_threads_is_told_by_the_current_one() -> None:
    """Faulthandler dumps all threads; the one that crashed counts."""
    text = (
        "Fatal Python error: Bus error\n\nThread 0x1 (most recent call first):\n"
        '  File "queue.py", line 1 in get\n\nCurrent thread 0x2 (most recent call first):\n'
        '  File "train.py", line 4 in step\n\nExtension modules: torch._C\n'
    )
    assert parse(text) == ("Fatal Python error", "Bus error", "train.py:4 in step")


def test_a_huge_text_is_read_from_its_end() -> None:
    """Megabytes before the traceback cost nothing and change nothing."""
    assert parse("x" * 10_000_000 + "\n" + TRACEBACK + f"ValueError: {'y' * 100_000}\n") is not None


@pytest.mark.parametrize("count", [3, 40])
def test_an_exception_without_a_message_takes_none_from_later_output(count: int) -> None:
    """What other threads write after a bare `assert` is no part of it."""
    text = 'Traceback (most recent call last):\n  File "/job/train.py", line 4, in <module>\n    assert loss\n'
    after = "".join(f"step {number}\n" for number in range(count))
    assert parse(f"{text}AssertionError\n{after}", exitcode=1) == ("AssertionError", "", "train.py:4")
