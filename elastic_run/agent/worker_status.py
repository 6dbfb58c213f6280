"""This node's answer to `elastic-run status`: the agent, its round, and each of its workers.

CPU time is measured between two moments: the last request, if it was not long ago, and now. Without a last request the
answer comes `_INTERVAL` seconds later. Without a request nothing is measured.
"""

from __future__ import annotations

import os

from elastic_run.agent.driver.last_output import find_output
from elastic_run.agent.gpu_question import ask_gpu_use
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.agent.agent_view import AgentView, Request
    from elastic_run.agent.api import Worker
    from elastic_run.agent.driver.resource_readings import Usage
    from elastic_run.agent.driver.round import Round
    from elastic_run.cluster.gpu_use import GpuUse

    Document = dict[str, Any]

__all__ = ["absolute", "answer_status", "measure"]

#: Seconds between two measurements of CPU time, at least and at most. The kernel counts it in steps of 0.01 s.
_INTERVAL = 0.1
_LONGEST_INTERVAL = 60.0
_MEMORY_KEY = "status"
#: Words for some states of psutil.
_STATES = {"disk-sleep": "in the kernel (D)", "tracing-stop": "traced", "zombie": "ended", "dead": "ended"}


@dataclass(frozen=True, slots=True)
class Sample:
    """What this node's workers have used.

    Args:
        at: Monotonic seconds.
        usage: By pid.
    """

    at: float
    usage: dict[int, Usage]


def answer_status(request: Request) -> None:
    """Tell the state of this node and of its workers."""
    measure(request.view, request.reply)


def measure(view: AgentView, deliver: Callable[[Document], None]) -> None:
    """Give the document of this node to a function, once and in the loop, now or a moment later."""
    before, now = view.memory.get(_MEMORY_KEY), _take_sample(view)

    def conclude(first: Sample) -> None:
        later = _take_sample(view)
        view.memory[_MEMORY_KEY] = later
        ask_gpu_use(view.loop, view.memory, lambda gpus: deliver(describe_node(view, first, later, gpus)))

    is_fresh = before is not None and _INTERVAL <= now.at - before.at <= _LONGEST_INTERVAL
    if before is not None and is_fresh and now.usage.keys() <= before.usage.keys():
        conclude(before)
    else:
        view.loop.call_later(_INTERVAL, lambda: conclude(now))


def absolute(path: str) -> str:
    """Return a path that is valid in any working directory; an empty path stays empty."""
    return os.path.abspath(path) if path else ""


def describe_node(view: AgentView, before: Sample, now: Sample, gpus: Mapping[int, GpuUse]) -> Document:
    """Return the document of this node; docs/see-into-a-running-job.md lists its fields.

    Args:
        view: The agent.
        before: An earlier sample of its workers.
        now: A sample of this moment.
        gpus: The GPU use of processes by pid, as far as it is known.
    """
    from elastic_run.agent.script_name import program_name

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
        # Between two rounds the workers are those of the last one.
        "round_uptime": now.at - current.started if current is not None and current.number == agent.round else None,
        "restart_count": agent.restart_count,
        "max_restarts": config.max_restarts,
        "news": "" if view.job is None or view.job.place is None else view.job.place.news,
        "waiting": "" if view.job is None else view.job.describe_wait(),
        "left_out": [] if view.job is None else view.job.list_left_out(),
        "world_size": group.workers[0].world_size if workers else None,
        "workers": [
            _describe_worker(worker, current, before, now) | _describe_gpu(current, worker, gpus)
            for worker in workers
            if current is not None
        ],
    }


def _describe_worker(worker: Worker, current: Round, before: Sample, now: Sample) -> Document:
    from elastic_run.agent.driver.resource_readings import read_process

    local_rank = worker.local_rank
    pid = current.workers.pids.get(local_rank)
    code = current.exit_code(local_rank)
    # A round that has begun since the sample has other processes.
    used = (now.usage.get(pid) or read_process(pid)) if pid is not None and code is None else None
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
    }


def _describe_gpu(current: Round, worker: Worker, gpus: Mapping[int, GpuUse]) -> Document:
    use = gpus.get(current.workers.pids.get(worker.local_rank, 0))
    return {"gpu": None if use is None else use.busy, "gpu_memory": None if use is None else use.memory}


def _measure_cpu(pid: int, before: Sample, now: Sample) -> float | None:
    """Return percent of one processor, or None where the worker has ended or was just started."""
    if pid not in before.usage or pid not in now.usage or now.at <= before.at:
        return None
    seconds = now.usage[pid].cpu - before.usage[pid].cpu
    return round(100 * seconds / (now.at - before.at), 1)


def _take_sample(view: AgentView) -> Sample:
    from elastic_run.agent.driver.resource_readings import read_usage

    current = view.find_round()
    found = {} if current is None else {current.workers.pids[rank]: used for rank, used in read_usage(current).items()}
    return Sample(view.loop.now(), found)
