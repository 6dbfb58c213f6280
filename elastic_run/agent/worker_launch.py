"""Joins a round, and starts its workers: store, ranks, environment, log files, descriptors, exec.

Every import between the user's command and the first line of the last worker counts, so this module needs neither the
loop nor the console. Workers take longer to boot than the launcher takes to import, so `start_early` starts those of
the first round, by the same functions, before the launcher imports the supervisor. The modules that watch the workers
are imported while the workers boot; until then the workers' output waits in their pipes.
"""

from __future__ import annotations

import errno
import os
import time

from elastic_run import contract
from elastic_run.multiprocessing.logs import DefaultLogsSpecs, is_log
from elastic_run.multiprocessing.starter import WorkerStarter
from elastic_run.multiprocessing.wiring import STDOUT, Wiring, is_read_in_lines
from elastic_run.records import dataclass, field
from elastic_run.signals import signal_name
from elastic_run.store.worker_store import LOCALHOST, is_served_by_agent, open_worker_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.agent.api import WorkerGroup, WorkerSpec
    from elastic_run.agent.context import AgentContext
    from elastic_run.core.agent.messages import RoundFailed
    from elastic_run.multiprocessing.functions.launch import Functions
    from elastic_run.multiprocessing.logs import LogsDest
    from elastic_run.multiprocessing.starter import StartedWorker
    from elastic_run.store.worker_store import WorkerStore


class RoundJoin:
    """Joins round after round. A store's port is open, its address published, before it is served in the loop."""

    def __init__(self, context: AgentContext) -> None:
        #: The workers' store of this node; None before it is opened, or if the rendezvous takes none.
        self.store: WorkerStore | None = None
        self._old_store: WorkerStore | None = None
        self._context = context
        self._group = context.group
        self._is_served = False
        self._has_unknown_operation = False

    @property
    def is_immediate(self) -> bool:
        """Whether the rendezvous never waits for other nodes."""
        return bool(getattr(self._group.spec.rdzv_handler, "is_immediate", False))

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers' store is served for them, so that worker 0 does not serve it."""
        return self._group.spec.rdzv_handler.use_agent_store if self.store is None else self.store.use_agent_store

    def serve(self) -> None:
        """Serve the store of this round and of all later rounds; the agent has its loop now."""
        self._is_served = True
        if self.store is not None:
            self.store.serve(self._context.loop)

    def offer_store(self) -> None:
        """Open a fresh store for the next round, and give its address to the rendezvous."""
        offer = getattr(self._group.spec.rdzv_handler, "offer_worker_store", None)
        if offer is not None:
            store = self.renew_store()
            offer(store.host, store.port, use_agent_store=store.use_agent_store)

    def take_place(self) -> None:
        """Wait for the next round, and take this node's place in it; a foreign handler may raise anything."""
        group, spec = self._group, self._group.spec
        found = spec.rdzv_handler.next_rendezvous()
        group.store = found.store
        info = found.bootstrap_store_info
        if self.store is not None and info is not None:
            group.master_addr, group.master_port = info.master_addr, info.master_port
        else:
            group.master_addr = spec.master_addr or (info.master_addr if info is not None else None)
            group.master_port = spec.master_port or (info.master_port if info is not None else None)
        ranks = (0, spec.local_world_size, 0, spec.local_world_size)
        if found.world_size > 1:
            from elastic_run.agent.simple_elastic_agent import ask_for_ranks

            ranks = ask_for_ranks(found.store, found.rank, found.world_size, spec)
        assign_ranks(group, found.rank, found.world_size, ranks)

    def open_next_store(self, host: str) -> WorkerStore:
        """Open the next round's store beside this round's, which workers of other nodes may still need."""
        self.close_old_store()
        self._old_store, self.store = self.store, None
        return self.renew_store(host)

    def close_old_store(self) -> None:
        """End the last round's store: a new round was formed, and no worker uses the old store any more."""
        if self._old_store is not None:
            self._old_store.close()
            self._old_store = None

    def close(self) -> None:
        """Give the ports back."""
        self.close_old_store()
        if self.store is not None:
            self.store.close()

    def renew_store(self, host: str = LOCALHOST) -> WorkerStore:
        """Replace the store of the last round by a fresh one; an empty host means all interfaces."""
        if self.store is not None and not self._has_unknown_operation:
            self.store = self.store.renew()
            return self.store
        if self.store is not None:
            self.store.close()
        self.store = open_worker_store(
            by_agent=not self._has_unknown_operation
            and is_served_by_agent(self._context.options.agent_config.worker_store, os.environ),
            host=host,
            port=self._group.spec.master_port,
            on_refusal=self._say_refusal,
        )
        self._has_unknown_operation = False
        if self._is_served:
            self.store.serve(self._context.loop)
        return self.store

    def _say_refusal(self, kind: str, what: str) -> None:
        from elastic_run.store.errors import GARBAGE, UNKNOWN

        if kind == UNKNOWN:
            self._has_unknown_operation = True
            self._context.say(
                f"a worker's torch asked the store for what elastic-run doesn't know: {what}; "
                "the next round uses torch's own store, served by rank 0 (--worker-store=rank0 does at once)"
            )
        elif kind != GARBAGE:  # a port scanner is no news for the user
            self._context.say(f"the workers' store closed a connection: {what}")


def assign_ranks(group: WorkerGroup, group_rank: int, group_world_size: int, ranks: tuple[int, int, int, int]) -> None:
    """Give a group's workers their ranks; `ranks` are as `ask_for_ranks` returns them."""
    base_rank, world_size, role_rank, role_world_size = ranks
    group.group_rank, group.group_world_size = group_rank, group_world_size
    for worker in group.workers:
        worker.global_rank = base_rank + worker.local_rank
        worker.role_rank = role_rank + worker.local_rank
        worker.world_size, worker.role_world_size = world_size, role_world_size


# --- the start -------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class LaunchedWorkers:
    """The workers of one round that were started and are not watched yet, by local rank."""

    wiring: Wiring
    round_join: RoundJoin | None = None  # What has joined their round, if they were started early
    logs: LogsDest | None = None  # The files for their output, or None if they could not be opened
    functions: Functions | None = None  # The function that they run and its arguments, or None for a command
    fault_sockets: dict[int, str] = field(default_factory=dict)  # Names of the sockets for requests of --inject-fault
    workers: dict[int, StartedWorker] = field(default_factory=dict)
    error: Exception | None = None  # The reason why not all of them were started, or None
    is_of_plugin: bool = False  # Whether a plug-in has raised the error, which concerns no program of a worker
    started_at: float = field(default_factory=time.time)  # Wall clock, for display
    started: float = field(default_factory=time.monotonic)


def start_early(context: AgentContext) -> LaunchedWorkers | None:
    """Start the first round's workers if they need not wait; otherwise the supervisor does it."""
    round_join = RoundJoin(context)
    is_checked_first = bool(context.options.node_config.health_check)
    is_alone = round_join.is_immediate and context.options.is_whole_process
    has_plugin = type(context.logs_specs) is not DefaultLogsSpecs  # which may raise anything
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
    launched.round_join = round_join
    context.adopt_orphans()  # as early as possible: orphans of the workers' descendants go to another process before
    return launched


def launch_workers(
    context: AgentContext,
    *,
    restart_count: int,
    use_agent_store: bool,
    on_fork: Callable[[], None] = lambda: None,
) -> LaunchedWorkers:
    """Start every worker of this node; the context's group has the round's ranks and master address.

    If a worker can't be started, the workers before it are returned with the reason; a defect is raised if nothing was
    ever started. `on_fork` closes the launcher's descriptors in a forked worker.
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
        use_agent_store=use_agent_store,
        signals=context.options.signals,
        more=context.options.worker_variables,
    )
    starter = WorkerStarter(context.guardian, launched.wiring, affinities=context.options.affinities, mask=context.mask)
    if (function := group.spec.entrypoint) is not None and not isinstance(function, str):
        from elastic_run.multiprocessing.functions.launch import Functions
        from elastic_run.utils import macros

        args = {rank: macros.substitute(list(group.spec.args), str(rank)) for rank in envs}
        launched.functions = Functions(function, args, context.options.start_method)
    # From here to the guardian as little as can be: a launcher that is killed before leaves its temporary directory.
    starter.makes_directories = type(context.logs_specs) is DefaultLogsSpecs
    starter.logs = launched.logs = _lay_out_logs(context, envs, launched)
    context.announce_log_directory()
    context.make_room()
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
        from elastic_run.diagnosis.recorder import make_name

        # Python workers take requests for faults at these sockets (`diagnosis.fault_thread`).
        launched.fault_sockets = {rank: make_name("faults") for rank in envs}
        for rank, name in launched.fault_sockets.items():
            envs[rank][contract.ENV_FAULTS] = name
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
    """Ask the logs specs for the files; the loop waits for a plug-in's answer."""
    specs = context.logs_specs
    if type(specs) is DefaultLogsSpecs:
        return specs.lay_out(envs)
    from elastic_run.agent.plugin_calls import is_ours
    from elastic_run.multiprocessing.logs import check_logs

    try:
        logs = specs.reify(envs)
        check_logs(specs, logs, envs)
    except Exception:
        launched.is_of_plugin = not is_ours(specs.reify)  # else inherited
        raise
    return logs


def _command(spec: WorkerSpec, rank: int) -> list[str]:
    """Return a worker's command with its own local rank in it."""
    words = [str(spec.entrypoint), *map(str, spec.args)]
    if not any("$" in word for word in words[1:]):
        return words
    from elastic_run.utils import macros

    return [words[0], *macros.substitute(words[1:], str(rank))]


def _is_any_stdout_passed(logs: LogsDest) -> bool:
    """Whether the launcher itself writes the stdout of any worker; torch's class keeps no output."""
    return any(map(is_log, (*logs.tee_stdouts.values(), *getattr(logs, "kept_stdouts", {}).values())))


def worker_environments(
    group: WorkerGroup,
    parent: Mapping[str, str],
    *,
    run_id: str,
    restart_count: int,
    use_agent_store: bool,
    signals: Sequence[int],
    more: Mapping[str, str] | None = None,
) -> dict[int, dict[str, str]]:
    """Return the variables of each worker beside the launcher's own environment: torchrun's contract.

    Source: torch 2.13, LocalElasticAgent._start_workers. ValueError: more workers than devices for virtual local ranks.
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
        contract.ENV_MAX_RESTARTS: str(spec.max_restarts),
        contract.ENV_RUN_ID: run_id,
        contract.ENV_USE_AGENT_STORE: str(use_agent_store),
        # A launcher inside the worker takes them over.
        contract.ENV_SIGNALS_TO_HANDLE: ",".join(signal_name(number) for number in signals),
        contract.ENV_NCCL_ASYNC_ERROR_HANDLING: parent.get(contract.ENV_NCCL_ASYNC_ERROR_HANDLING, "1"),
    }
    if contract.ENV_KEPT_STATE in parent:
        shared[contract.ENV_KEPT_STATE] = ""  # a launcher inside a worker: its workers would share that one's memory
    shared.update(more or {})
    envs = {
        worker.local_rank: {
            **shared,
            contract.ENV_LOCAL_RANK: str(worker.local_rank),
            contract.ENV_RANK: str(worker.global_rank),
            contract.ENV_ROLE_RANK: str(worker.role_rank),
            contract.ENV_WORLD_SIZE: str(worker.world_size),
            contract.ENV_ROLE_WORLD_SIZE: str(worker.role_world_size),
        }
        for worker in group.workers
    }
    if spec.virtual_local_rank:
        from elastic_run.cluster.devices import virtual_device

        for rank, env in envs.items():
            env.update({contract.ENV_LOCAL_RANK: "0", **virtual_device(rank, parent)})
    return envs


def explain_failed_start(number: int, error: Exception, program: str) -> RoundFailed:
    """Return the event that says why a program could not be started, in words for the user."""
    from elastic_run.core.agent.messages import RoundFailed

    if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
        detail = f"{program} is not in a format that can be executed: a script needs a first line such as #!/bin/bash"
        return RoundFailed(number, verdict="not_executable", detail=detail)
    is_program = getattr(error, "filename", None) in (None, program)
    if isinstance(error, (FileNotFoundError, PermissionError)) and is_program:
        from elastic_run.files import find_program, name_denier

        path = find_program(program, os.environ)
        interpreter = _read_interpreter(path or program)
        if isinstance(error, PermissionError):
            named = [each for each in (path or program, interpreter) if os.path.dirname(each)]
            denier = next(filter(None, map(name_denier, named)), "")
            return RoundFailed(number, verdict="not_executable", detail=f"{program} may not be executed{denier}")
        # The system gives the same error for a missing script and for a missing interpreter.
        missing = "its interpreter or loader does not exist here"
        if path is None:
            missing = "no such program"
        elif interpreter and not os.path.exists(interpreter):
            missing = f"its first line names the interpreter {interpreter!r}, which does not exist"
        return RoundFailed(number, verdict="not_found", detail=f"{program}: {missing}")
    return RoundFailed(number, verdict="cannot_start", detail=f"{program} can't be started: {error}")


def _read_interpreter(path: str) -> str:
    """Return the interpreter in the first line of a script, as the kernel reads it; empty for other programs."""
    try:
        with open(path, "rb") as file:
            start = file.read(256)  # as much as the kernel looks at (BINPRM_BUF_SIZE)
    except OSError:
        return ""
    line = start.partition(b"\n")[0].replace(b"\t", b" ")
    return os.fsdecode(line[2:].strip(b" ").partition(b" ")[0]) if line.startswith(b"#!") else ""
