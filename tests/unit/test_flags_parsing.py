"""From words to a namespace: abbreviations, values, the end of the flags, variables, and what is wrong with a line."""

from __future__ import annotations

import argparse
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.flags import FLAGS, LEGACY_FLAGS
from elastic_run.cli.parser import LauncherArgumentParser, match_abbreviation
from elastic_run.core.config import Window
from elastic_run.notices import UsageError
from elastic_run.run import get_args_parser

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.cli.flags import Flag


def parse(
    words: str | Sequence[str], environ: dict[str, str] | None = None, flags: Sequence[Flag] = FLAGS
) -> Namespace:
    """Parse words, or a text of words separated by blanks, with these variables and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PET_")]:
            patch.delenv(name)
        for name, value in (environ or {}).items():
            patch.setenv(name, value)
        parser = LauncherArgumentParser(flags, raises_values=True)
        namespace: Namespace = parser.parse_args(words.split() if isinstance(words, str) else words)
        return namespace


def given(arguments: Namespace) -> dict[str, Any]:
    """Return the values that are not the defaults."""
    defaults = vars(parse("-"))
    return {name: value for name, value in vars(arguments).items() if value != defaults[name]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("s", {"training_script": "s"}),
        ("s --x 3 -r", {"training_script": "s", "training_script_args": ["--x", "3", "-r"]}),
        ("s --nnodes 3:1", {"training_script": "s", "training_script_args": ["--nnodes", "3:1"]}),
        ("s --r --max --no", {"training_script": "s", "training_script_args": ["--r", "--max", "--no"]}),
        ("-- s a", {"training_script": "s", "training_script_args": ["a"]}),
        ("-- --s a", {"training_script": "--s", "training_script_args": ["a"]}),
        ("s -- a", {"training_script": "s", "training_script_args": ["a"]}),
        ("s -- -- a", {"training_script": "s", "training_script_args": ["--", "a"]}),
        ("s a -- b", {"training_script": "s", "training_script_args": ["a", "--", "b"]}),
        ("-- s -- a", {"training_script": "s", "training_script_args": ["--", "a"]}),
        ("-- -- s", {"training_script": "--", "training_script_args": ["s"]}),
        ("--tee 3 -- s", {"tee": "3", "training_script": "s"}),
        ("-1 a", {"training_script": "-1", "training_script_args": ["a"]}),
        ("-.5 a", {"training_script": "-.5", "training_script_args": ["a"]}),
        ("--nproc_per_node 2 s", {"nproc_per_node": "2", "training_script": "s"}),
        ("--nproc-per-node=2 s", {"nproc_per_node": "2", "training_script": "s"}),
        ("--nproc=2 s", {"nproc_per_node": "2", "training_script": "s"}),
        ("--nproc_per 2 s", {"nproc_per_node": "2", "training_script": "s"}),
        ("-r3 s", {"redirects": "3", "training_script": "s"}),
        ("-r=3 s", {"redirects": "3", "training_script": "s"}),
        ("-r 3 s", {"redirects": "3", "training_script": "s"}),
        ("-mr3 s", {"module": True, "redirects": "3", "training_script": "s"}),
        ("-mt 3 s", {"module": True, "tee": "3", "training_script": "s"}),
        ("-mm s", {"module": True, "training_script": "s"}),
        ("--tee 1 --tee 2 s", {"tee": "2", "training_script": "s"}),
        ("--role= s", {"role": "", "training_script": "s"}),
        ("--role=a=b s", {"role": "a=b", "training_script": "s"}),
        ("--log-dir - s", {"log_dir": "-", "training_script": "s"}),
        ("--max 3 s", {"max_restarts": 3, "training_script": "s"}),
        ("--no-p s", {"no_python": True, "training_script": "s"}),
        ("--restart-w 5/h s", {"restart_window": Window(5, 3600.0), "training_script": "s"}),
        ("--requeue=3 s", {"requeue": 3, "training_script": "s"}),
        ("--requ 4 s --requeue", {"requeue": 4, "training_script": "s", "training_script_args": ["--requeue"]}),
    ],
)
def test_words_become_values(words: str, expected: dict[str, Any]) -> None:
    """Flags are read up to the script, everything behind it is the script's and never looked at."""
    assert given(parse(words)) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "no script given"),
        (["--"], "no script given"),
        (["--standalone"], "no script given"),
        (["--nnodes"], "--nnodes: needs a value (MIN[:MAX])"),
        (["--nnodes", "--standalone", "s"], "--nnodes: needs a value (MIN[:MAX])"),
        (["-r", "--", "s"], "--redirects: needs a value (WHICH)"),
        (["--role", "-x", "s"], "--role: needs a value (NAME)"),
        (["--standalone=1", "s"], "--standalone: takes no value, but got '1'"),
        (["-mx", "s"], "--module: takes no value, but got 'x'"),
        (["-max-restarts=3", "s"], "--module: takes no value, but got 'ax-restarts=3'"),
        (["-m=", "s"], "--module: takes no value, but got ''"),
        (["--r", "3", "s"], "--r is ambiguous: it could be --"),
        (["--nproc_per_nodes=2", "s"], "unknown flag --nproc_per_nodes, did you mean '--nproc-per-node'?"),
        (["-nnodes=2", "s"], "unknown flag -nnodes, did you mean '--nnodes'?"),
        (["--zzz", "s"], "unknown flag --zzz (see --help)"),
        (["--zzz"], "no script given"),
        (["--use-env", "s"], "unknown flag --use-env"),
        (["--requeue"], "--requeue: needs a value (N)"),
    ],
)
def test_a_wrong_line_is_answered_in_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line says which flag is wrong and what was meant or is allowed."""
    with pytest.raises(SystemExit) as ended:
        parse(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"elastic-run: error: {named}")


def test_a_value_may_have_blanks_and_a_dash_in_front() -> None:
    """A word with a blank in it is a value or a script even where it begins with a dash."""
    words = ["--role", "-a b", "--my script", "x"]
    arguments = parse(words)
    assert (arguments.role, arguments.training_script) == ("-a b", "--my script")


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.variable], ids=lambda flag: flag.name)
def test_every_variable_stands_in_for_its_flag_and_loses_against_it(flag: Flag) -> None:
    """PET_<NAME> gives the same value as the flag, the flag wins over it, and a bad one is named."""
    texts = {
        "--restart-window": "7/2h",
        "--exclude-after": "2/6h",
        "--no-restart-exit-codes": "9",
        "--signals-to-handle": "SIGHUP",
    }
    texts |= {"--forward-signals": "SIGUSR1", "--rdzv-conf": "a=b", "--start-method": "fork", "--worker-store": "torch"}
    texts |= {
        "--hang-action": "fail",
        "--on-split": "continue",
        "--membership-window": "3/1h",
        "--scale-up-signal": "SIGUSR1",
    }
    texts |= {"--preload": "torch", "--fence-after": "lease", "--config": os.devnull, "--inject-fault": "kill@3s"}
    texts |= {"--keep-state": "64GB", "--keep-state-copies": "1", "--keep-state-bandwidth": "500MB"}
    text = "1" if flag.is_switch else texts.get(flag.name, "2")
    words = [flag.name, "s"] if flag.is_switch else [flag.name, text, "s"]
    by_flag = parse(words)
    assert parse("s", {flag.variable: text}) == by_flag
    bad = "x" if flag.parse is not str else "2"
    assert parse(words, {flag.variable: bad}) == by_flag
    assert flag.variable == f"PET_{flag.dest.upper()}"


def test_a_bad_variable_is_named() -> None:
    """The line for a bad value from the environment begins with the variable."""
    with pytest.raises(UsageError, match=r"^PET_NNODES: '3:1' is not MIN\[:MAX\]"):
        parse("s", {"PET_NNODES": "3:1"})
    with pytest.raises(UsageError, match=r"^PET_STANDALONE: 'on' is not 1 or 0$"):
        parse("s", {"PET_STANDALONE": "on"})


def test_a_switch_turned_off_in_the_environment_can_be_turned_on() -> None:
    """PET_STANDALONE=0 is as if it weren't there."""
    assert parse("s", {"PET_STANDALONE": "0"}).standalone is False
    assert parse("--standalone s", {"PET_STANDALONE": "0"}).standalone is True


@pytest.mark.parametrize("words", ["-h", "--help", "--nnodes 2 --he", "-mh", "--zzz -h", "--version", "--vers x"])
def test_help_and_version_are_answered_where_they_stand(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The text asked for comes before any complaint about what follows or is missing."""
    with pytest.raises(SystemExit) as ended:
        parse(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert out.startswith(("usage: elastic-run", "elastic-run "))


def test_every_beginning_of_our_own_flags_works_where_torchrun_has_none() -> None:
    """An abbreviation that only flags of ours begin with finds them."""
    assert [flag.name for flag in match_abbreviation("--restart", FLAGS)] == ["--restart-window"]
    assert [flag.name for flag in match_abbreviation("--fo", FLAGS)] == ["--forward-signals"]
    assert [flag.name for flag in match_abbreviation("--v", FLAGS)] == ["--virtual-local-rank"]


def test_the_legacy_front_door_adds_a_switch() -> None:
    """--use-env and --use_env are one switch, off by default."""
    values = [parse(words, flags=LEGACY_FLAGS).use_env for words in ("s", "--use-env s", "--use_env s")]
    assert values == [False, True, True]


#: Words, and the beginning of the line with which a parser of a program's own refuses them.
FOREIGN = [
    ("", "the following arguments are required: training_script"),
    ("--module", "the following arguments are required: training_script"),
    ("--no-python", "the following arguments are required: training_script"),
    ("--nnodes=0 s", "argument --nnodes: '0' is not MIN[:MAX]"),
    ("--standalone=1 s", "argument --standalone"),
]


@pytest.mark.parametrize(("words", "named"), FOREIGN)
@pytest.mark.parametrize("way", ["parents", "actions"])
def test_the_flags_work_in_a_programs_own_parser(
    words: str, named: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that takes our actions into a parser of its own gets converted values, and errors for wrong ones."""
    ours = LauncherArgumentParser(FLAGS)
    own = argparse.ArgumentParser(prog="own", add_help=False, parents=[ours] if way == "parents" else [])
    for action in ours._actions if way == "actions" else []:
        own._add_action(action)
    values = own.parse_args(["--max_restarts=2", "--restart-window", "5/h", "s", "--x"])
    assert (values.max_restarts, values.restart_window) == (2, Window(5, 3600.0))
    assert (values.training_script, values.training_script_args) == ("s", ["--x"])
    with pytest.raises(SystemExit) as ended:
        own.parse_args(words.split())
    assert ended.value.code == 2
    assert f"own: error: {named}" in capsys.readouterr().err


def test_a_programs_own_flag_works_in_our_parser() -> None:
    """A program may add flags to the parser; they are parsed, and may be abbreviated, as argparse does it."""
    parser = LauncherArgumentParser(FLAGS)
    parser.add_argument("--profile-with", type=int)
    assert parser.parse_args(["--profile-with=3", "s"]).profile_with == 3
    assert parser.parse_args(["--prof", "4", "s"]).profile_with == 4
    assert parser.parse_known_args(["--zzz", "s"])[1] == ["--zzz"]


def test_a_program_may_have_flags_that_many_programs_have() -> None:
    """The parser for programs leaves --config to them, which a program may well add itself; torch's has none either."""
    parser = get_args_parser()
    parser.add_argument("--config", type=int)
    parser.add_argument_group("own").add_argument("--explain", type=int)
    args = parser.parse_args(["--config=3", "--explain=4", "--nnodes=2", "s"])
    assert (args.config, args.explain, args.nnodes) == (3, 4, "2")


def test_a_wrong_value_is_raised_only_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """`main` raises it, as torch's does; a parser that a program has made itself ends with a line."""
    with pytest.raises(UsageError, match=r"^--requeue: '' is not a whole number"):
        LauncherArgumentParser(FLAGS, raises_values=True).parse_args(["--requeue", "", "s"])  # "$N" without N
    with pytest.raises(UsageError, match=r"^--nnodes: '0' is not MIN"):
        LauncherArgumentParser(FLAGS, raises_values=True).parse_args(["--nnodes=0", "s"])
    with pytest.raises(SystemExit):
        LauncherArgumentParser(FLAGS).parse_args(["--nnodes=0", "s"])
    assert capsys.readouterr().err.startswith("elastic-run: error: --nnodes: '0' is not MIN")


def test_usual_words_are_counted_as_argparse_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our answers without an expression are those of argparse: for flags, and for the script and what is behind it."""
    parser = LauncherArgumentParser(FLAGS)
    switch, valued = (parser._option_string_actions[name] for name in ("--standalone", "--nnodes"))
    programs = [action for action in parser._actions if not action.option_strings]
    patterns = ["".join(letters) for length in range(6) for letters in itertools.product("AO-", repeat=length)]

    def count_words() -> list[object]:
        return [
            *(parser._match_arguments_partial(programs, pattern) for pattern in patterns),
            *(parser._match_argument(switch, pattern) for pattern in patterns),
            *(parser._match_argument(valued, pattern) for pattern in patterns if pattern.startswith("A")),
        ]

    ours = count_words()
    for name in ("_match_argument", "_match_arguments_partial"):
        monkeypatch.setattr(LauncherArgumentParser, name, getattr(argparse.ArgumentParser, name))
    assert ours == count_words()


@pytest.mark.parametrize("word", ["-1", "-.5", "-1.5", "--tee", "-r", "-", "", "-1x", "--1"])
def test_a_number_is_what_argparse_takes_for_one(word: str) -> None:
    """The parser takes the same words for negative numbers as argparse's regular expression."""
    parser = LauncherArgumentParser(FLAGS)
    plain = argparse.ArgumentParser()
    ours, others = (each._optionals._negative_number_matcher.match(word) for each in (parser, plain))
    assert bool(ours) == bool(others)
