"""Starts the workers of a round: environment, log files, descriptors, exec.

Every import between the user's command and the first line of the last worker counts, so this module needs neither the
loop nor the console. Workers take longer to boot than the launcher takes to import, so `start_early` starts those of
the first round, by the same functions, before the launcher imports the supervisor. The modules that watch the workers
are imported while the workers boot; until then the workers' output waits in their pipes.
"""

from __future__ import annotations

import os
import time

from elastic_run import contract
from elastic_run.agent.driver.round_join import RoundJoin
from elastic_run.multiprocessing.output.logs import DefaultLogsSpecs, is_log
from elastic_run.multiprocessing.output.wiring import STDOUT, Wiring, is_read_in_lines
from elastic_run.multiprocessing.starter import WorkerStarter
from elastic_run.records import dataclass, field
from elastic_run.signals import block_signals, restore_signals, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elastic_run.agent.api import Worker, WorkerGroup, WorkerSpec
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.core.agent.faults import Fault
    from elastic_run.multiprocessing.functions.launch import Functions
    from elastic_run.multiprocessing.output.logs import LogsDest
    from elastic_run.multiprocessing.starter import StartedWorker


@dataclass(slots=True)
class LaunchedWorkers:
    """The workers of one round that were started and are not watched yet, by local rank.

    Args:
        logs: The files for their output, or None if they could not be opened.
        functions: The function that they run and its arguments, or None for a command.
        fault_sockets: Names of the sockets for requests of --inject-fault.
        error: The reason why not all of them were started, or None.
        is_of_plugin: Whether a plug-in has raised the error, which concerns no program of a worker.
        started_at: Wall clock at the start, for display; `started` is the monotonic one.
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


def launch_workers(
    context: AgentContext,
    *,
    restart_count: int,
    use_agent_store: bool,
    on_fork: Callable[[], None] = lambda: None,
) -> LaunchedWorkers:
    """Start every worker of this node; the context's group has the round's ranks and master address.

    Returns:
        The workers. If a worker can't be started, the workers before it, and the reason. `on_fork` is called in a
        forked worker, and closes the launcher's descriptors there.

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
    if context.kept is not None:
        for rank, env in envs.items():
            env.update(context.kept.describe(rank))
    context.switch_on_recorders(envs, launched.logs)
    if any(fault.is_of_worker for fault in context.options.faults):
        launched.fault_sockets = _open_to_faults(envs, group.workers, context.options.faults, restart_count)
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


def _open_to_faults(
    envs: Mapping[int, dict[str, str]], workers: Sequence[Worker], faults: Sequence[Fault], restart_count: int
) -> dict[int, str]:
    """Let Python workers take requests for faults, and tell them which ones begin with their start.

    Returns:
        The names of the workers' sockets (`diagnosis.fault_thread`) by local rank.
    """
    from elastic_run.core.agent.faults import plan_faults
    from elastic_run.diagnosis.worker_sockets import make_name

    from_start: dict[int, list[str]] = {}
    for planned in plan_faults(faults, attempt=restart_count, world_size=workers[0].world_size):
        action, _, module = planned.fault.action.partition(" ")
        if action == "import":
            from_start.setdefault(planned.rank, []).append(module)
    sockets = {worker.local_rank: make_name("faults") for worker in workers}
    for worker in workers:
        name = sockets[worker.local_rank]
        envs[worker.local_rank][contract.ENV_FAULTS] = " ".join((name, *from_start.get(worker.global_rank, ())))
    return sockets


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


def worker_environments(
    group: WorkerGroup,
    parent: Mapping[str, str],
    *,
    run_id: str,
    restart_count: int,
    max_restarts: int,
    use_agent_store: bool,
    signals: Sequence[int],
    more: Mapping[str, str] | None = None,
) -> dict[int, dict[str, str]]:
    """Return the variables that each worker gets on top of the launcher's own environment: torchrun's contract.

    Source: torch 2.13, LocalElasticAgent._start_workers; our own variables are defined in `contract`.

    Raises:
        ValueError: With virtual local ranks, more workers than visible devices.
    """
    spec = group.spec
    shared = {
        contract.ENV_GROUP_RANK: str(group.group_rank),
        contract.ENV_ROLE_NAME: spec.role,
        contract.ENV_LOCAL_WORLD_SIZE: str(spec.local_world_size),
        contract.ENV_GROUP_WORLD_SIZE: str(group.group_world_size),
        contract.ENV_MASTER_ADDR: str(group.master_addr),
        contract.ENV_MASTER_PORT: str(group.master_port),
        contract.ENV_RESTART_COUNT: str(restart_count),
        contract.ENV_MAX_RESTARTS: str(max_restarts),
        contract.ENV_RUN_ID: run_id,
        contract.ENV_USE_AGENT_STORE: str(use_agent_store),
        # A launcher inside the worker takes them over.
        contract.ENV_SIGNALS_TO_HANDLE: ",".join(signal_name(number) for number in signals),
        contract.ENV_NCCL_ASYNC_ERROR_HANDLING: parent.get(contract.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    if contract.ENV_KEPT_STATE in parent:
        shared[contract.ENV_KEPT_STATE] = ""  # a launcher inside a worker: its workers would share that one's memory
    shared.update(more or {})
    return {worker.local_rank: {**shared, **_own_environment(spec, worker, parent)} for worker in group.workers}


def _own_environment(spec: WorkerSpec, worker: Worker, parent: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which the workers of a node differ."""
    env = {
        contract.ENV_LOCAL_RANK: str(worker.local_rank),
        contract.ENV_RANK: str(worker.global_rank),
        contract.ENV_ROLE_RANK: str(worker.role_rank),
        contract.ENV_WORLD_SIZE: str(worker.world_size),
        contract.ENV_ROLE_WORLD_SIZE: str(worker.role_world_size),
    }
    if spec.virtual_local_rank:
        env[contract.ENV_LOCAL_RANK] = "0"
        from elastic_run.cluster.devices import virtual_device

        env |= virtual_device(worker.local_rank, parent)
    return env
