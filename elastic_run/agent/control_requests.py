"""The requests that commands may make of a running agent, through its control socket.

To add a request, write a function that takes a `Request`, and add its row to `REQUESTS`. A longer one has a file of its
own, which imports `Request` from `agent.agent_view`. The function runs in the agent's loop: it returns the answer, a
document for JSON, or returns None and calls `Request.reply` later from the loop. It raises `ControlError` with one line
if the request can't be answered. The client's side is `control.client.ask(path, Call(name, arguments))`.
"""

from __future__ import annotations

import os
import time

from elastic_run import __version__
from elastic_run.agent.agent_view import AgentView, Request
from elastic_run.agent.job_questions import answer_drain, answer_job_stacks, answer_nodes
from elastic_run.agent.script_name import program_name
from elastic_run.agent.worker_stacks import answer_stacks
from elastic_run.agent.worker_status import absolute, answer_status
from elastic_run.contract import NO_RUN_ID
from elastic_run.control.wire import ControlError
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.api import WorkerSpec
    from elastic_run.control.wire import Call

    Document = dict[str, Any]

__all__ = ["REQUESTS", "AgentView", "Request", "perform"]


def perform(request: Request, call: Call) -> None:
    """Answer a request now, or begin to.

    Raises:
        ControlError: The request can't be answered.
    """
    answer = REQUESTS.get(call.name)
    if answer is None:
        message = f"this agent, elastic-run {__version__}, has no request {call.name!r}"
        raise ControlError(message)
    request.arguments = call.arguments
    document = answer(request)
    if document is not None:
        request.reply(document)


def identify(request: Request) -> Document:
    """Describe the job that the agent runs."""
    view = request.view
    spec, options = view.context.group.spec, view.context.options
    return {
        "run_id": view.context.run_id,
        "pid": os.getpid(),
        "host": view.context.hostname,
        "version": __version__,
        "program": program_name(spec.entrypoint, spec.args),
        "log_dir": absolute(view.context.log_directory),
        "state": view.find_agent().state,
        "started_at": time.time() - (view.loop.now() - view.started),
        "max_nodes": options.job_config.max_nodes,
        "place": _find_place(spec),
        "is_whole_process": options.is_whole_process,
    }


def _find_place(spec: WorkerSpec) -> str:
    """Return what tells a job from others of the same id, or an empty string if the user has chosen the id."""
    if spec.master_port or spec.rdzv_handler.get_run_id() != NO_RUN_ID:
        return str(spec.master_port or "")
    return str(getattr(spec.rdzv_handler, "endpoint", ""))


def stop(request: Request) -> Document:
    """Stop the job as SIGTERM would. The answer is sent first; the end of the agent shows that the job is over."""
    view, pid = request.view, request.arguments.get("pid")
    sender = f"pid {pid} (elastic-run stop)" if isinstance(pid, int) else "elastic-run stop"
    view.loop.call_soon(lambda: view.stop(SIGTERM, sender))
    return {"grace": view.context.options.shutdown_timeout}


REQUESTS: dict[str, Callable[[Request], Document | None]] = {
    "drain": answer_drain,
    "identify": identify,
    "job_stacks": answer_job_stacks,
    "nodes": answer_nodes,
    "stacks": answer_stacks,
    "status": answer_status,
    "stop": stop,
}
