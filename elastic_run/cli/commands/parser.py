"""The argparse parser that all commands share."""

from __future__ import annotations

import argparse
import re

from elastic_run.cli.commands import COMMANDS
from elastic_run.cli.stdout import print_text
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


#: What argparse says of a wrong value, and how elastic-run says it of its own flags.
_WORDS = (
    (r"^argument (?:\S+/)?(\S+): invalid int value: (.+)$", r"\1: \2 is not a whole number"),
    (r"^argument (?:\S+/)?(\S+): invalid float value: (.+)$", r"\1: \2 is not a number"),
    (r"^argument (?:\S+/)?(\S+): expected one argument$", r"\1: needs a value"),
    (r"^argument (?:\S+/)?(\S+): invalid choice: (.+) \(choose from (.+)\)$", r"\1: \2 is none of \3"),
)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        name: The command; its line in `COMMANDS` opens the help.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"elastic-run {name}", description=COMMANDS[name], allow_abbrev=False)

    def print_help(self, file: object = None) -> None:  # noqa: ARG002 - argparse's signature
        """Print the help to stdout; a full disk is told, which argparse passes over."""
        print_text(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage, so that an error is one line."""
        for said, words in _WORDS:
            message = re.sub(said, words, message)
        text = f"{message} (see {self.prog} --help)"
        raise UsageError(text)
