"""The commands beside the start of a job, such as ``elastic-run status``, and what they share.

The first word of a command line is a command if `COMMANDS` has it; a script of that name is started with ``./`` before
its name. For each command NAME, a module has ``ARGUMENTS[NAME]``, and ``run_NAME(words)``, which returns the exit code
or raises UsageError for a mistake of the user.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib import import_module

from elastic_run import contract
from elastic_run.notices import UsageError, print_text, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any, NoReturn

#: Each command with its one line of help.
COMMANDS = {
    "doctor": "Check this machine, or the network between nodes, for causes of failed jobs.",
    "status": "Show each worker of a running job: state, CPU, memory, time without output, last line.",
    "ps": "List your running jobs on this machine, as status does if several jobs run.",
    "stacks": "Show where in the program each rank of a running job is.",
    "logs": "Show the log files of a running or ended job, by rank and across restarts.",
    "top": "Show the table of status, and update it until the job ends.",
    "drain": "Let one node leave a running job; the other nodes go on.",
    "stop": "Stop a running job as SIGTERM would, and wait for its end.",
    "report": "Write one HTML page of a job's history from its log directory.",
    "trace": "Find the ranks that did not join a collective, from flight-recorder dumps.",
    "help": "Show the commands and the most used flags, or the help of one command.",
}
#: The modules of commands that have no module of their own name here.
_MODULES = {**dict.fromkeys(("status", "ps", "top", "stop", "drain"), "commands.jobs"), "help": "help"}
#: What argparse says of a wrong value, and how elastic-run says it of its own flags.
_WORDS = (
    (r"^argument (?:\S+/)?(\S+): invalid int value: (.+)$", r"\1: \2 is not a whole number"),
    (r"^argument (?:\S+/)?(\S+): invalid float value: (.+)$", r"\1: \2 is not a number"),
    (r"^argument (?:\S+/)?(\S+): expected one argument$", r"\1: needs a value"),
    (r"^argument (?:\S+/)?(\S+): invalid choice: (.+) \(choose from (.+)\)$", r"\1: \2 is none of \3"),
)


def argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return an argument of a command, as argparse's `add_argument` takes it."""
    return names, options


class CommandParser(argparse.ArgumentParser):
    """The parser of one command; its line in `COMMANDS` opens the help."""

    def __init__(self, name: str) -> None:
        super().__init__(f"elastic-run {name}", description=COMMANDS[name], allow_abbrev=False)
        for names, options in _import_module(name).ARGUMENTS[name]:
            self.add_argument(*names, **options)

    def print_help(self, file: object = None) -> None:  # noqa: ARG002 - argparse's signature
        """Print the help to stdout; a full disk is told, which argparse passes over."""
        print_text(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage, so that an error is one line."""
        for said, words in _WORDS:
            message = re.sub(said, words, message)
        text = f"{message} (see {self.prog} --help)"
        raise UsageError(text)


def run(words: Sequence[str]) -> int:
    """Run a command, given its name and its arguments, and return the exit code."""
    name, *arguments = words
    if sys.stdout is None:  # closed by whoever started us: nobody reads it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until this process ends
    try:
        return int(getattr(_import_module(name), f"run_{name}")(arguments))
    except UsageError as error:
        say(f"error: {name}: {error}")
        return contract.EXIT_USAGE
    except KeyboardInterrupt:
        return contract.EXIT_SIGNAL_BASE + 2


def _import_module(name: str) -> ModuleType:
    return import_module(f"elastic_run.cli.{_MODULES.get(name, f'commands.{name}')}")
