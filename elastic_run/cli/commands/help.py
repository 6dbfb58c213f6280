"""``elastic-run help [COMMAND]``: the commands and the most used flags, or the help of one command."""

from __future__ import annotations

from elastic_run.cli.commands import COMMANDS, CommandParser, run
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.help import render_command_help
from elastic_run.notices import print_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def make_help_parser() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser("help")
    parser.add_argument("command", nargs="?", choices=[*COMMANDS], metavar="COMMAND", help="one of the commands")
    return parser


def run_help(words: Sequence[str]) -> int:
    """Print the help."""
    command = make_help_parser().parse_args(words).command
    if command is not None:
        return run([command, "--help"])
    print_text(render_command_help(FLAGS))
    return 0
