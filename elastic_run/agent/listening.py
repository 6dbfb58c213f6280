"""Taking over what the workers of a round write: prefixes, filters, log files as the user asked for.

A file of its own because the first round's workers are listened to before anything else of a round is imported.
"""

from __future__ import annotations

from elastic_run.multiprocessing.output.prefix import render_prefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.api import Worker
    from elastic_run.agent.launched import LaunchedWorkers
    from elastic_run.agent.surroundings import Surroundings
    from elastic_run.multiprocessing.output.worker_output import WorkerOutput


def listen(output: WorkerOutput, around: Surroundings, launched: LaunchedWorkers, *, restart_count: int) -> None:
    """Listen to the workers of a round from now on.

    Args:
        output: Made of their wiring.
        around: What the rounds of one agent share.
        launched: The round's workers.
        restart_count: Restarts so far.

    Raises:
        OSError: There are no descriptors left.
    """
    spec = around.group.spec
    if launched.logs is not None:
        output.open_filtered(
            launched.logs.filtered_stdout if spec.duplicate_stdout_filters else "",
            launched.logs.filtered_stderr if spec.duplicate_stderr_filters else "",
            stdout_filters=spec.duplicate_stdout_filters or (),
            stderr_filters=spec.duplicate_stderr_filters or (),
        )
    output.attach({worker.local_rank: _prefix(worker, around, restart_count) for worker in around.group.workers})


def _prefix(worker: Worker, around: Surroundings, restart_count: int) -> bytes:
    return render_prefix(
        around.options.prefix_template,
        role_name=around.group.spec.role,
        local_rank=worker.local_rank,
        rank=worker.global_rank,
        hostname=around.hostname,
        restart_count=restart_count,
    )
