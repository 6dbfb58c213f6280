"""The commands beside the start of a job: ``elastic-run help``, and more.

| module | what it holds |
|---|---|
| `doctor` | ``elastic-run doctor``: problems on this machine, or between the nodes, that would break a job |
| `drain` | ``elastic-run drain``: lets one node of a job leave |
| `logs` | ``elastic-run logs``: the log files of a job, across its attempts |
| `native_stacks` | `elastic-run stacks --native`: by py-spy |
| `nodes` | asks all nodes of a job |
| `parser` | the argparse parser that all commands share |
| `ps` | ``elastic-run ps``: the jobs that run on this machine |
| `report` | ``elastic-run report``: the page of a job's history |
| `help` | ``elastic-run help``: the commands, or the help of one of them |
| `trace` | ``elastic-run trace``: dumps of torch's flight recorder, and which rank did not join |
| `stacks` | ``elastic-run stacks``: where each rank of a running job is |
| `stop` | ``elastic-run stop``: stops a job and waits for its end |
| `top` | ``elastic-run top``: the table of `status`, drawn again and again |
| `status` | ``elastic-run status``: the state of a running job and of its workers |

The first word of a command line is a command if `COMMANDS` has it; a script of that name is started with ``./`` before
its name. Each command is the module of its name, with a function ``main(words)`` that returns the exit code, or raises
UsageError for a mistake of the user, and ``make_parser()``, which the completion of the shell reads, too.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from elastic_run import contract
from elastic_run.errors import UsageError
from elastic_run.notices import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

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


def run(words: Sequence[str]) -> int:
    """Run a command.

    Args:
        words: Its name, which `COMMANDS` has, and its arguments.

    Returns:
        The exit code.

    Raises:
        SystemExit: The arguments are wrong (2), or ask for the command's help (0).
    """
    name, *arguments = words
    if sys.stdout is None:  # closed by whoever started us: nobody reads it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until this process ends
    try:
        return int(import_module(f"{__name__}.{name}").main(arguments))
    except UsageError as error:
        say(f"error: {name}: {error}")
        return contract.EXIT_USAGE
    except KeyboardInterrupt:
        return contract.EXIT_SIGNAL_BASE + 2
