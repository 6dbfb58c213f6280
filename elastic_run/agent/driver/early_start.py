"""Starts the first round's workers before the launcher imports the supervisor.

Workers take longer to boot than the launcher takes to import, so both go on at the same time. The workers are started
by the same functions as in every round, only earlier, and the supervisor takes over the result. Until then the
workers' output waits in their pipes.
"""

from __future__ import annotations

from elastic_run.agent.driver.round_join import RoundJoin
from elastic_run.agent.driver.worker_launch import LaunchedWorkers, launch_workers
from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.driver.context import AgentContext


@dataclass(frozen=True, slots=True)
class EarlyStart:
    """A first round that this node has joined, and its workers, which were started."""

    round_join: RoundJoin
    launched: LaunchedWorkers


def start_early(context: AgentContext) -> EarlyStart | None:
    """Start the first round's workers if they need not wait for other nodes or for a template's imports.

    Returns:
        The round. None where the supervisor begins with it; it also tells the user if the round can't be joined.
    """
    round_join = RoundJoin(context.group, context.options.agent_config.worker_store)
    is_checked_first = bool(context.options.node_config.health_check)
    is_alone = round_join.is_immediate and context.options.is_whole_process
    has_plugin = type(context.logs_specs) is not DefaultLogsSpecs  # the supervisor's loop goes on while it is asked
    if not is_alone or is_checked_first or has_plugin or context.worker_pool is not None:
        return None
    try:
        round_join.offer_store()
        round_join.take_place()
    except OSError:
        round_join.close()
        return None
    # Until the supervisor handles them: a stop signal would end the launcher without a message.
    context.block_signals((*context.options.signals, *context.options.forwarded, *context.options.unnamed_signals))
    launched = launch_workers(context, restart_count=0, use_agent_store=round_join.use_agent_store)
    context.adopt_orphans()  # as early as possible: orphans of the workers' descendants go to another process before
    return EarlyStart(round_join, launched)
