"""Attaches prefixes, filters and log files to the workers' output, as the user asked for.

This is a module of its own because the early start needs it before any other part of a round is imported.
"""

from __future__ import annotations

from elastic_run.multiprocessing.output.prefix import render_prefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.api import Worker
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.worker_launch import LaunchedWorkers
    from elastic_run.multiprocessing.output.worker_output import WorkerOutput


def listen(output: WorkerOutput, context: AgentContext, launched: LaunchedWorkers, *, restart_count: int) -> None:
    """Listen to the workers of a round from now on.

    Args:
        output: Made of their wiring.
        context: What the rounds of one agent share.
        launched: The round's workers.
        restart_count: Restarts so far.

    Raises:
        OSError: There are no descriptors left.
    """
    spec = context.group.spec
    if launched.logs is not None:
        output.open_filtered(
            launched.logs.filtered_stdout if spec.duplicate_stdout_filters else "",
            launched.logs.filtered_stderr if spec.duplicate_stderr_filters else "",
            stdout_filters=spec.duplicate_stdout_filters or (),
            stderr_filters=spec.duplicate_stderr_filters or (),
        )
    output.attach({worker.local_rank: _prefix(worker, context, restart_count) for worker in context.group.workers})


def _prefix(worker: Worker, context: AgentContext, restart_count: int) -> bytes:
    return render_prefix(
        context.options.prefix_template,
        role_name=context.group.spec.role,
        local_rank=worker.local_rank,
        rank=worker.global_rank,
        hostname=context.hostname,
        restart_count=restart_count,
    )
