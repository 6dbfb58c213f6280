"""The texts of --help and --help-all, and the reference of the docs, all made from the table of flags.

Both texts have 80 columns, whatever the terminal's width is. Each flag is a paragraph with its meaning, its default and
the variable that stands in for it.
"""

from __future__ import annotations

import re
import textwrap

from elastic_run import contract
from elastic_run.cli.commands import COMMANDS
from elastic_run.core.job.config import Window

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
#: Words that the reference shows as code in the text of a flag: flags, and variables with an underscore.
_CODE = re.compile(r"(?<![\w/-])--?[a-z][\w-]*(?:=[\w:]+)?|\b[A-Z][A-Z\d]*_[A-Z\d_]+\b")

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


def render_help(flags: Sequence[Flag]) -> str:
    """Return the text of --help: the most used flags, examples, and the names of the commands."""
    names = textwrap.fill(", ".join(COMMANDS), WIDTH, initial_indent="  ", subsequent_indent="  ")
    commands = f"Commands (elastic-run help explains them)\n{names}\n"
    return "\n".join([_USAGE, *_render_most_used(flags), commands, _render_end(flags)])


def render_command_help(flags: Sequence[Flag]) -> str:
    """Return the text of `elastic-run help`: that of --help, but with the table of the commands."""
    return "\n".join([_USAGE, render_commands(), *_render_most_used(flags), _render_end(flags)])


def _render_most_used(flags: Sequence[Flag]) -> list[str]:
    by_name = {flag.name: flag for flag in flags}
    examples = "\n".join(f"  {command}\n      {text}" for command, text in EXAMPLES)
    return [_render_group("Most used flags", [by_name[name] for name in MOST_USED]), f"Examples\n{examples}\n"]


def _render_end(flags: Sequence[Flag]) -> str:
    return (
        "[PET_...] is the environment variable that sets the flag.\n"
        f"--help-all shows all {len(flags)} flags and the exit codes.\n"
    )


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
    codes = "\n".join(_render_exit_code(code, text) for code, _, text in contract.EXIT_CODES)
    paragraphs.append(f"Exit codes\n{codes}\n")
    return "\n".join(paragraphs)


def _render_group(title: str, flags: Iterable[Flag]) -> str:
    entries = "\n".join(_render_flag(flag) for flag in flags)
    return f"{title}\n{entries}\n"


def _render_flag(flag: Flag) -> str:
    text = textwrap.fill(
        " ".join([flag.text, *_facts(flag)]),
        WIDTH,
        initial_indent="      ",
        subsequent_indent="      ",
        break_on_hyphens=False,
    )
    return f"  {_heading(flag)}\n{text}"


def _render_exit_code(code: int | str, text: str) -> str:
    return textwrap.fill(f"  {_plain(code):<8}{text}", WIDTH, subsequent_indent=" " * 10)


def _plain(code: int | str) -> str:
    """Any terminal can show it."""
    return str(code).replace("\N{EN DASH}", "-")


def _heading(flag: Flag) -> str:
    names = ", ".join(name for name in flag.spellings if "_" not in name)
    return f"{names} {flag.values}".rstrip()


def _facts(flag: Flag) -> list[str]:
    default = describe_default(flag)
    return [*([f"[default: {default}]"] if default else []), *([f"[{flag.variable}]"] if flag.variable else [])]


def describe_default(flag: Flag) -> str:
    """Return the default of a flag as text, empty for a flag that prints a text."""
    if flag.default_text or flag.prints_text:
        return flag.default_text
    if not flag.is_switch and flag.default in (None, "", [], ()):
        return "none"
    unit = "s" if flag.values in {"TIME", "SECONDS"} else ""
    return "off" if flag.is_switch else _show(flag.default) + unit


def _show(value: object) -> str:
    if isinstance(value, Window):
        return f"{value.count}/{value.seconds:g}s"
    return f"{value:g}" if isinstance(value, float) else str(value)


def render_markdown(flags: Sequence[Flag]) -> str:
    """Return the reference of the command line in Markdown: a section for each flag.

    Sections rather than a table: in a narrow table words break, and a `|` in a value would have to be escaped.
    """
    groups = dict.fromkeys(flag.group for flag in flags)
    sections = ["\n\n".join(_render_section(flag) for flag in flags if flag.group == group) for group in groups]
    head = "<!-- Made from elastic_run/cli/flags.py; change it there. -->"
    return "\n\n".join([head, *(f"## {group}\n\n{text}" for group, text in zip(groups, sections, strict=True))]) + "\n"


def _render_section(flag: Flag) -> str:
    default = flag.default_text or f"`{describe_default(flag)}`"
    facts = [f"Default {default}"] if describe_default(flag) else []
    facts += [f"Variable `{flag.variable}`"] * bool(flag.variable)
    facts += ["*Not in torchrun*"] * flag.is_ours
    heading = f"### `{_heading(flag)}` {{ #{flag.name.strip('-')} }}"
    return "\n\n".join([heading, _CODE.sub(r"`\g<0>`", flag.text), *([" · ".join(facts)] if facts else [])])


if __name__ == "__main__":
    import sys

    from elastic_run.cli.flags import FLAGS

    sys.stdout.write(render_markdown(FLAGS))
