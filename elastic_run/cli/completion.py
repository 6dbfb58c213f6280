"""What `--print-completion` prints: a script with which a shell completes the command line, made by shtab.

shtab derives the script from an argparse parser. That parser has the flags of the table and the commands, where each
value that a flag or a command names in its help (``node|socket``, ``FILE``) is completed.

The first word may also be a script, and shtab knows no such grammar: it completes the commands alone. Some lines of
each shell add the names of files.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib import import_module

from elastic_run.cli import commands
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

#: Forms of values that shtab completes, and its name of the completion.
_PATHS = {"FILE": "FILE", "PATH": "FILE", "DIR": "DIRECTORY", "LOGDIR": "DIRECTORY"}
#: Files beside the commands, and wherever shtab has nothing.
_WITH_FILES = {
    "bash": "{prefix}_pos_0_COMPGEN=_shtab_compgen_files",
    "zsh": """\
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
#: shtab's last rule for tcsh, by which no other word has a completion.
_NOTHING, _FILES = "'p/*/()/'", "'p/*/f/'"


def render_completion(shell: str, flags: Iterable[argparse.Action]) -> str:
    """Return the script for a shell, which completes the command by the name that it has here.

    Args:
        shell: Its name.
        flags: Actions of the flags.

    Returns:
        The script.

    Raises:
        UsageError: shtab is not installed, or does not know the shell.
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
        _add_commands(parser)
    prefix = "_shtab_" + re.sub(r"\W", "_", program)
    preamble = _WITH_FILES.get(shell, "").format(prefix=prefix)
    return f"{shtab.complete(parser, shell, preamble=preamble).replace(_NOTHING, _FILES)}\n"


def _add_commands(parser: argparse.ArgumentParser) -> None:
    places = parser.add_subparsers()
    for name, text in commands.COMMANDS.items():
        own: argparse.ArgumentParser = import_module(f"{commands.__name__}.{name}").make_parser()
        for action in own._actions:  # noqa: SLF001 - argparse has no other way to list them
            _complete(action)
        places.add_parser(name, help=text, parents=[own], add_help=False)


def _complete(action: argparse.Action) -> argparse.Action:
    """Tell shtab how a value is completed. It gets the first sentence of a help, and no form of the value.

    In zsh's descriptions a colon ends the form.
    """
    import shtab

    form = action.metavar if isinstance(action.metavar, str) else ""
    words = [word for word in form.split("|") if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
    if form in _PATHS:
        action.complete = getattr(shtab, _PATHS[form])  # type: ignore[attr-defined] # where shtab reads it
    elif words:
        action.choices = words
    action.metavar = None
    action.help = (action.help or "").partition(". ")[0]
    return action
