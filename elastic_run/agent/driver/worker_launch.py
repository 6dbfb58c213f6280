"""Starts the workers of a round: log files, descriptors, environment, exec.

Every import between the user's command and the first line of the last worker counts, so this module needs neither the
loop nor the console. The modules that watch the workers and take their output are imported while the workers boot
(`early_start`).
"""

from __future__ import annotations

import os
import time

from elastic_run.agent.driver.environment import worker_environments
from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs
from elastic_run.multiprocessing.output.wiring import STDOUT, Wiring, is_log, is_read_in_lines
from elastic_run.multiprocessing.starter import WorkerStarter
from elastic_run.records import dataclass, field
from elastic_run.signals import block_signals, restore_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.api import WorkerSpec
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.multiprocessing.functions.launch import Functions
    from elastic_run.multiprocessing.output.logs import LogsDest
    from elastic_run.multiprocessing.starter import StartedWorker


@dataclass(slots=True)
class LaunchedWorkers:
    """The workers of one round that were started and are not watched yet.

    Args:
        wiring: Their streams.
        logs: The files for their output, or None if they could not be opened.
        functions: The function that they run and its arguments, or None for a command.
        fault_sockets: Names of the sockets for requests of --inject-fault by local rank.
        workers: The workers by local rank.
        error: The reason why not all of them were started, or None.
        is_of_plugin: Whether a plug-in has raised the error, which concerns no program of a worker.
        started_at: Wall clock at the start, seconds since the epoch, for display.
        started: Monotonic seconds at the start.
    """

    wiring: Wiring
    logs: LogsDest | None = None
    functions: Functions | None = None
    fault_sockets: dict[int, str] = field(default_factory=dict)
    workers: dict[int, StartedWorker] = field(default_factory=dict)
    error: Exception | None = None
    is_of_plugin: bool = False
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)


def launch_workers(
    context: AgentContext,
    *,
    restart_count: int,
    use_agent_store: bool,
    on_fork: Callable[[], None] = lambda: None,
) -> LaunchedWorkers:
    """Start every worker of this node.

    Args:
        context: The state that all rounds of the agent share; its group has the round's ranks and master address.
        restart_count: Restarts so far.
        use_agent_store: Whether the agent serves the workers' store.
        on_fork: Called in a forked worker; closes the launcher's descriptors there.

    Returns:
        The workers. If a worker can't be started, the workers before it, and the reason.

    Raises:
        Exception: Nothing was ever started, because of a defect of a plug-in, or of this program.
    """
    launched = LaunchedWorkers(Wiring(capture=context.options.agent_config.capture))
    try:
        _launch(context, launched, restart_count, use_agent_store=use_agent_store, on_fork=on_fork)
    except (OSError, ValueError) as error:
        launched.error = error
    except Exception as error:
        if not context.guardian.pid:
            raise
        launched.error = error  # raised when these workers are watched, so that they are stopped
    return launched


def _launch(
    context: AgentContext,
    launched: LaunchedWorkers,
    restart_count: int,
    *,
    use_agent_store: bool,
    on_fork: Callable[[], None],
) -> None:
    group = context.group
    envs = worker_environments(
        group,
        os.environ,
        run_id=context.run_id,
        restart_count=restart_count,
        max_restarts=group.spec.max_restarts,
        use_agent_store=use_agent_store,
        signals=context.options.signals,
        more=context.options.worker_variables,
    )
    starter = WorkerStarter(context.guardian, launched.wiring, affinities=context.options.affinities, mask=context.mask)
    if not isinstance(group.spec.entrypoint, str):
        launched.functions = _prepare_functions(context)
    # From here to the guardian as little as can be: a launcher that is killed before leaves its temporary directory.
    starter.makes_directories = type(context.logs_specs) is DefaultLogsSpecs
    starter.logs = launched.logs = _lay_out_logs(context, envs, launched)
    context.announce_log_directory()
    context.make_room(
        _count_descriptors(launched.logs, capture=context.options.agent_config.capture) + len(starter.closed)
    )
    starter.descriptor_limit = context.worker_limit
    starter.has_stacks = context.has_room_for_stacks
    is_shared = len(group.workers) > 1 and is_read_in_lines(STDOUT)
    launched.wiring.is_stdout_passed = is_shared or _is_any_stdout_passed(launched.logs)
    context.serve_timers(envs)
    context.switch_on_recorders(envs, launched.logs)
    if any(fault.is_of_worker for fault in context.options.faults):
        from elastic_run.agent.driver.fault_sockets import open_to_faults

        launched.fault_sockets = open_to_faults(envs, group.workers, context.options.faults, restart_count)
    if not context.guardian.pid:
        # Before the first worker, and no earlier: a page that this process writes to after the fork is copied first.
        context.guardian.start()
    take_fork = None if context.worker_pool is None else context.worker_pool.start_worker
    for worker in group.workers:
        rank, env = worker.local_rank, envs[worker.local_rank]
        if launched.functions is None:
            started = starter.start_command(rank, _command(group.spec, rank), env, take_fork=take_fork)
        else:
            started = starter.start_function(launched.functions, rank, env, on_fork=on_fork)
        launched.workers[rank] = started
        worker.id = started.pid
        context.limit_worker(started.pid)
        if started.function is not None:
            started.function.begin()


def _lay_out_logs(context: AgentContext, envs: dict[int, dict[str, str]], launched: LaunchedWorkers) -> LogsDest:
    """Ask the logs specs for the files. A process that a plug-in starts begins with the mask that this process had."""
    specs = context.logs_specs
    if type(specs) is DefaultLogsSpecs:
        return specs.lay_out(envs)
    from elastic_run.agent.plugin_calls import HungCallError, is_ours, name_call
    from elastic_run.multiprocessing.output.logs import check_logs

    def reify() -> LogsDest:
        if context.mask is None:
            return specs.reify(envs)
        mask = block_signals(())
        restore_signals(context.mask)
        try:
            return specs.reify(envs)
        finally:
            restore_signals(mask)

    if context.plugin_calls is None or is_ours(specs.reify):  # inherited
        return reify()
    try:
        logs: LogsDest = context.plugin_calls.ask(name_call(specs, "reify"), reify)
        check_logs(specs, logs, envs)
    except Exception as error:
        launched.is_of_plugin = not isinstance(error, HungCallError)
        raise
    return logs


def _prepare_functions(context: AgentContext) -> Functions:
    from elastic_run.multiprocessing.functions.launch import Functions
    from elastic_run.utils import macros

    spec: Any = context.group.spec
    args = {rank: macros.substitute(list(spec.args), str(rank)) for rank in range(spec.local_world_size)}
    return Functions(spec.entrypoint, args, context.options.start_method)


def _command(spec: WorkerSpec, rank: int) -> list[str]:
    """Return a worker's command with its own local rank in it."""
    words = [str(spec.entrypoint), *map(str, spec.args)]
    if not any("$" in word for word in words[1:]):
        return words
    from elastic_run.utils import macros

    return [words[0], *macros.substitute(words[1:], str(rank))]


def _count_descriptors(logs: LogsDest, *, capture: bool) -> int:
    """Return how many this process holds for its workers: pidfds, pipes of streams that pass through, files of tees.

    Of a tee the file counts twice: it is read when the console has fallen behind (`Backlog`).
    """
    teed = sum(is_log(path) for tees in (logs.tee_stdouts, logs.tee_stderrs) for path in tees.values())
    streams = [logs.stderrs, logs.stdouts] if _is_any_stdout_passed(logs) else [logs.stderrs]
    captured = sum(not is_log(path) for paths in streams for path in paths.values()) if capture else 0
    kept = sum(len(getattr(logs, name, ())) for name in ("kept_stdouts", "kept_stderrs")) if capture else 0
    return len(logs.stdouts) + captured + kept + 3 * teed


def _is_any_stdout_passed(logs: LogsDest) -> bool:
    """Whether the launcher itself writes the stdout of any worker; torch's class keeps no output."""
    return any(map(is_log, (*logs.tee_stdouts.values(), *getattr(logs, "kept_stdouts", {}).values())))
