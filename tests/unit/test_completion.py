"""What a shell completes with the script of --print-completion."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.commands import COMMANDS
from elastic_run.cli.flags import FLAGS
from elastic_run.run import main, run_command
from tests.support.launch import complete_in_bash

if TYPE_CHECKING:
    from pathlib import Path


def print_script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what --print-completion prints."""
    with pytest.raises(SystemExit) as ended:
        run_command(["--print-completion", shell])
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("t", "test.toml top trace train.py"),
        ("--nnodes 2 tra", "trace train.py"),
        ("--standalone train.py te", "test.toml"),
        ("--max-res", "--max-restarts"),
        ("--rdzv_e", "--rdzv_endpoint"),
        ("--hang-action r", "report restart"),
        ("--nproc-per-node g", "gpu"),
        ("--failure-rules te", "test.toml"),
        ("--log-dir d", "data"),
        ("logs --f", "--follow"),
        ("help sto", "stop"),
        ("report d", "data"),
    ],
)
def test_bash_completes(words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bash completes flags and their values, commands and their arguments, and names of files."""
    for name in ("train.py", "test.toml"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()
    assert complete_in_bash(print_script("bash", capsys), words, tmp_path) == expected.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_script_has_all_flags_and_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of each shell has every spelling of every flag, and every command with its own flags."""
    script = print_script(shell, capsys)
    spellings = {spelling.lstrip("-") for flag in FLAGS for spelling in flag.spellings}
    assert not [word for word in (*spellings, *COMMANDS, "follow") if word not in script]


def test_torchruns_name_is_completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of a command torchrun that is elastic-run completes torchrun, which has no commands."""
    monkeypatch.setattr(sys, "argv", ["/opt/bin/torchrun", "--print-completion", "bash"])
    with pytest.raises(SystemExit):
        main()
    script = capsys.readouterr().out
    assert script.rstrip().endswith("_shtab_torchrun torchrun")
    assert "doctor" not in script


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "it needs shtab: pip install 'elastic-run[completion]'"),
        ("cmd", "'cmd' is none of bash, zsh, tcsh"),
    ],
)
def test_what_cannot_be_printed_is_one_line(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without shtab, and for a shell that it doesn't know, one line says so, and the exit code is 2."""
    if shell == "bash":
        monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        run_command(["--print-completion", shell])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"elastic-run: error: --print-completion: {line}")
