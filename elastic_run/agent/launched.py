"""Starting the workers of a round: log files, descriptors, environment, exec, and nothing that can wait until they run.

Between the user's command and the first line of the last worker every import counts, so this file needs neither the
loop nor the console. What watches the workers and takes their output is imported while they start (`agent.round`).
"""

from __future__ import annotations

import os
import time

from elastic_run import contract
from elastic_run.agent.environment import worker_environment
from elastic_run.multiprocessing import processes
from elastic_run.multiprocessing.children import spawn
from elastic_run.multiprocessing.descriptors import inheritable_descriptors
from elastic_run.multiprocessing.output.wiring import Wiring
from elastic_run.utils import macros

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from elastic_run.agent.api import Worker
    from elastic_run.agent.surroundings import Surroundings
    from elastic_run.multiprocessing.logs import LogsDest


class LaunchedWorkers:
    """The workers of one round that were started, and that nobody watches yet.

    Args:
        capture: Whether the workers' stderr passes through the launcher.

    Attributes:
        started_at: Wall clock at the start, seconds since the epoch, for display.
        started: Monotonic seconds at the start.
        logs: Where their output goes, or None when that could not be laid out.
        wiring: Their streams.
        born: Start times in clock ticks, by pid; their keys are the processes.
        pids: Pids by local rank.
        error: Why not all of them were started, or None.
    """

    __slots__ = ("born", "error", "logs", "pids", "started", "started_at", "wiring")

    def __init__(self, *, capture: bool) -> None:
        self.started_at = time.time()
        self.started = time.monotonic()
        self.logs: LogsDest | None = None
        self.wiring = Wiring(capture=capture)
        self.pids: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.error: OSError | ValueError | None = None


def launch_workers(
    around: Surroundings, *, restart_count: int, use_agent_store: bool, mask: Iterable[int] | None = None
) -> LaunchedWorkers:
    """Start every worker of this node.

    Args:
        around: What the rounds of one agent share; its group has the round's ranks and master address.
        restart_count: Restarts so far.
        use_agent_store: Whether the agent serves the workers' store.
        mask: Signals that the workers begin with blocked, or None to inherit this thread's.

    Returns:
        The workers. When one can't be started, those before it, and the reason.
    """
    launched = LaunchedWorkers(capture=around.options.capture)
    try:
        _launch(around, launched, restart_count, use_agent_store=use_agent_store, mask=mask)
    except (OSError, ValueError) as error:
        launched.error = error
    return launched


def _launch(
    around: Surroundings,
    launched: LaunchedWorkers,
    restart_count: int,
    *,
    use_agent_store: bool,
    mask: Iterable[int] | None,
) -> None:
    group = around.group
    around.make_room()
    envs = {
        worker.local_rank: worker_environment(
            group,
            worker,
            os.environ,
            run_id=around.run_id,
            restart_count=restart_count,
            max_restarts=group.spec.max_restarts,
            use_agent_store=use_agent_store,
            signals=around.options.signals,
        )
        for worker in group.workers
    }
    launched.logs = around.logs_specs.reify(envs)
    around.announce_log_directory()
    closed = inheritable_descriptors()
    for worker in group.workers:
        worker.id = _launch_worker(around, launched, worker, envs[worker.local_rank], closed, mask)


def _launch_worker(
    around: Surroundings,
    launched: LaunchedWorkers,
    worker: Worker,
    own_env: dict[str, str],
    closed: list[int],
    mask: Iterable[int] | None,
) -> int:
    spec, rank = around.group.spec, worker.local_rank
    stdout, stderr = _wire(launched, rank)
    env = {**os.environ, **own_env, contract.ENV_TOKEN: around.inherited_token}
    env.pop(contract.ENV_RDZV_TOKEN, None)  # the agents' secret; a worker may print its environment
    argv = [str(spec.entrypoint), *macros.substitute([str(arg) for arg in spec.args], str(rank))]
    affinity = around.options.affinities.get(rank)
    try:
        pid = spawn(argv, env, stdout=stdout, stderr=stderr, affinity=affinity, closed=closed, mask=mask)
    finally:
        launched.wiring.started(rank)
    launched.pids[rank] = pid
    launched.born[pid] = processes.start_time(pid)
    around.guardian.watch(pid, launched.born[pid])
    around.limit_worker(pid)
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


def _is_teed(tees: dict[int, str], rank: int) -> bool:
    return tees.get(rank, os.devnull) not in ("", os.devnull)
