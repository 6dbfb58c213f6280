"""The argparse parser that all commands share."""

from __future__ import annotations

import argparse

from elastic_run.cli.commands import COMMANDS
from elastic_run.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        name: The command; its line in `COMMANDS` opens the help.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"elastic-run {name}", description=COMMANDS[name], allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage, so that an error is one line."""
        text = f"{message} (see {self.prog} --help)"
        raise UsageError(text)
