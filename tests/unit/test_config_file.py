"""`--config`: what a file may say, what comes before it, and the line for each mistake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.flags import CONFIGURATION, FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.cli.request import FILE, FLAG, VARIABLE, Origin
from elastic_run.notices import UsageError
from elastic_run.run import _make_join_command, run_command

if TYPE_CHECKING:
    from argparse import Namespace

    from elastic_run.cli.flags import Flag


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, without variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def parse(text: str, *words: str) -> tuple[Namespace, dict[str, Origin]]:
    """Return the values of a file and of words, and their origins."""
    Path("job.toml").write_text(text, encoding="utf-8")
    parser = LauncherArgumentParser(FLAGS, raises_values=True)
    return parser.parse_args(["--config=job.toml", *words, "s"]), parser.origins


def by_words(*words: str) -> Namespace:
    """Return the values of words alone, with the name of the file that the others have."""
    args: Namespace = LauncherArgumentParser(FLAGS, raises_values=True).parse_args([*words, "s"])
    args.config = "job.toml"
    return args


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("nnodes = 2", ["--nnodes=2"]),
        ('nnodes = "1:4"', ["--nnodes=1:4"]),
        ("nproc-per-node = 8", ["--nproc-per-node=8"]),
        ('nproc_per_node = "gpu"', ["--nproc-per-node=gpu"]),
        ("max_restarts = 3\nmonitor-interval = 0.5", ["--max-restarts=3", "--monitor-interval=0.5"]),
        ('min-uptime = 90\nmax-backoff = "2m"', ["--min-uptime=90", "--max-backoff=2m"]),
        ("standalone = true\nno-capture = false", ["--standalone"]),
        ("tee = 3\nredirects = '0:1,1:2'", ["--tee=3", "--redirects=0:1,1:2"]),
        ("no-restart-exit-codes = [3, '64-78']", ["--no-restart-exit-codes=3,64-78"]),
        ("no-restart-exit-codes = 3", ["--no-restart-exit-codes=3"]),
        ("preload = ['torch', 'numpy']", ["--preload=torch,numpy"]),
        ("preload = []", ["--preload="]),
        ("duplicate-stdout-filters = ['a,b', 'c']", ["--duplicate-stdout-filters=a,,b,c"]),
        ("rdzv-conf = {timeout = 5, is_host = true}", ["--rdzv-conf=timeout=5,is_host=true"]),
        ("[rdzv-conf]\njoin_timeout = 1.5\nstore_type = 'tcp'", ["--rdzv-conf=join_timeout=1.5,store_type=tcp"]),
        ("rdzv-endpoint = ['a:1', 'b:2']\nrdzv-id = '42'", ["--rdzv-endpoint=a:1,b:2", "--rdzv-id=42"]),
        ("requeue = 3", ["--requeue=3"]),
        ('restart-window = "5/1h"\nrole = "träger"', ["--restart-window=5/1h", "--role=träger"]),
    ],
)
def test_a_file_means_what_the_same_flags_mean(text: str, words: list[str]) -> None:
    """Each type of TOML becomes the value of the flag, with the flag's own type."""
    args, _ = parse(text)
    assert args == by_words(*words)
    assert {name: type(value) for name, value in vars(args).items() if name != "config"} == {
        name: type(value) for name, value in vars(by_words(*words)).items() if name != "config"
    }


def test_flags_and_variables_come_before_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file gives what neither of them gives; the origin of a value names the file that is not used."""
    monkeypatch.setenv("PET_TEE", "1")
    monkeypatch.setenv("PET_ROLE", "variable")
    args, origins = parse("nnodes = 2\ntee = 2\nmax-restarts = 3\nrole = 'file'", "--nnodes=4", "--role=flag")
    assert (args.nnodes, args.tee, args.max_restarts, args.role) == ("4", "1", 3, "flag")
    assert origins == {
        "config": Origin(FLAG, "--config", "job.toml"),
        "nnodes": Origin(FLAG, "--nnodes", "4", Origin(FILE, "job.toml", "2")),
        "tee": Origin(VARIABLE, "PET_TEE", "1", Origin(FILE, "job.toml", "2")),
        "role": Origin(FLAG, "--role", "flag", Origin(VARIABLE, "PET_ROLE", "variable")),
        "max_restarts": Origin(FILE, "job.toml", "3"),
    }


def test_a_variable_may_name_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """PET_CONFIG does for a container what --config does for a command."""
    Path("job.toml").write_text("nnodes = 3", encoding="utf-8")
    monkeypatch.setenv("PET_CONFIG", "job.toml")
    assert LauncherArgumentParser(FLAGS).parse_args(["s"]).nnodes == "3"
    monkeypatch.setenv("PET_CONFIG", "")
    assert LauncherArgumentParser(FLAGS).parse_args(["s"]).nnodes == "1:1"


MISTAKES = [
    ("max-restart = 3", "job.toml: max-restart: is not a flag, did you mean 'max-restarts'?"),
    ("nproc = 3", "job.toml: nproc: is not a flag, did you mean 'nproc-per-node'?"),
    ("zzz = 3", "job.toml: zzz: is not a flag"),
    ("script = 'train.py'", "job.toml: script: is not a flag"),
    ("config = 'x'", "job.toml: config: is for the command line only"),
    ("help = true", "job.toml: help: is not a flag"),
    ("max-restarts = 3\nmax_restarts = 3", "job.toml: max_restarts: is set twice, with a hyphen and with an"),
    ("max-restarts = 'three'", "job.toml: max-restarts: 'three' is not a whole number from 0 up"),
    ("max-restarts = true", "job.toml: max-restarts: true is not a value of this flag (N)"),
    ("max-restarts = {n = 3}", "job.toml: max-restarts: a table is not a value of this flag (N)"),
    ("max-restarts = 1979-05-27", "job.toml: max-restarts: a date or a time is not a value of this flag (N)"),
    ("nnodes = '4:1'", "job.toml: nnodes: '4:1' is not MIN[:MAX] with 1 <= MIN <= MAX"),
    ("standalone = 1", "job.toml: standalone: 1 is not true or false"),
    ("rdzv-id = 42", 'job.toml: rdzv-id: 42 is a number, but the value is a text: write "42"'),
    ("preload = [1.5, true]", "job.toml: preload: true in the list is not a value of this flag (MODULE,...)"),
    ("rdzv-conf = {a = [1]}", "job.toml: rdzv-conf: a: a list is not a number, a text, true or false"),
    ("rdzv-conf = {a = 'b,c'}", "job.toml: rdzv-conf: a: 'b,c' has a comma, which ends a setting"),
    ("rdzv-conf = {timeout = 'x'}", "job.toml: rdzv-conf: 'timeout=x' is wrong: timeout is not a number of seconds"),
    ("nnodes 3", "--config: job.toml: is not TOML: Expected '=' after a key in a key/value pair (at line 1, column 8)"),
    ("nnodes = " + "[" * 5000, "--config: job.toml: its lists or tables are nested too deeply"),
    ("a." * 100_000 + "a = 1", "--config: job.toml:1: the line has more than 100 dots"),
    ("nnodes = 1\nnnodes = 2", "--config: job.toml: is not TOML: Cannot overwrite a value (at "),
]


@pytest.mark.parametrize(("text", "line"), MISTAKES)
def test_a_mistake_is_answered_in_one_line(text: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line has the file, the key and what is allowed, and the exit code is 2; a program gets an error."""
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(caught.value).startswith(line)
    with pytest.raises(SystemExit) as ended:
        run_command(["--config=job.toml", "s"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"elastic-run: error: {line}")


def test_a_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, a directory, a file that is no text and one without end each get a line."""
    Path("data").write_bytes(b"\xff\xfe")
    lines = []
    for path in ("none.toml", ".", "data", "/dev/zero"):
        with pytest.raises(SystemExit):
            run_command([f"--config={path}", "s"])
        lines.append(capsys.readouterr().err)
    assert lines[0] == "elastic-run: error: --config: 'none.toml' can't be read: no such file or directory\n"
    assert lines[1] == "elastic-run: error: --config: '.' can't be read: is a directory\n"
    assert lines[2].startswith("elastic-run: error: --config: data: is not TOML: ")
    assert lines[3] == "elastic-run: error: --config: '/dev/zero' is longer than 256 KiB\n"


def test_an_empty_name_of_a_file_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag whose shell variable is not set names no file; an empty variable of our own is the same as none."""
    monkeypatch.setenv("PET_CONFIG", "")
    parser = LauncherArgumentParser(FLAGS, raises_values=True)
    assert parser.parse_args(["s"]).config == ""
    with pytest.raises(UsageError, match=r"^--config: '' can't be read: no such file or directory$"):
        parser.parse_args(["--config=", "s"])


def test_a_missing_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10 needs a package, which an installation without dependencies lacks."""

    def refuse(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(UsageError, match=r"^--config: .* package tomli, which is missing"):
        parse("nnodes = 2")


def test_other_nodes_get_the_values_and_not_the_file() -> None:
    """The command that joins has what the file gave, since other nodes may not have the file."""
    args, origins = parse("nnodes = 2\npreload = ['a', 'b']\nstandalone = false", "--role=r")
    command = _make_join_command(args, FLAGS, ("elastic-run",), origins)
    assert command.flags == ("--nnodes=2", "--role=r", "--preload=a,b")


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if not flag.prints_text and flag.group != CONFIGURATION], ids=lambda flag: flag.name
)
def test_each_flag_may_stand_in_a_file(flag: Flag) -> None:
    """The default of each flag can be written as TOML, by both spellings, and is the default again."""
    text = "false" if flag.is_switch else None
    if text is None and isinstance(flag.default, (str, int, float)):
        text = repr(flag.default)
    if text is None:
        return  # no text stands for it
    for key in (flag.name[2:], flag.dest):
        args, origins = parse(f"{key} = {text}")
        assert args == by_words()
        assert origins[flag.dest].kind == FILE


def test_control_characters_of_a_file_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A key, or the name of the file, changes no colour of the terminal and begins no line."""
    Path("a\x1b[31m\n.toml").write_text('"\\u001b[31mx\\u0007" = 1', encoding="utf-8")
    for flag in ("--config", "--failure-rules"):
        with pytest.raises(SystemExit):
            run_command([f"{flag}=a\x1b[31m\n.toml", "s"])
        said = capsys.readouterr().err
        assert said.removesuffix("\n").isprintable()
        assert r"a\x1b[31m\n.toml" in said
        assert r"\x1b[31mx\x07" in said
