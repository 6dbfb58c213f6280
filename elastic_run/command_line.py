"""From the words of a command line to a namespace, without argparse.

All workers wait for it, and most of what argparse would take goes into its import and into filling it. Our grammar is
small: flags, the script, and from there on everything is the script's. The rules are argparse's, as of Python 3.11:

- A flag may be abbreviated to a beginning that no other flag has. Two spellings of one flag are one flag (argparse
  often calls them ambiguous), and flags that torchrun hasn't got never make an abbreviation of torchrun's ambiguous.
- ``--flag value``, ``--flag=value``, ``-r3``, ``-r=3``, ``-mr 3``.
- A value may not look like a flag, unless it is a negative number or has a blank in it.
- ``--`` ends the flags. One right behind the script is dropped; later ones belong to the script.
- The words of the script are never looked at. (Python before 3.12.8 ends with an error where they look like an
  ambiguous abbreviation of a flag.)
- The command line wins over ``PET_<FLAG>``; a variable that is not needed is not checked.
"""

from __future__ import annotations

import sys

from elastic_run.validation import UsageError, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from types import SimpleNamespace
    from typing import Any, TypeAlias

    from elastic_run.flags import Flag

    #: What `parse_args` returns, or what a parser of argparse does.
    AnyArguments: TypeAlias = "Arguments | argparse.Namespace"
else:
    #: As the module `types` has it, which makes thirty other classes when it is imported.
    SimpleNamespace = type(sys.implementation)


class Arguments(SimpleNamespace):
    """The values by the names of their flags, like argparse.Namespace."""

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__


class AnswerRequestedError(Exception):
    """The command line asks for a text (--help, --version) and not for a job; `flag` says for which."""

    def __init__(self, flag: Flag) -> None:
        super().__init__(flag.name)
        self.flag = flag


class ValueNotAllowedError(UsageError):
    """A flag or its variable has a value that is not allowed; the words themselves are a command line."""


def parse_command_line(words: Sequence[str], flags: Sequence[Flag], environ: Mapping[str, str]) -> Arguments:
    """Read a command line.

    Args:
        words: The words behind the program's name.
        flags: What flags there are.
        environ: Where the environment forms of flags are looked for.

    Returns:
        A value for each flag, the script, and the script's own arguments.

    Raises:
        UsageError: A value is not allowed, a flag is unknown, or the script is missing.
        AnswerRequestedError: The user wants a text and no job.
    """
    reader = _Reader(words, flags)
    position = reader.read_flags()
    given = reader.given
    if reader.unknown:
        raise UsageError(_describe_unknown(reader.unknown[0], flags))
    if position == len(words):
        message = "no script given: elastic-run [flags] SCRIPT [arguments] (see --help)"
        raise UsageError(message)
    values = {flag.dest: given[flag.dest] if flag.dest in given else _default(flag, environ) for flag in flags}
    for answer in ("help", "version"):
        values.pop(answer, None)
    rest = list(words[position + 1 :])
    if rest[:1] == ["--"] and not reader.has_separator:
        del rest[0]
    return Arguments(**values, training_script=words[position], training_script_args=rest)


def convert(source: str, flag: Flag, text: str) -> Any:  # noqa: ANN401 - each flag has its own type
    """Turn a text into the flag's value.

    Args:
        source: The flag or the variable that the text comes from, for the error.
        flag: Whose value it is.
        text: The text.

    Returns:
        The value.

    Raises:
        ValueNotAllowedError: The text is not allowed.
    """
    try:
        return flag.parse(text)
    except ValueError as error:
        message = f"{source}: {text!r} {error}"
        raise ValueNotAllowedError(message) from None


def _default(flag: Flag, environ: Mapping[str, str]) -> Any:  # noqa: ANN401 - each flag has its own type
    if flag.variable and (text := environ.get(flag.variable)) is not None:
        return convert(flag.variable, flag, text)
    return flag.default[:] if isinstance(flag.default, list) else flag.default


def _describe_unknown(word: str, flags: Sequence[Flag]) -> str:
    """A wrong flag is often the right one cut short (--nprocs), so beginnings count too."""
    name = word.partition("=")[0]
    wanted = name.replace("_", "-").lstrip("-")
    names = {flag.name[2:]: flag.name for flag in flags}
    known = {text[: len(wanted)]: flag for text, flag in names.items()} | names
    hint = nearest(wanted, known, translate=known)
    return f"unknown flag {name}{hint} (see --help)"


def match_abbreviation(prefix: str, flags: Sequence[Flag]) -> list[Flag]:
    """Find the flags that a word may be the beginning of.

    Args:
        prefix: The word, with its dashes and without a value.
        flags: What flags there are.

    Returns:
        Those of torchrun's flags that begin so; if there are none, those of ours.
    """
    found = [flag for flag in flags if any(spelling.startswith(prefix) for spelling in flag.spellings)]
    return [flag for flag in found if not flag.is_ours] or found


class _Reader:
    """Reads flags from the left until the script comes."""

    def __init__(self, words: Sequence[str], flags: Sequence[Flag]) -> None:
        self._words = words
        self._flags = flags
        self._by_spelling = {spelling: flag for flag in flags for spelling in flag.spellings}
        self.given: dict[str, Any] = {}
        self.unknown: list[str] = []
        self.has_separator = False

    def read_flags(self) -> int:
        """Read all flags and return the position of the script."""
        position = 0
        while position < len(self._words):
            word = self._words[position]
            if word == "--":
                self.has_separator = True
                return position + 1
            if not self._is_flag(word):
                break
            position = self._read_flag(word, position + 1)
        return position

    def _read_flag(self, word: str, position: int) -> int:
        """Read one word of flags, with its value if it has one behind it, and return the next position."""
        flag, value = self._match(word)
        if flag is None:
            self.unknown.append(word)
            return position
        while flag.is_switch:
            self._turn_on(flag)
            if value is None:
                return position
            flag, value = self._next_letter(word, flag, value)
        if value is None:
            value = self._following_value(flag, position)
            position += 1
        self.given[flag.dest] = convert(flag.name, flag, value)
        return position

    def _match(self, word: str) -> tuple[Flag | None, str | None]:
        if word in self._by_spelling:
            return self._by_spelling[word], None
        name, equals, value = word.partition("=")
        if equals and name in self._by_spelling:
            return self._by_spelling[name], value
        if not word.startswith("--"):
            return self._by_spelling.get(word[:2]), word[2:]
        found = match_abbreviation(name, self._flags)
        if len(found) > 1:
            message = f"{name} could be {', '.join(flag.name for flag in found)}"
            raise UsageError(message)
        return (found[0] if found else None), (value if equals else None)

    def _turn_on(self, flag: Flag) -> None:
        if flag.dest in {"help", "version"}:
            raise AnswerRequestedError(flag)
        self.given[flag.dest] = True

    def _next_letter(self, word: str, flag: Flag, value: str) -> tuple[Flag, str | None]:
        """Return the flag that follows a switch in the same word, as in -mr3, and what is left of the word."""
        following = None if word.startswith("--") else self._by_spelling.get("-" + value[:1])
        if following is None:
            message = f"{flag.name}: {value!r} is too much, it takes no value"
            raise UsageError(message)
        rest = value[1:] if following.is_switch else value[1:].removeprefix("=")
        return following, rest or None

    def _following_value(self, flag: Flag, position: int) -> str:
        if position < len(self._words):
            word = self._words[position]
            if word != "--" and not self._is_flag(word):
                return word
        message = f"{flag.name}: needs a value ({flag.values})"
        raise UsageError(message)

    def _is_flag(self, word: str) -> bool:
        if len(word) < 2 or word[0] != "-":  # noqa: PLR2004 - a dash alone is a file name
            return False
        if word in self._by_spelling or word.partition("=")[0] in self._by_spelling:
            return True
        if word.startswith("--"):
            is_known = bool(match_abbreviation(word.partition("=")[0], self._flags))
        else:
            is_known = word[:2] in self._by_spelling
        return is_known or not (" " in word or _is_negative_number(word))


def _is_negative_number(word: str) -> bool:
    whole, point, fraction = word[1:].partition(".")
    return fraction.isdigit() and (not whole or whole.isdigit()) if point else whole.isdigit()
