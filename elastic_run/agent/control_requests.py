"""What commands may ask a running agent, through its control socket, and the other nodes of its job.

To add a request, write a method that takes the client's arguments, unchecked, and `reply`, which it calls once, now or
later from the loop, with a document for JSON; and add its row to `REQUESTS`. The client's side is
`control.client.ask_all(paths, Call(name, arguments))`.
"""

from __future__ import annotations

import json
import os
import time

from elastic_run import __version__
from elastic_run.agent.driver.worker_readings import add_silences, ask_gpu_use, find_output, read_process, read_usage
from elastic_run.agent.script_name import program_name
from elastic_run.contract import NO_RUN_ID
from elastic_run.control.socket_directory import VERSION
from elastic_run.core.agent.messages import Signalled
from elastic_run.core.failure.stacks import shorten_stacks
from elastic_run.core.job.node_status import DRAIN, HANG, SLOW, STACKS, STATUS, WAITS, count_members, kind_of
from elastic_run.records import dataclass
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.agent.api import Worker
    from elastic_run.agent.driver import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.watches import Watches
    from elastic_run.agent.driver.worker_readings import Usage
    from elastic_run.agent.http_server import HttpRequest
    from elastic_run.cluster.devices import GpuUse
    from elastic_run.core.failure.stacks import Dump

    Document = dict[str, Any]
    Deliver = Callable[[Document], None]

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
class Sample:
    """What this node's workers have used at one moment, by pid."""

    at: float
    usage: dict[int, Usage]


class ControlRequests:
    """Answers the requests to one agent, and remembers what the next one needs, such as the last CPU times."""

    def __init__(self, context: AgentParts, watches: Watches | None = None) -> None:
        self._context = context
        self._watches = watches
        self._last_sample: Sample | None = None
        self._is_drained = False

    def answer(self, http: HttpRequest) -> None:
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
        try:
            answer(self, arguments, lambda document: http.reply(200, json.dumps(document).encode(), "application/json"))
        except RefusedError as error:
            http.reply(400, f"{error}\n".encode())

    # --- the job -----------------------------------------------------------------------------------------------------
    def identify(self, _: Document, reply: Deliver) -> None:
        """Describe the job that the agent runs."""
        context, spec = self._context, self._context.group.spec
        # Nodes of one job share the place where they meet; it tells the job from others if no user has chosen the id.
        place = spec.master_port or ""
        if not place and spec.rdzv_handler.get_run_id() == NO_RUN_ID:
            place = getattr(spec.rdzv_handler, "endpoint", "")
        reply(
            {
                **self._describe_job(),
                "version": __version__,
                "started_at": time.time() - (self._context.loop.now() - self._context.started),
                "max_nodes": context.options.job_config.max_nodes,
                "place": str(place),
                "is_whole_process": context.options.is_whole_process,
            }
        )

    def _describe_job(self) -> Document:
        context = self._context
        spec, log_dir = context.group.spec, context.log_directory
        return {
            "run_id": context.run_id,
            "pid": os.getpid(),
            "host": context.hostname,
            "program": program_name(spec.entrypoint, spec.args),
            "log_dir": os.path.abspath(log_dir) if log_dir else "",  # a client has another working directory
            "state": self._context.agent.state,
        }

    def stop(self, arguments: Document, reply: Deliver) -> None:
        """Stop the job as SIGTERM would; the end of the agent shows that the job is over."""
        pid = arguments.get("pid")
        self._stop(f"pid {pid} (elastic-run stop)" if isinstance(pid, int) else "elastic-run stop")
        reply({"grace": self._context.options.shutdown_timeout})

    def _stop(self, sender: str) -> None:
        """Stop the job, or this node's part of it, as if SIGTERM had come; the answer of the request is sent first."""

        def stop() -> None:
            self._context.senders.name(SIGTERM, sender)
            self._context.feed(Signalled(SIGTERM))

        self._context.loop.call_soon(stop)

    # --- this node ---------------------------------------------------------------------------------------------------
    def measure(self, deliver: Deliver) -> None:
        """Deliver the state of this node and its workers; CPU time is that since the last request or a moment."""
        before, now = self._last_sample, self._take_sample()

        def conclude(first: Sample) -> None:
            later = self._last_sample = self._take_sample()
            ask_gpu_use(self._context, lambda gpus: deliver(self.describe_node(first, later, gpus)))

        is_fresh = before is not None and _INTERVAL <= now.at - before.at <= _LONGEST_INTERVAL
        if before is not None and is_fresh and now.usage.keys() <= before.usage.keys():
            conclude(before)
        else:
            self._context.loop.call_later(_INTERVAL, lambda: conclude(now))

    def _take_sample(self) -> Sample:
        current = self._context.current
        used = {} if current is None else {current.workers.pids[rank]: own for rank, own in read_usage(current).items()}
        return Sample(self._context.loop.now(), used)

    def describe_node(self, before: Sample, now: Sample, gpus: Mapping[int, GpuUse]) -> Document:
        """Return the document of this node; docs/see-into-a-running-job.md lists its fields."""
        agent, current, context, job = self._context.agent, self._context.current, self._context, self._context.job
        group, slow_ranks = context.group, None if self._watches is None else self._watches.slow_ranks
        workers = [] if current is None else group.workers
        return {
            **self._describe_job(),
            "node_rank": group.group_rank,
            "nodes": group.group_world_size,
            "uptime": now.at - self._context.started,
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
            "workers": [_describe_worker(each, current, before, now, gpus) for each in workers if current is not None],
            "behind": [*slow_ranks.shares.items()] if slow_ranks is not None else [],
        }

    def take_stacks(self, deliver: Deliver) -> None:
        """Ask this node's workers for their stacks; deliver them when all have answered, or time is over."""
        context, current = self._context, self._context.current
        node = {"host": context.hostname, "pid": os.getpid(), "state": context.agent.state}
        if current is None or not current.workers.alive:
            deliver({**node, "workers": []})
            return

        def conclude(dumps: dict[int, Dump]) -> None:
            found = add_silences(dumps, current, context.loop.now())
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

    # --- all nodes of the job ----------------------------------------------------------------------------------------
    def answer_question(self, question: str, deliver: Deliver) -> None:
        """Give this node's answer to a question to all nodes to a function, now or a moment later, in the loop."""
        kind, _, words = question.partition(" ")
        context, job = self._context, self._context.job
        of_round = {"round_id": "", "round_nodes": 0} if job is None else job.describe_round()

        def deliver_of_round(document: Document) -> None:
            deliver({**document, **of_round})

        if kind == DRAIN:
            deliver_of_round({"asked": question, **self._leave_if_named(words)})
        elif kind in (HANG, WAITS, SLOW):
            own = {"host": context.hostname, "pid": os.getpid(), "groups": [], "workers": []}
            slow_ranks = None if self._watches is None else self._watches.slow_ranks
            if kind == HANG and self._watches is not None:
                own |= self._watches.describe_hang()
            elif kind == WAITS and slow_ranks is not None:
                own["groups"] = slow_ranks.answer(words)
            elif kind == SLOW and slow_ranks is not None:
                slow_ranks.explain(words, lambda workers: deliver_of_round({**own, "workers": workers}))
                return
            deliver_of_round(own)
        else:
            (self.take_stacks if kind == STACKS else self.measure)(deliver_of_round)

    def _leave_if_named(self, words: str) -> Document:
        """Leave the job, as at SIGTERM, if this node is named, by host or by rank in the round of the question."""
        asked_in, _, name = words.partition(" ")
        round_number, own_rank = self._find_seat()
        host, node_rank = self._context.hostname, own_rank if asked_in == str(round_number) else None
        is_leaving = name == host or (node_rank is not None and name == str(node_rank))
        if is_leaving and not self._is_drained:
            self._is_drained = True
            self._stop("elastic-run drain")
        return {"host": host, "pid": os.getpid(), "node_rank": node_rank, "is_leaving": is_leaving, "workers": []}

    def _find_seat(self) -> tuple[int, int | None]:
        """Return the newest round of this node, which the machine may not have begun, and its node rank there."""
        job = self._context.job
        if job is not None and job.place is not None:
            return job.place.round, job.place.group_rank
        return self._context.agent.round, self._context.group.group_rank

    def drain(self, arguments: Document, reply: Deliver) -> None:
        """Let one node of the job leave, and tell all nodes."""
        name = arguments.get("node")
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
            message = "this is not the name of a node"
            raise RefusedError(message)
        words = f"{self._find_seat()[0]} {name}"
        own = self._leave_if_named(words)
        if own["is_leaving"]:  # its session may end before the others have answered
            reply({"nodes": [own], "members": 1, "missing": 0})
        else:
            self.gather(f"{DRAIN} {words}", reply)

    def gather(self, question: str, reply: Deliver) -> None:
        """Ask this node and the others at the same time; reply when both are there, as far as they answer in time."""
        job = self._context.job
        answers: dict[str, list[Document]] = {}

        def take(part: str, found: list[Document]) -> None:
            answers[part] = found
            if len(answers) == len(("own", "others")):
                (own,) = answers["own"]
                key = (own["host"], own["pid"])
                nodes = [own, *(node for node in answers["others"] if (node["host"], node["pid"]) != key)]
                members, missing = count_members(nodes)
                reply({"nodes": nodes, "members": members, "missing": missing})

        self.answer_question(question, lambda own: take("own", [own]))
        if job is None:
            take("others", [])
        else:
            job.gather_status(question, _NODE_WAIT[kind_of(question)], lambda others: take("others", others))


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
    cpu = None  # percent of one processor; unknown where the worker has ended or was just started
    if pid in before.usage and pid in now.usage and now.at > before.at:
        cpu = round(100 * (now.usage[pid].cpu - before.usage[pid].cpu) / (now.at - before.at), 1)
    return {
        "rank": worker.global_rank,
        "local_rank": local_rank,
        "pid": pid,
        "state": "ended" if used is None else _STATES.get(used.state, used.state),
        "exit_code": code,
        "cpu": cpu,
        "memory": None if used is None else used.memory,
        "silence": silence,
        "last_line": line,
        "gpu": None if gpu is None else gpu.busy,
        "gpu_memory": None if gpu is None else gpu.memory,
    }


REQUESTS: dict[str, Callable[[ControlRequests, Document, Deliver], None]] = {
    "drain": ControlRequests.drain,
    "identify": ControlRequests.identify,
    "job_stacks": lambda own, _, reply: own.gather(STACKS, reply),
    "nodes": lambda own, _, reply: own.gather(STATUS, reply),
    "stacks": lambda own, _, reply: own.take_stacks(reply),
    "status": lambda own, _, reply: own.measure(reply),
    "stop": ControlRequests.stop,
}
