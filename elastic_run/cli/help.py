"""What the table of flags says in other forms: --help, --help-all, --print-completion.

The help has 80 columns, whatever the terminal's width is.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap

from elastic_run import contract
from elastic_run.cli.commands import COMMANDS, CommandParser, argument, run
from elastic_run.cli.flags import FLAGS
from elastic_run.core.config import Window
from elastic_run.notices import UsageError, print_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elastic_run.cli.flags import Flag

WIDTH = 80
#: The flags of --help, in its order.
MOST_USED = ("--nproc-per-node", "--nnodes", "--max-restarts", "--tee", "--log-dir", "--preload")
#: Each runs as it stands, with a train.py in the directory; the last waits for the second node. A test runs them.
EXAMPLES = (
    ("elastic-run --nproc-per-node=2 train.py --epochs=3", "Two workers on this node; --epochs=3 goes to train.py."),
    (
        "elastic-run --nproc-per-node=2 --max-restarts=3 --tee=3 --log-dir=log train.py",
        "Restart the workers up to 3 times, and keep their output in log/.",
    ),
    (
        "elastic-run --nproc-per-node=auto --preload=torch train.py",
        "One worker per GPU (per CPU without GPUs); torch is imported once.",
    ),
    (
        "elastic-run --nnodes=2 --nproc-per-node=2 train.py",
        "The first of two nodes. It prints the command for the second node.",
    ),
)

_USAGE = """\
usage: elastic-run [flags] SCRIPT [arguments of the script]
       elastic-run [flags] -m MODULE [arguments of the module]
       elastic-run [flags] --no-python PROGRAM [arguments of the program]
       elastic-run COMMAND [arguments of the command]

elastic-run starts the workers of a distributed PyTorch job on this node,
restarts them after a failure, and reports the cause of the failure. It accepts
torchrun's flags.
"""

_RULES = """\
Flags come before the script. You may write them with hyphens or underscores, as
--flag VALUE or --flag=VALUE, and shorten them as long as no other flag begins
in the same way. An environment variable PET_... has the effect of its flag; a
flag on the command line overrides its variable. For a flag without a value, the
variable is 1 or 0. TIME and PERIOD are a number of seconds, or a number with
the unit s, m, h or d (5m). In the arguments of the script, ${local_rank} stands
for the local rank of the worker. The variable PYTHON_EXEC names the interpreter
of the workers; by default it is the interpreter that runs elastic-run. If a
script has the name of a command, write its directory: elastic-run ./help.
"""


def render_help(flags: Sequence[Flag], *, explains_commands: bool = False) -> str:
    """Return the text of --help: the most used flags, examples, and the commands, by their names alone or explained."""
    by_name = {flag.name: flag for flag in flags}
    names = textwrap.fill(", ".join(COMMANDS), WIDTH, initial_indent="  ", subsequent_indent="  ")
    end = f"[PET_...] is the environment variable that sets the flag.\n--help-all shows all {len(flags)} flags"
    paragraphs = [
        _USAGE,
        *([render_commands()] if explains_commands else []),
        _render_group("Most used flags", [by_name[name] for name in MOST_USED]),
        "Examples\n" + "".join(f"  {command}\n      {text}\n" for command, text in EXAMPLES),
        *([] if explains_commands else [f"Commands (elastic-run help explains them)\n{names}\n"]),
        f"{end} and the exit codes.\n",
    ]
    return "\n".join(paragraphs)


def render_commands() -> str:
    """Return the table of the commands."""
    rows = "\n".join(
        textwrap.fill(f"  {name:<10}{text}", WIDTH, subsequent_indent=" " * 12) for name, text in COMMANDS.items()
    )
    return f"Commands (elastic-run help COMMAND shows the arguments of each)\n{rows}\n"


def render_all_help(flags: Sequence[Flag]) -> str:
    """Return the text of --help-all: all flags by group, and the exit codes."""
    paragraphs = [_USAGE, render_commands(), _RULES]
    groups = dict.fromkeys(flag.group for flag in flags)
    paragraphs += [_render_group(group, [flag for flag in flags if flag.group == group]) for group in groups]
    # Any terminal can show a hyphen.
    codes = "\n".join(
        textwrap.fill(f"  {str(code).replace(chr(0x2013), '-'):<8}{text}", WIDTH, subsequent_indent=" " * 10)
        for code, _, text in contract.EXIT_CODES
    )
    paragraphs.append(f"Exit codes\n{codes}\n")
    return "\n".join(paragraphs)


def _render_group(title: str, flags: Iterable[Flag]) -> str:
    entries = []
    for flag in flags:
        default = describe_default(flag)
        facts = [*([f"[default: {default}]"] if default else []), *([f"[{flag.variable}]"] if flag.variable else [])]
        text = textwrap.fill(" ".join([flag.text, *facts]), WIDTH - 6, break_on_hyphens=False)
        entries.append(f"  {flag.heading}\n{textwrap.indent(text, ' ' * 6)}\n")
    return f"{title}\n{''.join(entries)}"


def describe_default(flag: Flag) -> str:
    """Return the default of a flag as text, empty for a flag that prints a text."""
    if flag.default_text or flag.prints_text:
        return flag.default_text
    if not flag.is_switch and flag.default in (None, "", [], ()):
        return "none"
    unit = "s" if flag.values in {"TIME", "SECONDS"} else ""
    if flag.is_switch:
        return "off"
    if isinstance(flag.default, Window):
        return f"{flag.default.count}/{flag.default.seconds:g}s"
    return (f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)) + unit


# --- completion -------------------------------------------------------------------------------------------------------

#: Forms of values that shtab completes, and its name of the completion.
_PATHS = {"FILE": "FILE", "PATH": "FILE", "DIR": "DIRECTORY", "LOGDIR": "DIRECTORY"}
#: What prints the jobs that RUN may name. tcsh ends its rules at a slash and at a single quote.
_JOBS = 'elastic-run ps | tail -n +2 | cut -d " " -f 1'
_RUNS = {"bash": "_elastic_run_jobs", "zsh": "_elastic_run_jobs", "tcsh": f"`{_JOBS}`"}
#: RUN gets the ids of jobs, and in `logs` also directories. Files stand beside the commands, and where shtab is silent.
_PREAMBLES = {
    "bash": """\
{prefix}_pos_0_COMPGEN=_shtab_compgen_files
_elastic_run_jobs() {{
  compgen -W "$({jobs})" -- "$1"
  [[ ${{COMP_WORDS[1]}} != logs ]] || _shtab_compgen_dirs "$1"
}} 2> /dev/null""",
    "zsh": """\
_elastic_run_jobs() {{
  compadd -- ${{(f)"$({jobs})"}}
  [[ $words[1] != logs ]] || _files -/
}} 2> /dev/null
functions[{prefix}_shtab]=$functions[{prefix}]
{prefix}() {{
  {prefix}_shtab "$@"
  (( compstate[nmatches] )) || _files
}}
functions[{prefix}_names]=$functions[{prefix}_commands]
{prefix}_commands() {{
  {prefix}_names
  _files
}}""",
}
#: shtab's last rule for tcsh, by which no other word has a completion, and ours.
_NOTHING, _FILES = "'p/*/()/'", "'p/*/f/'"


def render_completion(shell: str, flags: Iterable[argparse.Action]) -> str:
    """Return the script with which a shell completes the command line, made by shtab from an argparse parser.

    The first word may also be a script. shtab knows no such grammar, and completes the commands alone, so some lines
    of each shell add the names of files.
    """
    try:
        import shtab
    except ImportError:
        message = "--print-completion: it needs shtab: pip install 'elastic-run[completion]'"
        raise UsageError(message) from None
    if shell not in shtab.SUPPORTED_SHELLS:
        message = f"--print-completion: {shell!r} is none of {', '.join(shtab.SUPPORTED_SHELLS)}"
        raise UsageError(message)
    is_torchrun = os.path.basename(sys.argv[0]) == "torchrun"  # which has no commands of its own
    program = "torchrun" if is_torchrun else "elastic-run"
    parser = argparse.ArgumentParser(program, add_help=False)
    for flag in flags:
        parser._add_action(_complete(flag))  # noqa: SLF001 - add_argument makes new ones
    if not is_torchrun:
        places = parser.add_subparsers()
        for name, text in COMMANDS.items():
            own = CommandParser(name)
            for action in own._actions:  # noqa: SLF001 - argparse has no other way to list them
                _complete(action)
            if (name, shell) == ("drain", "tcsh"):  # it would have jobs for the third word of any command line
                own._actions[-1].complete = {}  # type: ignore[attr-defined] # noqa: SLF001
            places.add_parser(name, help=text, parents=[own], add_help=False)
    preamble = _PREAMBLES.get(shell, "").format(prefix="_shtab_" + re.sub(r"\W", "_", program), jobs=_JOBS)
    return f"{shtab.complete(parser, shell, preamble=preamble).replace(_NOTHING, _FILES)}\n"


def _complete(action: argparse.Action) -> argparse.Action:
    """Tell shtab how a value is completed. It gets the first sentence of a help, and no form of the value.

    In zsh's descriptions a colon ends the form.
    """
    import shtab

    form = action.metavar if isinstance(action.metavar, str) else ""
    words = [word for word in form.split("|") if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
    if form == "RUN":
        action.complete = _RUNS  # type: ignore[attr-defined] # where shtab reads it
    elif form in _PATHS:
        action.complete = getattr(shtab, _PATHS[form])  # type: ignore[attr-defined]
    elif words:
        action.choices = words
    action.metavar = None
    action.help = (action.help or "").partition(". ")[0]
    return action


# --- elastic-run help ------------------------------------------------------------------------------------------------


ARGUMENTS = {
    "help": [argument("command", nargs="?", choices=[*COMMANDS], metavar="COMMAND", help="one of the commands")]
}


def run_help(words: Sequence[str]) -> int:
    """Print the commands and the most used flags, or the help of one command."""
    command = CommandParser("help").parse_args(words).command
    if command is not None:
        return run([command, "--help"])
    print_text(render_help(FLAGS, explains_commands=True))
    return 0
