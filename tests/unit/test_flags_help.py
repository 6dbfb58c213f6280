"""What a user gets to read: --help, --version, and the reference in the docs."""

from __future__ import annotations

import pytest

from elastic_run import __version__
from elastic_run.flags import FLAGS, flags_markdown
from elastic_run.help_text import WIDTH, render_help
from elastic_run.run import run_command


def test_help_fits_and_shows_every_flag_with_its_variable() -> None:
    """The help has no line over 80 columns, no character that a terminal can't show, and all there is to know."""
    text = render_help(FLAGS)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.isascii()
    for flag in FLAGS:
        assert flag.name in text
        assert flag.variable in text
        assert "_" not in flag.name


def test_help_shows_defaults_and_exit_codes() -> None:
    """Where leaving a flag out means something, the help says what; and it lists the exit codes."""
    text = " ".join(render_help(FLAGS).split())
    for fact in ("[default 1:1; PET_NNODES]", "[default 0.1; PET_MONITOR_INTERVAL]", "128+n", "200 A valid request"):
        assert fact in text


@pytest.mark.parametrize(("words", "begin"), [(["--help"], "usage: elastic-run"), (["--version"], "elastic-run ")])
def test_texts_go_to_stdout_and_succeed(words: list[str], begin: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help and --version print to stdout and end with 0."""
    with pytest.raises(SystemExit) as ended:
        run_command(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert out.startswith(begin)
    assert out == render_help(FLAGS) or out == f"elastic-run {__version__}\n"


def test_the_reference_has_a_row_for_every_flag() -> None:
    """The docs' tables name each flag, its default and its variable, and mark ours."""
    rows = [line for line in flags_markdown().splitlines() if line.startswith("| `-")]
    assert len(rows) == len(FLAGS)
    for flag in FLAGS:
        row = next(row for row in rows if flag.name in row.split("|")[1].strip(" `").replace(",", "").split())
        assert (f"`{flag.variable}`" in row) == bool(flag.variable)
        assert ("not in torchrun" in row) == flag.is_ours
        assert row.replace("\\|", "").count("|") == 5
