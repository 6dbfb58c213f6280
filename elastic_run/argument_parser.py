"""The same command line as an argparse parser, for programs that build on torch's `get_args_parser`.

The command itself doesn't come here (see command_line.py for the reason). Programs such as accelerate do: they take the
parser, parse words with it, or look at its actions. It is made from the same table, and a test holds both parsers
against each other and against torch's.
"""

from __future__ import annotations

import argparse
import os

from elastic_run import contract
from elastic_run.command_line import match_abbreviation
from elastic_run.help_text import render_help

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from elastic_run.flags import Flag


class _FromEnvironment(str):
    """A default that comes from a variable; argparse converts it only where it is needed."""

    __slots__ = ("variable",)
    variable: str


class _FlagAction(argparse.Action):
    """A flag of the table, as argparse wants it."""

    def __init__(self, flag: Flag) -> None:
        default = flag.default[:] if isinstance(flag.default, list) else flag.default
        if flag.variable and (text := os.environ.get(flag.variable)) is not None:
            default = _FromEnvironment(text)
            default.variable = flag.variable
        nargs, const = (0, True) if flag.is_switch else (None, None)
        super().__init__(list(flag.spellings), flag.dest, nargs, const, default, metavar=flag.values, help=flag.text)
        self.flag = flag

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object
    ) -> None:
        setattr(namespace, self.dest, True if self.flag.is_switch else values)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from elastic_run import __version__  # noqa: PLC0415 - only here

        parser.exit(message=f"{parser.prog} {__version__}\n")


class LauncherArgumentParser(argparse.ArgumentParser):
    """An argparse parser of the launcher's flags, with our help and one-line errors.

    Args:
        flags: What flags there are.
    """

    def __init__(self, flags: Sequence[Flag]) -> None:
        super().__init__(prog="elastic-run", add_help=False)
        self.flags = tuple(flags)
        for flag in flags:
            if flag.dest == "help":
                self.add_argument(*flag.spellings, action="help", help=flag.text)
            elif flag.dest == "version":
                self.add_argument(*flag.spellings, action=_Version, nargs=0, dest=argparse.SUPPRESS, help=flag.text)
            else:
                self._add_action(_FlagAction(flag))
        self.add_argument("training_script", help="Script, module or program that each worker runs.")
        self.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its arguments.")

    def format_help(self) -> str:
        """Return our own help; flags that somebody added are not in it."""
        return render_help(self.flags)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        self.exit(contract.EXIT_USAGE, f"{self.prog}: error: {message}\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:  # noqa: ANN401 - each flag has its own type
        if not isinstance(action, _FlagAction):
            return super()._get_value(action, arg_string)
        try:
            return action.flag.parse(str(arg_string))
        except ValueError as error:
            source = arg_string.variable if isinstance(arg_string, _FromEnvironment) else action.flag.name
            raise argparse.ArgumentError(None, f"{source}: {str(arg_string)!r} {error}") from None

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Two spellings of a flag are not ambiguous, and our flags never get into the way of torchrun's."""
        found: list[Any] = super()._get_option_tuples(option_string)
        if not option_string.startswith("--"):
            return found
        wanted = match_abbreviation(option_string.partition("=")[0], self.flags)
        by_spelling = {spelling: flag for flag in self.flags for spelling in flag.spellings}
        kept: dict[argparse.Action, Any] = {}
        for match in found:
            flag = by_spelling.get(match[1])
            if flag is None or flag in wanted:
                kept.setdefault(match[0], match)
        return list(kept.values())
