"""What --help prints, and the command line reference of the docs: both from the table of flags.

Read at 3 a.m.: 80 columns whatever the terminal says, one flag per paragraph, and with each what it is if left out and
which variable stands in for it.
"""

from __future__ import annotations

import textwrap

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.flags import Flag

WIDTH = 80

_INTRODUCTION = """\
usage: elastic-run [flags] SCRIPT [arguments of the script]
       elastic-run [flags] -m MODULE [arguments of the module]
       elastic-run [flags] --no-python PROGRAM [arguments of the program]

Starts the workers of a distributed PyTorch job, watches them, restarts them
when one fails, and says what went wrong. Takes torchrun's command line.

  elastic-run --nproc-per-node=gpu train.py --epochs 3
  elastic-run --nproc-per-node=2 --max-restarts=3 --tee=3 --log-dir=log train.py

Flags come before the script, written with hyphens or underscores; a unique
beginning is enough. Each may also be given as an environment variable, as
shown; the command line wins. Switches are 1 or 0 there. ${local_rank} in the
script's arguments becomes the number of the worker on its node. PYTHON_EXEC
names the interpreter of the workers.
"""


def render_help(flags: Sequence[Flag]) -> str:
    """Return the text of --help.

    Args:
        flags: What flags there are.
    """
    paragraphs = [_INTRODUCTION]
    for group in dict.fromkeys(flag.group for flag in flags):
        entries = "\n".join(_render_flag(flag) for flag in flags if flag.group == group)
        paragraphs.append(f"{group}\n{entries}\n")
    codes = "\n".join(_render_exit_code(code, text) for code, _, text in contract.EXIT_CODES)
    paragraphs.append(f"Exit codes\n{codes}\n")
    return "\n".join(paragraphs)


def _render_flag(flag: Flag) -> str:
    facts = f"[{'; '.join(_facts(flag))}]" if _facts(flag) else ""
    text = textwrap.fill(
        f"{flag.text} {facts}".rstrip(),
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
    facts = [f"default {_show(flag.default)}"] if _has_default(flag) else []
    return [*facts, flag.variable] if flag.variable else facts


def _has_default(flag: Flag) -> bool:
    return not flag.is_switch and flag.default is not None and flag.default not in ("", [], frozenset())


def _show(value: object) -> str:
    if isinstance(value, tuple):  # N/PERIOD
        return "/".join(map(_show, value)) + "s"
    return f"{value:g}" if isinstance(value, float) else str(value)


def render_markdown(flags: Sequence[Flag]) -> str:
    """Return the reference of the command line in Markdown, a table for each group.

    Args:
        flags: What flags there are.
    """
    lines = ["<!-- Made from elastic_run/flags.py; change it there. -->", ""]
    for group in dict.fromkeys(flag.group for flag in flags):
        lines += [f"## {group}", "", "| flag | default | environment | |", "|---|---|---|---|"]
        lines += [_render_row(flag) for flag in flags if flag.group == group]
        lines.append("")
    return "\n".join(lines)


def _render_row(flag: Flag) -> str:
    default = f"`{_show(flag.default)}`" if _has_default(flag) else "off" if flag.is_switch and flag.variable else ""
    variable = f"`{flag.variable}`" if flag.variable else ""
    cells = (f"`{_heading(flag)}`", default, variable, flag.text + (" *(not in torchrun)*" if flag.is_ours else ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
