"""Asks agents through their control sockets, and finds the job that a command's RUN means.

A request is one of HTTP, and so is its answer. The path has the version of the protocol; a new request, or a new field,
is no new version. Any other client can ask as well: `curl --unix-socket PATH --data '{}' http://agent/v1/status`.

RUN is a run id or the beginning of one, the pid of a launcher, or the path of its control socket; it may be left out
where one job runs. Launchers of jobs of several nodes with the same run id are one job, since nodes of it may share a
machine: with `static` or without an id only if they also meet at the same place.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time

from elastic_run.contract import NO_RUN_ID
from elastic_run.control.socket_directory import find_sockets, remove_stale
from elastic_run.notices import UsageError
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

VERSION = 1
#: Bytes of an answer: the stacks of a node with 1,000 workers.
ANSWER_LIMIT = 1 << 24
#: Seconds that an agent may take to answer, unless the caller says otherwise. It took up to 0.6 s
#: where fifteen times as many threads as processors were to run.
WAIT_LIMIT = 5.0
_CHUNK = 1 << 18
#: struct ucred of unix(7): pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one agent, or the reason why there is none."""

    path: str  # The agent's socket
    pid: int  # The agent's pid in this process's pid namespace; 0 if it has none there, or accepts no client
    document: dict[str, Any] | None = None  # None if there is an error
    error: str = ""


def ask_all(
    paths: Sequence[str], name: str, arguments: Mapping[str, Any] | None = None, *, wait_limit: float = WAIT_LIMIT
) -> list[Answer]:
    """Ask several agents at once, and wait some seconds for all answers together; a stale socket is removed.

    Args:
        paths: Their sockets.
        name: A key of `agent.control_requests.REQUESTS`.
        arguments: Its arguments by name.
        wait_limit: Seconds.

    Returns:
        An answer for each agent that runs, in the order of the paths.
    """
    body = json.dumps(arguments or {})
    request = f"POST /v{VERSION}/{name} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    asked = [conversation for path in paths if (conversation := _begin(path)) is not None]
    try:
        for conversation in asked:
            conversation.send(request)
        _collect([each for each in asked if not each.error], time.monotonic() + wait_limit)
        return [each.conclude(wait_limit) for each in asked]
    finally:
        for conversation in asked:
            conversation.socket.close()


class _Conversation:
    """One connection; the queue of clients has no room for it if the agent has accepted no client for long."""

    def __init__(self, path: str, connection: socket.socket, *, is_queued: bool = True) -> None:
        self.path = path
        self.socket = connection
        self.error = ""
        self.is_over = False
        self._received = bytearray()
        self._pid = 0
        if not is_queued:
            self.error = f"the agent at {path} accepts no client (is it stopped?)"
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._pid, owner, _ = _CREDENTIALS.unpack(credentials)
        if owner != os.geteuid():
            self.error = f"{path} belongs to another user ({owner})"

    def send(self, request: bytes) -> None:
        """Send the request, which a new connection takes at once."""
        if self.error:
            return
        try:
            self.socket.sendall(request)
        except OSError as error:
            self.error = f"the agent with pid {self._pid} takes no request: {error.strerror or error}"

    def receive(self) -> None:
        """Read the bytes that have come."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        self.is_over = not data or len(self._received) > ANSWER_LIMIT

    def conclude(self, wait_limit: float) -> Answer:
        """Return the answer, or the reason why there is none."""
        if not self.error and not self.is_over:
            self.error = f"the agent with pid {self._pid} does not answer within {wait_limit:g} s (is it stopped?)"
        elif not self.error and not self._received:
            self.error = f"the agent with pid {self._pid} has ended, or has too many clients"
        document = None if self.error else self._parse()
        return Answer(self.path, self._pid, document, self.error)

    def _parse(self) -> dict[str, Any] | None:
        head, _, body = self._received.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"200"]:
            self.error = body.decode(errors="replace").strip() or "the agent's answer can't be read"
        elif len(self._received) > ANSWER_LIMIT:
            self.error = f"the agent's answer is larger than {ANSWER_LIMIT} bytes"
        else:
            try:
                document = json.loads(body)
            except (ValueError, RecursionError):
                document = None
            if isinstance(document, dict):
                return document
            self.error = "the agent's answer is not a JSON object"
        return None


def _begin(path: str) -> _Conversation | None:
    """Connect; None where the agent has ended."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(0)
    try:
        connection.connect(path)
        return _Conversation(path, connection)
    except BlockingIOError:
        return _Conversation(path, connection, is_queued=False)
    except ConnectionRefusedError:
        remove_stale(path)
    except OSError:
        pass  # gone
    connection.close()
    return None


def _collect(asked: list[_Conversation], deadline: float) -> None:
    waiting = {each.socket.fileno(): each for each in asked}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0.0, left) * 1000)
        for fd, _ in ready:
            waiting[fd].receive()
            if waiting[fd].is_over:
                poll.unregister(fd)
                del waiting[fd]
        if not ready and left <= 0:
            return


# --- the job of RUN ---------------------------------------------------------------------------------------------------
#: The help text of RUN, for all commands.
RUN_HELP = "run id (--rdzv-id) or its beginning, or the launcher's pid; may be left out if one job runs on this machine"
#: What is said if there is no job.
NO_JOB = "no job of yours runs on this machine"
#: A longer run id is a number that was made up.
_LONGEST_LABEL = 32
#: Jobs that an error names.
_NAMED = 6


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """One agent of this user on this machine."""

    path: str  # Its control socket
    pid: int
    run_id: str = ""
    program: str = ""
    log_dir: str = ""
    state: str = ""
    started_at: float = 0.0
    max_nodes: int = 1
    place: str = ""  # Where the nodes meet; empty if the run id alone tells the job from others
    is_whole_process: bool = True  # Whether its process ends with the job
    error: str = ""  # Why no more than path and pid is known of it


@dataclass(frozen=True, slots=True)
class RunningJob:
    """The agents of one job on this machine, at least one, by pid."""

    agents: tuple[RunningAgent, ...]

    @property
    def label(self) -> str:
        """The text to type for RUN: the run id if a user has chosen it, otherwise the launcher's pid."""
        first = self.agents[0]
        has_name = first.run_id not in {"", NO_RUN_ID} and len(first.run_id) <= _LONGEST_LABEL
        return first.run_id if has_name else str(first.pid)


def find_job(environment: Mapping[str, str], run: str | None, *, advice: str = "") -> RunningJob:
    """Find the job that a command means; `advice` is a clause that follows the message if no job runs.

    Raises:
        UsageError: There is no such job, there are several, or it doesn't answer.
    """
    return choose_job(find_jobs(environment), run, advice=advice)


def find_jobs(environment: Mapping[str, str]) -> list[RunningJob]:
    """Find all jobs of this user on this machine, the oldest first.

    Raises:
        UsageError: The directory of the control sockets belongs to another user.
    """
    paths, problem = find_sockets(environment)
    if problem:
        raise UsageError(problem)
    answers = ask_all(paths, "identify")
    jobs: dict[tuple[str, str, int], list[RunningAgent]] = {}
    for agent in sorted(map(_read_agent, answers), key=lambda agent: (agent.started_at, agent.pid)):
        is_shared = agent.max_nodes > 1 and not agent.error
        jobs.setdefault((agent.run_id, agent.place, 0 if is_shared else agent.pid), []).append(agent)
    return [RunningJob(tuple(each)) for each in jobs.values()]


def _read_agent(answer: Answer) -> RunningAgent:
    if answer.document is None:
        return RunningAgent(answer.path, answer.pid, error=answer.error)
    document = answer.document
    try:
        return RunningAgent(
            answer.path,
            answer.pid or int(document["pid"]),
            run_id=str(document["run_id"]),
            program=str(document["program"]),
            log_dir=str(document["log_dir"]),
            state=str(document["state"]),
            started_at=float(document["started_at"]),
            max_nodes=int(document["max_nodes"]),
            place=str(document["place"]),
            is_whole_process=bool(document["is_whole_process"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        text = f"the agent with pid {answer.pid} sent an answer that can't be read: {error}"
        return RunningAgent(answer.path, answer.pid, error=text)


def choose_job(jobs: Sequence[RunningJob], run: str | None, *, advice: str = "") -> RunningJob:
    """Choose the job that RUN means: a run id or its beginning, a pid, or None.

    Raises:
        UsageError: There is no such job, there are several, or it doesn't answer.
    """
    found = list(jobs)
    if run is not None:
        found = [job for job in jobs if any(run in {each.run_id, str(each.pid), each.path} for each in job.agents)]
        found = found or [job for job in jobs if job.agents[0].run_id.startswith(run)]
    if len(found) == 1:
        if errors := [agent.error for agent in found[0].agents if agent.error]:
            raise UsageError(errors[0])
        return found[0]
    if not jobs:
        message = NO_JOB + (f", so none is {run!r}" if run else "")
        message += f"; {advice}" if advice else ""
    elif not found:
        message = f"{run!r} is not a job of yours on this machine, which has {_list(jobs, jobs)}"
    else:
        several = "several jobs run on this machine" if run is None else f"{run!r} means several jobs"
        message = f"{several}, name one: {_list(found, jobs)}"
    raise UsageError(message)


def _list(found: Sequence[RunningJob], jobs: Sequence[RunningJob]) -> str:
    named = [f"{name_job(job, jobs)} ({job.agents[0].program or 'does not answer'})" for job in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(named) + more


def name_job(job: RunningJob, jobs: Sequence[RunningJob]) -> str:
    """Return the text for RUN that means this job: its label, or the launcher's pid where several have this label."""
    is_own = sum(each.label == job.label for each in jobs) == 1
    return job.label if is_own else str(job.agents[0].pid)
