"""``elastic-run stop [RUN]``: stops the launchers of a job on this machine, as SIGTERM would, and awaits their end."""

from __future__ import annotations

import os
import select
import time

from elastic_run import contract
from elastic_run.cli.commands.parser import CommandParser
from elastic_run.control.client import WAIT_LIMIT, ask_all
from elastic_run.control.jobs import RUN_HELP, find_job
from elastic_run.control.socket_directory import is_stale
from elastic_run.control.wire import Call
from elastic_run.errors import UsageError
from elastic_run.notices import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_run.control.jobs import RunningAgent, RunningJob

#: A wait of poll(2), in seconds; the end may come in a later one.
_LONGEST_WAIT = 3600.0
#: Seconds between two checks for an agent's socket, if its process can't be waited for.
_LOOK = 0.1


def make_parser() -> CommandParser:
    """Return the parser of the arguments."""
    parser = CommandParser("stop")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="give up, with exit code 1, if the job still runs after this time (default: no limit)",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Stop a job.

    Returns:
        0 when its launchers on this machine have ended, 1 if one of them takes no request or has not ended in time.

    Raises:
        UsageError: There is no such job, or there are several.
        SystemExit: The help was printed (0).
    """
    args = make_parser().parse_args(words)
    if args.timeout is not None and not args.timeout >= 0:
        message = f"--timeout: {args.timeout} must be 0 or more seconds"
        raise UsageError(message)
    deadline = None if args.timeout is None else time.monotonic() + args.timeout
    return stop_job(find_job(os.environ, args.run), deadline)


def stop_job(job: RunningJob, deadline: float | None, *, wait_limit: float = WAIT_LIMIT) -> int:
    """Ask the launchers of a job to stop, and wait for the end of the launchers that accept.

    Args:
        job: The job.
        deadline: Monotonic seconds until which its end is awaited, or None.
        wait_limit: Seconds for the answers.

    Returns:
        The exit code, see `main`.
    """
    # Before anything is asked: a pid may belong to another process once its own has ended.
    waiting = {agent.path: _open_pidfd(agent) for agent in job.agents}
    refused = [
        answer
        for answer in ask_all([*waiting], Call("stop", {"pid": os.getpid()}), wait_limit=wait_limit)
        if answer.error
    ]
    for answer in refused:
        say(answer.error)
        del waiting[answer.path]
    has_ended = [_wait_end(path, fd, deadline) for path, fd in waiting.items()]
    if not all(has_ended):
        say(f"job {job.label} still runs: its workers get their grace period (--shutdown-timeout)")
    elif not refused:
        say(f"job {job.label} has ended")
    return contract.EXIT_SUCCESS if all(has_ended) and not refused else contract.EXIT_FAILURE


def _wait_end(path: str, pidfd: int | None, deadline: float | None) -> bool:
    """Wait for an agent's end; return whether it came in time."""
    poll = select.poll()
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    while deadline is None or time.monotonic() < deadline:
        left = _LONGEST_WAIT if deadline is None else max(0.0, deadline - time.monotonic())
        seconds = min(left, _LOOK if pidfd is None else _LONGEST_WAIT)
        if poll.poll(seconds * 1000) or (pidfd is None and _is_gone(path)):
            return True
    return False


def _is_gone(path: str) -> bool:
    return not os.path.exists(path) or is_stale(path)


def _open_pidfd(agent: RunningAgent) -> int | None:
    """Return a pidfd of an agent's process; None if the process goes on after the job."""
    if not agent.is_whole_process:
        return None
    try:
        return os.pidfd_open(agent.pid)
    except OSError:
        return None  # it has ended, or is in another pid namespace
