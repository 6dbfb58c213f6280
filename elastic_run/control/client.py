"""Asks agents through their control sockets, and finds the job that a command's RUN means.

A request is one of HTTP, and so is its answer. The path has the version of the protocol; a new request, or a new field,
is no new version. Any other client can ask as well: `curl --unix-socket PATH --data '{}' http://agent/v1/status`.
Launchers of jobs of several nodes with the same run id are one job, since nodes of it may share a machine: with
`static` or without an id only if they also meet at the same place.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from contextlib import ExitStack
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse

from elastic_run.contract import NO_RUN_ID
from elastic_run.control.socket_directory import VERSION, find_sockets, remove_stale
from elastic_run.notices import UsageError
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

#: Bytes of an answer: the stacks of a node with 1,000 workers.
ANSWER_LIMIT = 1 << 24
#: Seconds that an agent may take to answer, unless the caller says otherwise. It took up to 0.6 s
#: where fifteen times as many threads as processors were to run.
WAIT_LIMIT = 5.0
#: Seconds for an answer that is there, after an agent before it has used up the time.
_LEAST_WAIT = 0.05
#: struct ucred of unix(7): pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")
_UNREADABLE = "the agent's answer can't be read"


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
    """Ask several agents at once for a key of `agent.control_requests.REQUESTS`; wait some seconds for all answers.

    Returns an answer for each agent that runs, in the order of the paths; a stale socket is removed.
    """
    body = json.dumps(arguments or {})
    request = f"POST /v{VERSION}/{name} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    deadline = time.monotonic() + wait_limit
    with ExitStack() as stack:
        asked = []
        for path in paths:  # all of them before the first answer is awaited
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            if (begun := _send(path, connection, request)) is not None:
                asked.append((begun, connection))
        return [begun if begun.error else _receive(begun, each, deadline, wait_limit) for begun, each in asked]


def _send(path: str, connection: socket.socket, request: bytes) -> Answer | None:
    """Send a request, which a new connection takes at once; return the begun answer, None without an agent."""
    connection.settimeout(0)
    try:
        connection.connect(path)
    except BlockingIOError:
        return Answer(path, 0, error=f"the agent at {path} accepts no client (is it stopped?)")
    except ConnectionRefusedError:
        remove_stale(path)
        return None
    except OSError:
        return None  # gone
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, owner, _ = _CREDENTIALS.unpack(credentials)
    if owner != os.geteuid():
        return Answer(path, pid, error=f"{path} belongs to another user ({owner})")
    try:
        connection.sendall(request)
    except OSError as error:
        return Answer(path, pid, error=f"the agent with pid {pid} takes no request: {error.strerror or error}")
    return Answer(path, pid)


def _receive(begun: Answer, connection: socket.socket, deadline: float, wait_limit: float) -> Answer:
    connection.settimeout(max(_LEAST_WAIT, deadline - time.monotonic()))
    response = HTTPResponse(connection)
    try:
        response.begin()
        body = response.read(ANSWER_LIMIT + 1)
    except TimeoutError:
        error = f"the agent with pid {begun.pid} does not answer within {wait_limit:g} s (is it stopped?)"
    except ConnectionError:
        error = f"the agent with pid {begun.pid} has ended, or has too many clients"
    except (OSError, HTTPException):
        error = _UNREADABLE
    else:
        if len(body) > ANSWER_LIMIT:
            error = f"the agent's answer is larger than {ANSWER_LIMIT} bytes"
        elif response.status != HTTPStatus.OK:
            error = body.decode(errors="replace").strip() or _UNREADABLE
        elif isinstance(document := _parse(body), dict):
            return replace(begun, document=document)
        else:
            error = "the agent's answer is not a JSON object"
    return replace(begun, error=error)


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


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
    """Find the job that a command means; `advice` follows the UsageError if no job runs."""
    return choose_job(find_jobs(environment), run, advice=advice)


def find_jobs(environment: Mapping[str, str]) -> list[RunningJob]:
    """Find all jobs of this user on this machine, the oldest first; UsageError: the directory is another user's."""
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
    """Choose the job that RUN means: a run id or its beginning, a pid, or None; UsageError if that is not one job."""
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
