"""Starts the workers of a round: log files, descriptors, environment, exec.

Every import between the user's command and the first line of the last worker counts, so this module needs neither the
loop nor the console. The modules that watch the workers and take their output are imported while the workers boot
(`early_start`).
"""

from __future__ import annotations

import os
import time

from elastic_run import contract
from elastic_run.agent.driver.environment import worker_environments
from elastic_run.multiprocessing.output.descriptors import is_log
from elastic_run.multiprocessing.output.wiring import Wiring
from elastic_run.multiprocessing.process import process_table
from elastic_run.multiprocessing.process.descriptors import inheritable_descriptors
from elastic_run.multiprocessing.process.fork_exec import start_process
from elastic_run.signals import block_signals, restore_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.api import Worker, WorkerSpec
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.multiprocessing.functions.launch import Functions, StartedFunction
    from elastic_run.multiprocessing.output.logs import LogsDest


class LaunchedWorkers:
    """The workers of one round that were started and are not watched yet.

    Args:
        capture: Whether the workers' stderr passes through the launcher.

    Attributes:
        started_at: Wall clock at the start, seconds since the epoch, for display.
        started: Monotonic seconds at the start.
        logs: Where their output goes, or None when that could not be laid out.
        wiring: Their streams.
        born: Start times in clock ticks, by pid; their keys are the processes.
        pids: Pids by local rank.
        functions: The function that they run and its arguments, or None for a command.
        started_functions: What is known of each function worker, by local rank.
        error: Why not all of them were started, or None.
    """

    __slots__ = (
        "born",
        "error",
        "functions",
        "logs",
        "pids",
        "started",
        "started_at",
        "started_functions",
        "wiring",
    )

    def __init__(self, *, capture: bool) -> None:
        self.started_at = time.time()
        self.started = time.monotonic()
        self.logs: LogsDest | None = None
        self.wiring = Wiring(capture=capture)
        self.pids: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.functions: Functions | None = None
        self.started_functions: dict[int, StartedFunction] = {}
        self.error: OSError | ValueError | None = None


def launch_workers(
    context: AgentContext,
    *,
    restart_count: int,
    use_agent_store: bool,
    on_fork: Callable[[], None] | None = None,
) -> LaunchedWorkers:
    """Start every worker of this node.

    Args:
        context: What the rounds of one agent share; its group has the round's ranks and master address.
        restart_count: Restarts so far.
        use_agent_store: Whether the agent serves the workers' store.
        on_fork: Gives up what is the launcher's, in a worker that is forked.

    Returns:
        The workers. When one can't be started, those before it, and the reason.
    """
    launched = LaunchedWorkers(capture=context.options.capture)
    try:
        _launch(context, launched, restart_count, use_agent_store=use_agent_store, on_fork=on_fork)
    except (OSError, ValueError) as error:
        launched.error = error
    return launched


def _launch(
    context: AgentContext,
    launched: LaunchedWorkers,
    restart_count: int,
    *,
    use_agent_store: bool,
    on_fork: Callable[[], None] | None,
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
        scale_up_signal=context.options.scale_up_signal,
    )
    closed = inheritable_descriptors()
    # The agents' secret stays here; a worker may print its environment.
    inherited = {name: value for name, value in os.environ.items() if name != contract.ENV_RDZV_TOKEN}
    if not isinstance(group.spec.entrypoint, str):
        launched.functions = _prepare_functions(context)
    # From here to the guardian as little as can be: a launcher that is killed before leaves its temporary directory.
    launched.logs = _lay_out_logs(context, envs, is_first=not context.guardian.pid)
    context.announce_log_directory()
    context.make_room(_count_descriptors(launched.logs, capture=context.options.capture) + len(closed))
    launched.wiring.is_stdout_teed = _is_any_stdout_teed(launched.logs)
    context.serve_timers(envs)
    if not context.guardian.pid:
        # Before the first worker, and no earlier: a page that this process writes to after the fork is copied first.
        context.guardian.start()
    for worker in group.workers:
        own_env = {**envs[worker.local_rank], contract.ENV_TOKEN: context.inherited_token}
        if launched.functions is None:
            worker.id = _launch_worker(context, launched, worker, {**inherited, **own_env}, closed)
        else:
            worker.id = _launch_function(context, launched, worker, own_env, closed, on_fork)


def _lay_out_logs(context: AgentContext, envs: dict[int, dict[str, str]], *, is_first: bool) -> LogsDest:
    """Ask the logs specs. A process that a plug-in starts begins with the signal mask that this process had.

    Not in the first round: nothing handles the signals yet, and one would end this process without a word.
    """
    if is_first or context.mask is None or type(context.logs_specs).__module__.startswith("elastic_run."):
        return context.logs_specs.reify(envs)
    mask = block_signals(())
    restore_signals(context.mask)
    try:
        return context.logs_specs.reify(envs)
    finally:
        restore_signals(mask)


def _prepare_functions(context: AgentContext) -> Functions:
    from elastic_run.multiprocessing.functions.launch import Functions  # noqa: PLC0415 - a command needs no multiprocessing
    from elastic_run.utils import macros  # noqa: PLC0415 - see `_command`

    spec: Any = context.group.spec
    args = {rank: macros.substitute(list(spec.args), str(rank)) for rank in range(spec.local_world_size)}
    return Functions(spec.entrypoint, args, context.options.start_method)


def _launch_function(
    context: AgentContext,
    launched: LaunchedWorkers,
    worker: Worker,
    own_env: dict[str, str],
    closed: list[int],
    on_fork: Callable[[], None] | None,
) -> int:
    from elastic_run.multiprocessing.functions.spawn_options import SpawnOptions  # noqa: PLC0415 - ditto

    rank, logs, functions = worker.local_rank, launched.logs, launched.functions
    if functions is None or logs is None:
        message = "the round's functions are not prepared yet"
        raise RuntimeError(message)
    stdout, stderr = _wire(launched, rank)
    replaced = [fd for fd, paths in ((1, logs.stdouts), (2, logs.stderrs)) if paths[rank]]
    affinity = context.options.affinities.get(rank)

    def give_up() -> None:
        if on_fork is not None:
            on_fork()
        for fd in launched.wiring.launcher_ends():
            os.close(fd)

    options = SpawnOptions(own_env, stdout=stdout, stderr=stderr, replaced=replaced, affinity=affinity, closed=closed)
    try:
        started = functions.start(rank, options, on_fork=give_up)
    finally:
        launched.wiring.started(rank)
    launched.started_functions[rank] = started
    pid = _note(context, launched, rank, started.pid)
    started.begin()
    return pid


def _launch_worker(
    context: AgentContext,
    launched: LaunchedWorkers,
    worker: Worker,
    env: dict[str, str],
    closed: list[int],
) -> int:
    spec, rank = context.group.spec, worker.local_rank
    stdout, stderr = _wire(launched, rank)
    affinity = context.options.affinities.get(rank)
    argv = _command(spec, rank)
    try:
        context.guardian.expect(stderr)
        pid = context.worker_pool and context.worker_pool.start_worker(rank, argv, env, stdout=stdout, stderr=stderr)
        if not pid:
            pid = start_process(
                argv,
                env,
                stdout=stdout,
                stderr=stderr,
                affinity=affinity,
                descriptor_limit=context.worker_limit,
                closed=closed,
                mask=context.mask,
            )
    finally:
        launched.wiring.started(rank)
    return _note(context, launched, rank, pid)


def _command(spec: WorkerSpec, rank: int) -> list[str]:
    """Return a worker's command with its own local rank in it."""
    words = [str(spec.entrypoint), *map(str, spec.args)]
    if not any("$" in word for word in words[1:]):
        return words
    from elastic_run.utils import macros  # noqa: PLC0415 - most commands name no local rank

    return [words[0], *macros.substitute(words[1:], str(rank))]


def _note(context: AgentContext, launched: LaunchedWorkers, rank: int, pid: int) -> int:
    """Tell the guardian and the record of the round of a new worker; return its pid."""
    launched.pids[rank] = pid
    launched.born[pid] = process_table.start_time(pid)
    context.guardian.watch(pid, launched.born[pid])
    context.limit_worker(pid)
    return pid


def _wire(launched: LaunchedWorkers, rank: int) -> tuple[int, int]:
    logs = launched.logs
    if logs is None:
        message = "the round's logs are not laid out yet"
        raise RuntimeError(message)
    return launched.wiring.open(
        rank,
        stdout=logs.stdouts[rank],
        stderr=logs.stderrs[rank],
        tee_stdout=_is_teed(logs.tee_stdouts, rank),
        tee_stderr=_is_teed(logs.tee_stderrs, rank),
    )


def _count_descriptors(logs: LogsDest, *, capture: bool) -> int:
    """Return how many this process holds for its workers: pidfds, pipes of streams that pass through, files of tees.

    Of a tee the file counts twice: it is read when the console has fallen behind (`Backlog`).
    """
    teed = sum(_is_teed(tees, rank) for tees in (logs.tee_stdouts, logs.tee_stderrs) for rank in logs.stdouts)
    streams = [logs.stderrs, logs.stdouts] if _is_any_stdout_teed(logs) else [logs.stderrs]
    captured = sum(not is_log(path) for paths in streams for path in paths.values()) if capture else 0
    return len(logs.stdouts) + captured + 3 * teed


def _is_any_stdout_teed(logs: LogsDest) -> bool:
    return any(_is_teed(logs.tee_stdouts, rank) for rank in logs.stdouts)


def _is_teed(tees: dict[int, str], rank: int) -> bool:
    return is_log(tees.get(rank, ""))
