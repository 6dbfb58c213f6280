"""What commands may ask a running agent, through its control socket, and the other nodes of its job.

To add a request, write a function that takes a `Request`, and add its row to `REQUESTS`. The function runs in the
agent's loop: it returns the answer, a document for JSON, or returns None and calls `Request.reply` later from the loop.
It raises `RefusedError` with one line if the request can't be answered. The client's side is
`control.client.ask(path, Call(name, arguments))`.
"""

from __future__ import annotations

import json
import os
import time

from elastic_run import __version__
from elastic_run.agent.driver.worker_readings import add_silences, ask_gpu_use, find_output, read_process, read_usage
from elastic_run.agent.script_name import program_name
from elastic_run.contract import NO_RUN_ID
from elastic_run.control.client import VERSION
from elastic_run.core.agent.messages import Signalled
from elastic_run.core.diagnosis.stacks import shorten_stacks
from elastic_run.core.protocol.node_status import DRAIN, HANG, STACKS, STATUS, count_members, kind_of
from elastic_run.records import dataclass, field
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.agent.api import Worker, WorkerSpec
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.worker_readings import Usage
    from elastic_run.agent.http_server import HttpRequest
    from elastic_run.cluster.gpu_use import GpuUse
    from elastic_run.core.diagnosis.stacks import Dump

    Document = dict[str, Any]

__all__ = ["REQUESTS", "AgentView", "RefusedError", "Request", "answer_question", "answer_request"]

#: Seconds that workers get for their stacks; a client waits longer.
_STACKS_WAIT = 3.0
#: Characters of one worker's text. Most stacks are much shorter, so the stacks of 1,000 workers fit into an answer.
_MOST_TEXT = 1 << 18
#: Seconds that other nodes get to answer: they measure for a moment.
_NODE_WAIT = {STATUS: 2.0, STACKS: _STACKS_WAIT + 2.0, DRAIN: 2.0, HANG: 2.0}
#: Characters of a node's name.
_LONGEST_NAME = 200
#: Seconds between two measurements of CPU time, at least and at most. The kernel counts it in steps of 0.01 s.
_INTERVAL = 0.1
_LONGEST_INTERVAL = 60.0
#: Words for some states of psutil.
_STATES = {"disk-sleep": "in the kernel (D)", "tracing-stop": "traced", "zombie": "ended", "dead": "ended"}


class RefusedError(Exception):
    """A request can't be answered; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class AgentView:
    """What requests may read.

    Args:
        parts: The parts of the agent.
        describe_hang: Returns what other nodes need to know of this node's ranks to judge whether the job hangs.
        memory: Values that a request keeps for the next request of its name, such as the last measured CPU times.
    """

    parts: AgentParts
    describe_hang: Callable[[], Document] = dict
    memory: dict[str, Any] = field(default_factory=dict)

    def stop(self, sender: str) -> None:
        """Stop the job, or this node's part of it, as if SIGTERM had come; the answer of the request is sent first."""

        def stop() -> None:
            self.parts.senders.name(SIGTERM, sender)
            self.parts.feed(Signalled(SIGTERM))

        self.parts.loop.call_soon(stop)


@dataclass(frozen=True, slots=True)
class Request:
    """One request while it is answered.

    Args:
        view: What it may read.
        arguments: The client's arguments, unchecked.
        reply: Sends the answer; harmless when the client has gone.
    """

    view: AgentView
    arguments: Document
    reply: Callable[[Document], None]


def answer_request(view: AgentView, http: HttpRequest) -> None:
    """Answer a client of the control socket now, or begin to."""
    prefix = f"/v{VERSION}/"
    answer = REQUESTS.get(http.path.removeprefix(prefix)) if http.path.startswith(prefix) else None
    if answer is None:
        http.reply(404, f"this agent, elastic-run {__version__}, has no request {http.path!r}\n".encode())
        return
    try:
        arguments = json.loads(http.body or b"{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        http.reply(400, b"the arguments of a request are an object of JSON\n")
        return

    def reply(document: Document) -> None:
        http.reply(200, json.dumps(document).encode(), "application/json")

    try:
        document = answer(Request(view, arguments, reply))
        if document is not None:
            reply(document)
    except RefusedError as error:
        http.reply(400, f"{error}\n".encode())


# --- the job ---------------------------------------------------------------------------------------------------------
def identify(request: Request) -> Document:
    """Describe the job that the agent runs."""
    parts = request.view.parts
    context = parts.context
    spec, options = context.group.spec, context.options
    return {
        "run_id": context.run_id,
        "pid": os.getpid(),
        "host": context.hostname,
        "version": __version__,
        "program": program_name(spec.entrypoint, spec.args),
        "log_dir": _absolute(context.log_directory),
        "state": parts.agent.state,
        "started_at": time.time() - (parts.loop.now() - parts.started),
        "max_nodes": options.job_config.max_nodes,
        "place": _find_place(spec),
        "is_whole_process": options.is_whole_process,
    }


def _find_place(spec: WorkerSpec) -> str:
    """Return what tells a job from others of the same id, or an empty string if the user has chosen the id."""
    if spec.master_port or spec.rdzv_handler.get_run_id() != NO_RUN_ID:
        return str(spec.master_port or "")
    return str(getattr(spec.rdzv_handler, "endpoint", ""))


def _absolute(path: str) -> str:
    """Return a path that is valid in any working directory; an empty path stays empty."""
    return os.path.abspath(path) if path else ""


def stop(request: Request) -> Document:
    """Stop the job as SIGTERM would; the end of the agent shows that the job is over."""
    view, pid = request.view, request.arguments.get("pid")
    view.stop(f"pid {pid} (elastic-run stop)" if isinstance(pid, int) else "elastic-run stop")
    return {"grace": view.parts.context.options.shutdown_timeout}


# --- this node -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sample:
    """What this node's workers have used at one moment, by pid."""

    at: float
    usage: dict[int, Usage]


def measure(view: AgentView, deliver: Callable[[Document], None]) -> None:
    """Give the state of this node and of its workers to a function, once and in the loop.

    CPU time is measured between two moments: the last request, if it was not long ago, and now. Without a last request
    the answer comes `_INTERVAL` seconds later. Without a request nothing is measured.
    """
    before, now = view.memory.get("status"), _take_sample(view.parts)

    def conclude(first: Sample) -> None:
        later = view.memory["status"] = _take_sample(view.parts)
        ask_gpu_use(view.parts.loop, view.memory, lambda gpus: deliver(describe_node(view.parts, first, later, gpus)))

    is_fresh = before is not None and _INTERVAL <= now.at - before.at <= _LONGEST_INTERVAL
    if before is not None and is_fresh and now.usage.keys() <= before.usage.keys():
        conclude(before)
    else:
        view.parts.loop.call_later(_INTERVAL, lambda: conclude(now))


def _take_sample(parts: AgentParts) -> Sample:
    current = parts.current
    found = {} if current is None else {current.workers.pids[rank]: used for rank, used in read_usage(current).items()}
    return Sample(parts.loop.now(), found)


def describe_node(parts: AgentParts, before: Sample, now: Sample, gpus: Mapping[int, GpuUse]) -> Document:
    """Return the document of this node; docs/see-into-a-running-job.md lists its fields."""
    agent, current, context, job = parts.agent, parts.current, parts.context, parts.job
    group = context.group
    workers = [] if current is None else group.workers
    return {
        "host": context.hostname,
        "pid": os.getpid(),
        "node_rank": group.group_rank,
        "nodes": group.group_world_size,
        "state": agent.state,
        "run_id": context.run_id,
        "program": program_name(group.spec.entrypoint, group.spec.args),
        "log_dir": _absolute(context.log_directory),
        "uptime": now.at - parts.started,
        "round": agent.round,
        # Between two rounds the workers are those of the last one.
        "round_uptime": now.at - current.started if current is not None and current.number == agent.round else None,
        "restart_count": agent.restart_count,
        "max_restarts": context.options.job_config.max_restarts,
        "news": "" if job is None or job.place is None else job.place.news,
        "waiting": "" if job is None else job.describe_wait(),
        "left_out": [] if job is None else job.list_left_out(),
        "world_size": group.workers[0].world_size if workers else None,
        "kept_state": None if context.kept is None else context.kept.read_status(),
        "workers": [_describe_worker(worker, current, before, now, gpus) for worker in workers if current is not None],
    }


def _describe_worker(
    worker: Worker, current: Round, before: Sample, now: Sample, gpus: Mapping[int, GpuUse]
) -> Document:
    local_rank = worker.local_rank
    pid = current.workers.pids.get(local_rank)
    code = current.exit_code(local_rank)
    # A round that has begun since the sample has other processes.
    used = (now.usage.get(pid) or read_process(pid)) if pid is not None and code is None else None
    gpu = None if pid is None else gpus.get(pid)
    silence, line = find_output(current, local_rank, now.at)
    return {
        "rank": worker.global_rank,
        "local_rank": local_rank,
        "pid": pid,
        "state": "ended" if used is None else _STATES.get(used.state, used.state),
        "exit_code": code,
        "cpu": None if pid is None else _measure_cpu(pid, before, now),
        "memory": None if used is None else used.memory,
        "silence": silence,
        "last_line": line,
        "gpu": None if gpu is None else gpu.busy,
        "gpu_memory": None if gpu is None else gpu.memory,
    }


def _measure_cpu(pid: int, before: Sample, now: Sample) -> float | None:
    """Return percent of one processor, or None where the worker has ended or was just started."""
    if pid not in before.usage or pid not in now.usage or now.at <= before.at:
        return None
    seconds = now.usage[pid].cpu - before.usage[pid].cpu
    return round(100 * seconds / (now.at - before.at), 1)


def take_stacks(view: AgentView, deliver: Callable[[Document], None]) -> None:
    """Ask this node's workers for their stacks; give them to a function when all have answered, or time is over."""
    parts, current = view.parts, view.parts.current
    node = {"host": parts.context.hostname, "pid": os.getpid(), "state": parts.agent.state}
    if current is None or not current.workers.alive:
        deliver({**node, "workers": []})
        return

    def conclude(dumps: dict[int, Dump]) -> None:
        found = add_silences(dumps, current, parts.loop.now())
        workers = [
            {
                "rank": rank,
                "text": shorten_stacks(dump.text, _MOST_TEXT),
                "problem": dump.problem,
                "details": dump.details[:_MOST_TEXT],
                "silence": dump.silence,
            }
            for rank, dump in sorted(found.items())
        ]
        deliver({**node, "workers": workers})

    current.ask_stacks(_STACKS_WAIT, conclude)


# --- all nodes of the job --------------------------------------------------------------------------------------------
def answer_question(view: AgentView, question: str, deliver: Callable[[Document], None]) -> None:
    """Give this node's answer to a question to all nodes to a function, now or a moment later, in the loop."""
    kind, _, words = question.partition(" ")
    parts = view.parts
    of_round = {"round_id": "", "round_nodes": 0} if parts.job is None else parts.job.describe_round()

    def deliver_of_round(document: Document) -> None:
        deliver({**document, **of_round})

    if kind == DRAIN:
        deliver_of_round({"asked": question, **_leave_if_named(view, words)})
    elif kind == HANG:
        deliver_of_round({"host": parts.context.hostname, "pid": os.getpid(), **view.describe_hang()})
    else:
        (take_stacks if kind == STACKS else measure)(view, deliver_of_round)


def _leave_if_named(view: AgentView, words: str) -> Document:
    """Leave the job, as at SIGTERM, if this node is the named one: the others go on without it.

    A node rank means a node of the round in which it was asked: once that node has left, its rank is another node's,
    which may see the question only then.
    """
    asked_in, _, name = words.partition(" ")
    round_number, own_rank = _find_seat(view.parts)
    host, node_rank = view.parts.context.hostname, own_rank if asked_in == str(round_number) else None
    is_leaving = name == host or (node_rank is not None and name == str(node_rank))
    if is_leaving and not view.memory.get(DRAIN):
        view.memory[DRAIN] = True
        view.stop("elastic-run drain")
    return {"host": host, "pid": os.getpid(), "node_rank": node_rank, "is_leaving": is_leaving, "workers": []}


def _find_seat(parts: AgentParts) -> tuple[int, int | None]:
    """Return the newest round that this node was given, and its node rank there.

    The agent's machine hears of a round only when the warm workers are ready: its round may be older than the group's
    rank.
    """
    if parts.job is not None and parts.job.place is not None:
        return parts.job.place.round, parts.job.place.group_rank
    return parts.agent.round, parts.context.group.group_rank


def drain(request: Request) -> None:
    """Let one node of the job leave, and tell all nodes.

    Raises:
        RefusedError: The name is none.
    """
    name = request.arguments.get("node")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        message = "this is not the name of a node"
        raise RefusedError(message)
    words = f"{_find_seat(request.view.parts)[0]} {name}"
    own = _leave_if_named(request.view, words)
    if own["is_leaving"]:  # its session may end before the others have answered
        request.reply({"nodes": [own], "members": 1, "missing": 0})
    else:
        _gather(request, f"{DRAIN} {words}")


def _gather(request: Request, question: str) -> None:
    """Ask this node and the others at the same time; reply when both are there, as far as they answer in time."""
    view, job = request.view, request.view.parts.job
    answers: dict[str, list[Document]] = {}

    def take(part: str, found: list[Document]) -> None:
        answers[part] = found
        if len(answers) == len(("own", "others")):
            (own,) = answers["own"]
            key = (own["host"], own["pid"])
            nodes = [own, *(node for node in answers["others"] if (node["host"], node["pid"]) != key)]
            members, missing = count_members(nodes)
            request.reply({"nodes": nodes, "members": members, "missing": missing})

    answer_question(view, question, lambda own: take("own", [own]))
    if job is None:
        take("others", [])
    else:
        job.gather_status(question, _NODE_WAIT[kind_of(question)], lambda others: take("others", others))


REQUESTS: dict[str, Callable[[Request], Document | None]] = {
    "drain": drain,
    "identify": identify,
    "job_stacks": lambda request: _gather(request, STACKS),
    "nodes": lambda request: _gather(request, STATUS),
    "stacks": lambda request: take_stacks(request.view, request.reply),
    "status": lambda request: measure(request.view, request.reply),
    "stop": stop,
}
