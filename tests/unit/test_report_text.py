"""Text made safe and made to fit, and the words for codes, ranks and spans."""

from __future__ import annotations

import os
import pty
import signal

import pytest

from elastic_run import contract
from elastic_run.core.failure.root_cause import ExceptionText
from elastic_run.report.text import (
    columns,
    elide,
    end_verb,
    exception_line,
    exit_text,
    printable,
    ranks,
    shorten,
    shows_colors,
    signal_name,
    span,
    wrap,
)
from tests.support.job_results import worker_end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07x", "red x"),
        ("a\tb\nc\u00a0d", "a b c d"),
        ("\x00\x07\x7f", "\\x00\\x07\\x7f"),
        ("\udcff", "\\xff"),
        ("\u202eabc", "\\u202eabc"),
        ("\U000e0001", "\\U000e0001"),
        ("👩\u200d🚀", "👩🚀"),
        ("日本", "日本"),
    ],
)
def test_nothing_that_a_terminal_would_obey_is_left(text: str, expected: str) -> None:
    """Escapes go, controls become visible, space is space, joiners vanish."""
    assert printable(text) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_show_them(environ: dict[str, str], expected: bool) -> None:
    """A terminal gets colours unless it is dumb or NO_COLOR is set to a text; a pipe never gets them."""
    host, terminal = pty.openpty()
    out, into = os.pipe()
    try:
        assert shows_colors(terminal, environ) is expected
        assert not shows_colors(into, environ)
    finally:
        for fd in (host, terminal, out, into):
            os.close(fd)


@pytest.mark.parametrize(
    ("text", "limit", "tail", "expected"),
    [
        ("short", 5, 0.4, "short"),
        ("abcdefghij", 7, 0.5, "ab...ij"),
        ("abcdefghij", 7, 0.0, "abcd..."),
        ("日本日本日本", 7, 0.5, "日...本"),
        ("abcdefghij", 3, 0.5, "abc"),
        ("ab cdefgh ij", 8, 0.4, "ab...ij"),
    ],
)
def test_a_long_text_loses_its_middle(text: str, limit: int, tail: float, expected: str) -> None:
    """Head and tail stay, and it fits."""
    assert elide(text, limit, tail=tail) == expected
    assert columns(elide(text, limit, tail=tail)) <= limit


@pytest.mark.parametrize(
    ("text", "width", "most", "expected"),
    [
        ("one two", 10, 2, ["one two"]),
        ("one two three", 8, 2, ["one two", "three"]),
        ("a" * 20, 8, 3, ["a" * 8, "a" * 8, "a" * 4]),
        ("one two three four five six seven", 10, 2, ["one two", "th...seven"]),
        ("aaaa " * 50, 10, 1, ["aaaa...aa"]),
        ("", 8, 1, [""]),
        ("日本日本日本 日本日本", 7, 9, ["日本日", "本日本", "日本日", "本"]),
    ],
)
def test_a_long_text_is_broken_between_words(text: str, width: int, most: int, expected: list[str]) -> None:
    """Lines end at spaces where they can, and what doesn't fit loses its middle."""
    lines = wrap(text, width, most)
    assert lines == expected
    assert len(lines) <= most


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("can't open /some/where/x.py: no", 20, "can't open /some/where/x.py: no"),
        ("can't open /a/b.py: there is no such file", 24, "can't open /a/b.py:...uch file"),
        ("one two three four five of /some/where/x.py", 20, "one two thr.../some/where/x.py"),
        ("look at `ulimit -n` and raise it, if you may", 20, "look at `ulimit -n`...ou may"),
        ("one two three /a/b four five /c/d six seven /e/f nine", 16, "one two t.../a/b.../c/d...nine"),
        ("ratio 3/4 of the words that stand here", 16, "ratio 3/4...here"),
        ("tcp://[::1]:29400 can't be reached from here", 16, "tcp://[::1]:29400...here"),
    ],
)
def test_a_text_is_shortened_around_paths_and_commands(text: str, limit: int, expected: str) -> None:
    """What a reader copies stays whole, also where the text becomes wider for that."""
    assert shorten(text, limit) == expected


@pytest.mark.parametrize(
    ("text", "width", "most", "expected"),
    [
        ("look at /some/where/else/x.py now", 12, 3, ["look at", "/some/where/else/x.py", "now"]),
        ("say `ulimit -n 4096` first", 10, 3, ["say", "`ulimit -n 4096`", "first"]),
        ("open('/a dir/of words/x.py') failed", 12, 2, ["open('/a dir/of words/x.py')", "failed"]),
        (
            "see /first/path/of/two and /second/path/of/two",
            12,
            2,
            ["see", "/first/path/of/two.../second/path/of/two"],
        ),
    ],
)
def test_a_path_or_a_command_is_not_broken(text: str, width: int, most: int, expected: list[str]) -> None:
    """It has a line that is wider than the others, rather than two."""
    assert wrap(text, width, most) == expected


def test_wrapping_never_exceeds_its_lines_and_columns() -> None:
    """Whatever the words' lengths, the promise holds."""
    text = " ".join("日本" * (number % 7) + "x" * (number % 13) for number in range(60))
    for width in (8, 13, 40, 71):
        for most in (1, 2, 3):
            lines = wrap(text, width, most)
            assert len(lines) <= most
            assert all(columns(line) <= width for line in lines)


def test_signals_are_called_by_name() -> None:
    """Real-time signals by their distance, unknown ones by number."""
    assert signal_name(15) == "SIGTERM"
    assert signal_name(int(signal.SIGRTMIN) + 3) == "SIGRTMIN+3"
    assert signal_name(99) == "signal 99"


def test_an_end_is_told_by_exit_code_or_signal() -> None:
    """A shell's 128+n is told as both."""
    assert exit_text(worker_end(0, 1)) == "exit code 1"
    assert exit_text(worker_end(0, -11)) == "SIGSEGV"
    assert exit_text(worker_end(0, 137)) == "exit code 137 (128+9: SIGKILL)"
    # 64 is the last signal that there is: 128+65 is a program's own exit code, and so is 128.
    assert exit_text(worker_end(0, 192)) == f"exit code 192 (128+64: {signal_name(64)})"
    assert [exit_text(worker_end(0, code)) for code in (128, 193)] == ["exit code 128", "exit code 193"]
    assert end_verb(worker_end(0, 3)) == "failed with exit code 3"
    assert end_verb(worker_end(0, -9)) == "was killed by SIGKILL"
    hang, other = ExceptionText(contract.HANG, "no progress"), ExceptionText("ValueError", "x")
    assert end_verb(worker_end(0, contract.EXIT_HUNG, exception=hang)) == "made no progress"
    assert end_verb(worker_end(0, contract.EXIT_HUNG, exception=other)) == "failed with exit code 212"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-1.0, "0.00 s"),
        (0.034, "0.03 s"),
        (12.34, "12.3 s"),
        (119.9, "119.9 s"),
        (242.0, "4 min 02 s"),
        (11220.0, "3 h 07 min"),
        (187200.0, "2 d 4 h"),
    ],
)
def test_a_span_is_as_exact_as_it_matters(seconds: float, expected: str) -> None:
    """Hundredths below a second, days with hours."""
    assert span(seconds) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([3], "rank 3"),
        ([7, 0, 1, 2, 4], "ranks 0-2, 4, 7"),
        (range(512), "ranks 0-511"),
        (range(0, 12, 2), "ranks 0, 2, 4, 6, 8, 10"),
        (range(0, 100, 2), "ranks 0, 2, 4, 6, 8, ... (50 in all)"),
    ],
)
def test_ranks_are_listed_in_runs(numbers: list[int], expected: str) -> None:
    """A thousand ranks take one short line."""
    assert ranks(numbers) == expected


def test_an_exception_s_line_is_its_first_that_says_something() -> None:
    """Blank lines and the C++ file that gloo puts in front are left out."""
    assert exception_line(ExceptionText("RuntimeError", "\n\n lost\nmore")) == "RuntimeError: lost"
    assert exception_line(ExceptionText("RuntimeError", "[/w/gloo/pair.cc:553] Closed")) == "RuntimeError: Closed"
    assert exception_line(ExceptionText("AssertionError")) == "AssertionError"
