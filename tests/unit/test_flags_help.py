"""What a user gets to read: --help, --help-all, --version, and the reference in the docs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import __version__
from elastic_run.cli.flags import FLAGS, Flag
from elastic_run.cli.help import EXAMPLES, WIDTH, render_all_help, render_help
from elastic_run.run import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: As the docs are built with it.
flags_sections = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "hooks.py"))["flags_sections"]


@pytest.mark.parametrize("render", [render_help, render_all_help])
def test_help_fits_any_terminal(render: Callable[[Sequence[Flag]], str]) -> None:
    """The help has no line over 80 columns, and no character that a terminal can't show."""
    text = render(FLAGS)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.isascii()


def test_help_opens_with_what_everybody_needs() -> None:
    """The short help shows six flags and the examples on one screen, and says how to see the rest."""
    text = render_help(FLAGS)
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)
    assert shown == ["--nproc-per-node", "--nnodes", "--max-restarts", "--tee", "--log-dir", "--preload"]
    assert all(command in text for command, _ in EXAMPLES)
    assert f"--help-all shows all {len(FLAGS)} flags" in text
    assert len(text.splitlines()) <= 55


def test_all_help_has_every_flag_with_its_default_and_variable() -> None:
    """The long help shows each flag with all there is to know of it, and the exit codes."""
    text = " ".join(render_all_help(FLAGS).split())
    for flag in FLAGS:
        assert f"{flag.name} " in text
        assert f"[{flag.variable}]" in text or not flag.variable
        assert flag.text in text
        assert "_" not in flag.name
    facts = [
        "[default: 1:1] [PET_NNODES]",
        "[default: 0.1s] [PET_MONITOR_INTERVAL]",
        "128+n",
        "201 The nodes",
    ]
    assert [fact for fact in facts if fact not in text] == []


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_explanation_is_made_of_sentences(flag: Flag) -> None:
    """An explanation begins with a capital letter and ends with a full stop."""
    assert flag.text[0].isupper()
    assert flag.text.endswith(".")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], render_help(FLAGS)),
        (["-h"], render_help(FLAGS)),
        (["--help-all"], render_all_help(FLAGS)),
        (["--help-a"], render_all_help(FLAGS)),
        (["--version"], f"elastic-run {__version__}\n"),
    ],
)
def test_texts_go_to_stdout_and_succeed(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help, --help-all and --version print to stdout and end with 0."""
    with pytest.raises(SystemExit) as ended:
        run_command(words)
    out, err = capsys.readouterr()
    assert (ended.value.code or 0, out, err) == (0, expected, "")


def test_the_reference_has_a_section_for_every_flag() -> None:
    """A section of the docs names a flag with its values as typed, its variable, and whether torchrun has it."""
    sections = {part.split("`")[1]: part for part in flags_sections(FLAGS).split("\n### ")[1:]}
    assert len(sections) == len(FLAGS)
    for flag in FLAGS:
        heading = next(words for words in sections if flag.name in words.replace(",", "").split())
        section = sections[heading].partition("\n## ")[0]
        assert heading.endswith(flag.values)
        assert f"{{ #{flag.name[2:]} }}" in section
        assert flag.text in section.replace("`", "")
        assert ("Default " in section) == (not flag.prints_text)
        assert ("Variable `" in section) == bool(flag.variable)
        assert ("Not in torchrun" in section) == flag.is_ours
        assert "\\|" not in section


def test_flags_in_a_text_are_code_in_the_reference() -> None:
    """A flag or a variable that a text names is code in the docs, so that no browser breaks it at a hyphen."""
    flag = Flag("--role", "NAME")
    flag.text = "As --tee=3 or python -m; MASTER_ADDR is not one-sided."
    assert "\n\nAs `--tee=3` or python `-m`; `MASTER_ADDR` is not one-sided.\n" in flags_sections([flag])
