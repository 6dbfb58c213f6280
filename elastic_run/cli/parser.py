"""From the words of a command line to a namespace: argparse, filled from the table of flags.

``PET_<FLAG>`` is the default of a flag, and the file of ``--config`` gives what neither of them gives. An error is one
line that names the flag or the variable, the value and what is allowed.

argparse is imported before the first worker starts: 1.5 ms of 35. With `re` it would be 4 ms, so the command imports
`re` when it is first used (`elastic_run.__main__`), and this parser reads usual words without.
"""

from __future__ import annotations

import argparse
import os
import sys

from elastic_run import contract
from elastic_run.cli.request import FLAG, VARIABLE, Origin, name_source
from elastic_run.cli.values import nearest
from elastic_run.notices import UsageError, print_text, say
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from elastic_run.cli.flags import Flag

_SCRIPT, _SCRIPT_ARGS = "training_script", "training_script_args"
#: Begin of argparse's message about a missing script, unless a program has translated it.
_SCRIPT_IS_MISSING = "the following arguments are required"
_SCRIPT_MISSING_MESSAGE = "no script given: elastic-run [flags] SCRIPT [arguments] (see --help)"
#: Begin of its message about a switch with a value.
_VALUE_IS_TOO_MUCH = "ignored explicit argument "
#: Names that other launchers have for flags of the table.
_NAMES_ELSEWHERE = {
    **dict.fromkeys(("gpus", "ngpus", "n-gpus", "num-gpus", "gpus-per-node", "devices"), "--nproc-per-node"),
    **dict.fromkeys(("np", "num-procs", "num-processes", "ntasks-per-node", "num-workers"), "--nproc-per-node"),
    **dict.fromkeys(("nodes", "num-nodes", "num-machines"), "--nnodes"),
    "machine-rank": "--node-rank",
    "main-process-ip": "--master-addr",
    "main-process-port": "--master-port",
}


class LauncherArgumentParser(argparse.ArgumentParser):
    """The parser of the launcher's flags; its `origins` are those of the last command line's values.

    With `raises_values`, a value that is not allowed raises UsageError. By default it ends the program with a line, as
    every other error does.
    """

    def __init__(self, flags: Sequence[Flag], *, raises_values: bool = False) -> None:
        super().__init__(prog="elastic-run", add_help=False, exit_on_error=False)
        self.flags = tuple(flags)
        self._raises_values = raises_values
        self.origins: dict[str, Origin] = {}
        self._optionals._negative_number_matcher = _NumberMatcher()  # type: ignore[assignment]  # noqa: SLF001
        for flag in flags:  # not by add_argument, which formats each to check its help
            kind = _PrintText if flag.prints_text else _FlagAction
            self._add_action(kind([*flag.spellings], flag.dest, flag, help=flag.text))
        store = self._registry_get("action", None)
        self._add_action(store([], _SCRIPT, required=True, help="Script, module or program that each worker runs."))
        self._add_action(store([], _SCRIPT_ARGS, argparse.REMAINDER, help="Its arguments."))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read a command line, by default this process's, and return a namespace with a value for each flag."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            wanted = name.replace("_", "-")
            wanted = _NAMES_ELSEWHERE.get(wanted.lstrip("-"), wanted)
            hint = nearest(wanted, [flag.name for flag in self.flags])
            self.error(f"unknown flag {name}{hint} (see --help)")
        return namespace

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read a command line as `parse_args` does, and return the namespace and the unknown flags."""
        self.origins = {
            flag.dest: Origin(VARIABLE, flag.variable, os.environ[flag.variable])
            for flag in self.flags
            if flag.variable in os.environ
        }
        try:
            namespace, unknown = super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, _RefusedTextError):
                self._refuse(error.__context__.line)
            self.error(self._describe(error))
        # Not the namespace's value: a program that builds on this parser may have a --config of its own.
        named = self.origins.get("config")
        if named is not None and (named.text or named.kind == FLAG):  # an empty variable names no file
            self._take_file(named, namespace)
        return namespace, unknown

    def _take_file(self, named: Origin, namespace: argparse.Namespace) -> None:
        """Take the values of a configuration file that neither a flag nor a variable gives."""
        from elastic_run.cli.config_file import read_config_file

        try:
            values = read_config_file(named.text, self.flags)
        except ValueError as error:
            self._refuse(name_source(str(error), {"config": named}, os.environ))
        for dest, (value, origin) in values.items():
            given = self.origins.get(dest)
            if given is None:
                setattr(namespace, dest, value)
                self.origins[dest] = origin
            elif given.unused is None:
                self.origins[dest] = replace(given, unused=origin)

    def _refuse(self, line: str) -> NoReturn:
        if self._raises_values:
            raise UsageError(line) from None
        self.error(line)

    def format_help(self) -> str:
        """Return our own help, without flags that a program has added."""
        from elastic_run.cli.help import render_help

        return render_help(self.flags)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        if message.startswith(_SCRIPT_IS_MISSING):
            message = _SCRIPT_MISSING_MESSAGE
        say(f"error: {message}")
        sys.exit(contract.EXIT_USAGE)

    def _describe(self, error: argparse.ArgumentError) -> str:
        """Return our line for an error of argparse's."""
        flag = next((flag for flag in self.flags if "/".join(flag.spellings) == error.argument_name), None)
        if flag is None:
            return str(error)
        if flag.is_switch:
            return f"{flag.name}: takes no value, but got {error.message.removeprefix(_VALUE_IS_TOO_MUCH)}"
        return f"{flag.name}: needs a value ({flag.values})"

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Return how many of the next words a flag takes; "A" stands for a word, "O" for a flag, "-" for `--`."""
        if action.nargs == 0:
            return 0
        if action.nargs is None and action.option_strings and arg_strings_pattern.startswith("A"):
            return 1
        return super()._match_argument(action, arg_strings_pattern)

    def _match_arguments_partial(self, actions: Sequence[argparse.Action], arg_strings_pattern: str) -> list[int]:
        """Return how many of the next words the script and its arguments take."""
        if "-" in arg_strings_pattern or [action.dest for action in actions] != [_SCRIPT, _SCRIPT_ARGS]:
            return super()._match_arguments_partial(actions, arg_strings_pattern)
        return [1, len(arg_strings_pattern) - 1] if arg_strings_pattern.startswith("A") else []

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Find the flags that a word may abbreviate; for an ambiguous word, find an action that refuses it."""
        found: list[Any] = super()._get_option_tuples(option_string)
        if not option_string.startswith("--"):
            return found
        wanted = {flag.name for flag in match_abbreviation(option_string.partition("=")[0], self.flags)}
        kept: dict[argparse.Action, Any] = {}
        for match in found:
            flag = getattr(match[0], "flag", None)
            if flag is None or flag.name in wanted:
                kept.setdefault(match[0], match)
        matches = list(kept.values())
        if len(matches) <= 1:
            return matches
        names = [action.option_strings[0] for action in kept]
        # A match begins with its action in every release of Python; the other parts differ.
        return [(_Ambiguous(option_string.partition("=")[0], names), *matches[0][1:])]


def match_abbreviation(prefix: str, flags: Sequence[Flag]) -> list[Flag]:
    """Return the flags of torchrun that begin with a word without its value; if there are none, those of ours alone."""
    found = [flag for flag in flags if any(spelling.startswith(prefix) for spelling in flag.spellings)]
    return [flag for flag in found if not flag.is_ours] or found


class _NumberMatcher:
    """In place of argparse's expression for negative numbers."""

    @staticmethod
    def match(word: str) -> bool:
        return word[:1] == "-" and word[-1:] != "." and word[1:].replace(".", "", 1).isdecimal()


class _FlagAction(argparse.Action):
    """A flag of the table. It works in a program's own parser too, to which accelerate and others move it."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: Flag, **options: Any) -> None:
        default = flag.default[:] if isinstance(flag.default, list) else flag.default
        if flag.variable and (text := os.environ.get(flag.variable)) is not None:
            default = _FromVariable(text)
            default.name = flag.variable
        nargs, const = (0, True) if flag.is_switch else (None, None)
        self._read = _Reader(flag)
        super().__init__(option_strings, dest, nargs, const, default, self._read, metavar=flag.values, **options)
        self.flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object
    ) -> None:
        setattr(namespace, self.dest, True if self.flag.is_switch else values)
        if isinstance(parser, LauncherArgumentParser):
            unused = parser.origins.get(self.dest)
            unused = unused if unused is None or unused.kind == VARIABLE else unused.unused
            parser.origins[self.dest] = Origin(FLAG, self.flag.name, self._read.text, unused)


class _PrintText(argparse.Action):
    """A flag that prints a text and ends the program: --help, --help-all, --print-completion, --version."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: Flag, **options: Any) -> None:
        # torch's namespace has print_completion, and none of the others.
        nargs, default = (0, argparse.SUPPRESS) if flag.is_switch else (None, None)
        super().__init__(option_strings, dest, nargs, default=default, metavar=flag.values or None, **options)
        self.flag = flag

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: object, *__: object) -> None:
        from elastic_run import __version__
        from elastic_run.cli import help as texts

        try:
            if self.flag.name == "--version":
                print_text(f"{parser.prog} {__version__}\n")
            elif self.flag.name == "--print-completion":
                print_text(texts.render_completion(str(values), parser._get_optional_actions()))  # noqa: SLF001 - as shtab
            elif self.flag.name == "--help-all" and isinstance(parser, LauncherArgumentParser):
                print_text(texts.render_all_help(parser.flags))
            else:
                print_text(parser.format_help())
        except UsageError as error:
            parser.error(str(error))
        parser.exit()


class _Ambiguous(argparse.Action):
    """Stands in for a flag that an abbreviation does not tell; takes a value or none, since either may follow.

    Python before 3.12.8 ends with an error for an ambiguous word behind the script too, where it runs no action.
    """

    def __init__(self, word: str, names: Sequence[str]) -> None:
        super().__init__([word], argparse.SUPPRESS, "?")
        self._names = names

    def __call__(self, *_: object) -> None:
        raise argparse.ArgumentError(
            None, f"{self.option_strings[0]} is ambiguous: it could be {', '.join(self._names)}"
        )


class _FromVariable(str):
    """A default that comes from a variable; it has the variable's name."""

    __slots__ = ("name",)
    name: str


class _RefusedTextError(argparse.ArgumentTypeError):
    """A text is not allowed as the value of its flag; `line` also names the source of the text."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(reason)
        self.line = f"{source}: {reason}"


class _Reader:
    """The function with which argparse converts the texts of a flag; it keeps the last text."""

    def __init__(self, flag: Flag) -> None:
        self._flag = flag
        self.text = ""

    def __call__(self, text: str) -> Any:
        self.text = str(text)
        # argparse converts defaults as well, but some checks import modules that most jobs don't need. Python has one
        # object for equal texts of one letter, so a text of the command line may come here, too.
        if text is self._flag.default:
            return text
        try:
            return self._flag.parse(self.text)
        except ValueError as error:
            source = text.name if isinstance(text, _FromVariable) else self._flag.name
            raise _RefusedTextError(source, f"{self.text!r} {error}") from None
