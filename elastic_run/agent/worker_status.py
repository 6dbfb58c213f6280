"""What `elastic-run status` shows of this node: the agent, its round, and each of its workers.

CPU time is measured between two moments: the last request, if it was not long ago, and now. Without a last request the
answer comes `_INTERVAL` seconds later. Nothing is measured while nobody asks.
"""

from __future__ import annotations

import os
import time

from elastic_run.multiprocessing.output.activity import last_line
from elastic_run.multiprocessing.process.process_table import read_stat
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.agent_view import AgentView, Request
    from elastic_run.agent.api import Worker
    from elastic_run.agent.driver.round import Round

    Document = dict[str, Any]

__all__ = ["absolute", "answer_nodes", "answer_status", "measure"]

#: Seconds between two measurements of CPU time, at least and at most. A clock tick of the kernel is 0.01 s.
_INTERVAL = 0.1
_LONGEST_INTERVAL = 60.0
#: Seconds that other nodes get to answer: they look for requests some times a second, and measure for a moment.
_PATIENCE = 2.0
_MEMORY_KEY = "status"
#: Bytes of a log file in which its last line is looked for.
_READ = 512
_STATES = {b"R": "running", b"S": "sleeping", b"D": "in the kernel (D)", b"T": "stopped", b"t": "traced", b"Z": "ended"}


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU time of this node's workers.

    Args:
        at: Monotonic seconds.
        ticks: Clock ticks of processor time by pid.
    """

    at: float
    ticks: dict[int, int]


def answer_status(request: Request) -> None:
    """Tell the state of this node and of its workers."""
    measure(request.view, request.reply)


def answer_nodes(request: Request) -> None:
    """Tell the state of all nodes of the job, as far as they answer in time."""
    view, job = request.view, request.view.job

    def add_others(own: Document) -> None:
        def reply(others: list[Document]) -> None:
            key = (own["host"], own["pid"])
            nodes = [own, *(node for node in others if (node["host"], node["pid"]) != key)]
            request.reply({"nodes": nodes, "expected": own["nodes"] or 1})

        if job is None:
            reply([])
        else:
            job.gather_status(_PATIENCE, reply)

    measure(view, add_others)


def measure(view: AgentView, deliver: Callable[[Document], None]) -> None:
    """Give the document of this node to a function, now or a moment later.

    Args:
        view: The agent.
        deliver: Called once, in the loop.
    """
    before, now = view.memory.get(_MEMORY_KEY), _take_sample(view)

    def conclude(first: Sample) -> None:
        later = _take_sample(view)
        view.memory[_MEMORY_KEY] = later
        deliver(describe_node(view, first, later))

    is_fresh = before is not None and _INTERVAL <= now.at - before.at <= _LONGEST_INTERVAL
    if before is not None and is_fresh and set(now.ticks) <= set(before.ticks):
        conclude(before)
    else:
        view.loop.call_later(_INTERVAL, lambda: conclude(now))


def absolute(path: str) -> str:
    """Return a path for who asks from another directory; an empty one stays empty."""
    return os.path.abspath(path) if path else ""


def describe_node(view: AgentView, before: Sample, now: Sample) -> Document:
    """Return the document of this node; docs/status.md lists its fields.

    Args:
        view: The agent.
        before: An earlier sample of its workers.
        now: A sample of this moment.
    """
    from elastic_run.agent.script_name import program_name  # noqa: PLC0415 - imported by now

    agent, current, context = view.find_agent(), view.find_round(), view.context
    group, config = context.group, context.options.job_config
    workers = [] if current is None else group.workers
    return {
        "host": context.hostname,
        "pid": os.getpid(),
        "node_rank": group.group_rank,
        "nodes": group.group_world_size,
        "state": agent.state,
        "run_id": context.run_id,
        "program": program_name(group.spec.entrypoint, group.spec.args),
        "log_dir": absolute(context.log_directory),
        "uptime": now.at - view.started,
        "round": agent.round,
        "round_uptime": None if current is None else now.at - current.started,
        "restart_count": agent.restart_count,
        "max_restarts": config.max_restarts,
        "world_size": group.workers[0].world_size if workers else None,
        "workers": [_describe_worker(worker, current, before, now) for worker in workers if current is not None],
    }


def _describe_worker(worker: Worker, current: Round, before: Sample, now: Sample) -> Document:
    local_rank = worker.local_rank
    pid = current.workers.pids.get(local_rank)
    code = current.exit_code(local_rank)
    stat = read_stat(pid) if pid is not None and code is None else None
    silence, line = _find_output(current, local_rank, now.at)
    return {
        "rank": worker.global_rank,
        "local_rank": local_rank,
        "pid": pid,
        "state": "ended" if stat is None else _STATES.get(stat.state, stat.state.decode()),
        "exit_code": code,
        "cpu": None if pid is None else _measure_cpu(pid, before, now),
        "memory": None if stat is None else stat.memory * os.sysconf("SC_PAGE_SIZE"),
        "silence": silence,
        "last_line": line,
    }


def _measure_cpu(pid: int, before: Sample, now: Sample) -> float | None:
    """Return percent of one processor, or None where the worker has ended or was just started."""
    if pid not in before.ticks or pid not in now.ticks or now.at <= before.at:
        return None
    seconds = (now.ticks[pid] - before.ticks[pid]) / os.sysconf("SC_CLK_TCK")
    return round(100 * seconds / (now.at - before.at), 1)


def _take_sample(view: AgentView) -> Sample:
    current = view.find_round()
    pids = [] if current is None else [current.workers.pids[rank] for rank in current.workers.alive]
    found = ((pid, read_stat(pid)) for pid in pids)
    ticks = {pid: stat.cpu for pid, stat in found if stat is not None}
    return Sample(view.loop.now(), ticks)


def _find_output(current: Round, local_rank: int, now: float) -> tuple[float | None, str]:
    """Return seconds since a worker's last output, None where not all of its output is seen here; and its last line."""
    activity = current.output.activities.get(local_rank)
    latest, line = (current.started, "") if activity is None else (activity.last, activity.last_line)
    files = current.output_files(local_rank)
    for path in files:
        try:
            status = os.stat(path)
            # Both of these clocks are this machine's own, and the difference is for display.
            written = now - (time.time() - status.st_mtime)
            if status.st_size and (written > latest or not line):
                latest, line = max(latest, written), last_line(_read_end(path, status.st_size))
        except OSError:
            continue  # removed by somebody
    return (max(0.0, now - latest) if current.sees_stdout(local_rank) else None), line


def _read_end(path: str, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return os.pread(fd, _READ, max(0, size - _READ))
    finally:
        os.close(fd)
