"""Starts one worker: its streams, variables and CPUs, exec or function, and the message to the guardian.

The agent, `start_processes` and `spawn` start every worker through this module. On the way to the first worker it needs
neither the loop nor multiprocessing.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.multiprocessing.output.log_directories import make_directory
from elastic_run.multiprocessing.output.wiring import is_log
from elastic_run.multiprocessing.process import process_table, stack_pipe
from elastic_run.multiprocessing.process.descriptors import inheritable_descriptors
from elastic_run.multiprocessing.process.fork_exec import inherited_environment, start_process
from elastic_run.multiprocessing.process.popen_tracer import apply_tracer
from elastic_run.multiprocessing.process.spawn_options import SpawnOptions
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.multiprocessing.functions.launch import Functions, StartedFunction
    from elastic_run.multiprocessing.output.logs import LogsDest
    from elastic_run.multiprocessing.output.wiring import Wiring
    from elastic_run.multiprocessing.process.guardian import Guardian


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that runs, of which the guardian knows.

    Args:
        pid: Its process, the leader of a session.
        born: Its start time in clock ticks.
        function: The description of a function worker, or None for a command.
    """

    pid: int
    born: int
    function: StartedFunction | None = None


@dataclass(slots=True)
class WorkerStarter:
    """Starts the workers of one round.

    Args:
        guardian: The guardian, which gets a message about each worker.
        wiring: Opens their streams.
        logs: The files for their output; None for this process's own streams.
        affinities: Logical CPUs by local rank.
        mask: Signals that are blocked when commands begin; None for the signals that this thread blocks.
        descriptor_limit: The commands' soft limit of descriptors, or None for this process's own.
        closed: Descriptors that the workers must not inherit.
        inherited: Variables that the workers inherit.
        has_stacks: Whether they can be asked for their stacks, through pipes of the wiring.
        makes_directories: Whether a worker's own directory, which has its error file, is made when it starts.
    """

    guardian: Guardian
    wiring: Wiring
    logs: LogsDest | None = None
    affinities: Mapping[int, frozenset[int]] = field(default_factory=dict)
    mask: frozenset[int] | None = None
    descriptor_limit: int | None = None
    closed: Sequence[int] = field(default_factory=inheritable_descriptors)
    inherited: Mapping[str, str] = field(default_factory=inherited_environment)
    has_stacks: bool = False
    makes_directories: bool = False

    def start_command(
        self,
        local_rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        take_fork: Callable[..., int | None] | None = None,
    ) -> StartedWorker:
        """Start a command.

        Args:
            local_rank: The worker's number on this node.
            argv: The program and its arguments.
            env: Variables in addition to the inherited ones.
            take_fork: Starts it as a fork of a template instead, where one waits; see `WorkerPool.start_worker`.

        Raises:
            OSError: The program can't be executed, or the system refuses a process or a descriptor.
        """
        options = self._options(local_rank, env)
        try:
            kept = () if options.stacks < 0 else (options.stacks,)
            argv, whole_env = apply_tracer(
                argv, {**self.inherited, **options.env, **stack_pipe.variables(options.stacks)}
            )
            streams = (options.stdout, options.stderr, *kept)
            pid = take_fork and take_fork(local_rank, argv, whole_env, streams)
            if not pid:
                pid = start_process(
                    argv,
                    whole_env,
                    stdout=options.stdout,
                    stderr=options.stderr,
                    affinity=options.affinity,
                    descriptor_limit=self.descriptor_limit,
                    closed=options.closed,
                    kept=kept,
                    mask=self.mask,
                )
        finally:
            self.wiring.started(local_rank)
        return self._tell_guardian(pid)

    def start_function(
        self, functions: Functions, local_rank: int, env: Mapping[str, str], *, on_fork: Callable[[], None]
    ) -> StartedWorker:
        """Start a function's process; `StartedFunction.begin` lets it call the function.

        Args:
            functions: The function and its arguments.
            local_rank: The worker's number on this node.
            env: Variables in addition to the inherited ones.
            on_fork: Called in a forked worker; closes the launcher's descriptors there.

        Raises:
            OSError: The system refuses a process or a descriptor.
        """
        options = self._options(local_rank, env)

        def give_up() -> None:
            on_fork()
            for fd in self.wiring.launcher_ends():
                os.close(fd)

        try:
            started = functions.start(local_rank, options, on_fork=give_up)
        finally:
            self.wiring.started(local_rank)
        return self._tell_guardian(started.pid, started)

    def _options(self, rank: int, env: Mapping[str, str]) -> SpawnOptions:
        own = {**env, contract.ENV_TOKEN: self.guardian.worker_token}
        if self.logs is None:
            return SpawnOptions(own, closed=self.closed)
        logs = self.logs
        if self.makes_directories and is_log(logs.error_files[rank]):
            make_directory(os.path.dirname(logs.error_files[rank]))
        stdout, stderr = self.wiring.open(
            rank,
            stdout=logs.stdouts[rank],
            stderr=logs.stderrs[rank],
            tee_stdout=is_log(logs.tee_stdouts.get(rank, "")),
            tee_stderr=is_log(logs.tee_stderrs.get(rank, "")),
            kept_stdout=_kept(logs, "kept_stdouts", rank),
            kept_stderr=_kept(logs, "kept_stderrs", rank),
        )
        replaced = [fd for fd, paths in ((1, logs.stdouts), (2, logs.stderrs)) if paths[rank]]
        stacks = self.wiring.open_stacks(rank) if self.has_stacks else -1
        return SpawnOptions(own, stdout, stderr, replaced, self.affinities.get(rank), self.closed, stacks)

    def _tell_guardian(self, pid: int, function: StartedFunction | None = None) -> StartedWorker:
        born = process_table.start_time(pid)
        self.guardian.watch(pid, born)
        return StartedWorker(pid, born, function)


def _kept(logs: LogsDest, name: str, rank: int) -> str:
    """Return a path of a field that torch's class, whose instances plug-ins return, doesn't have."""
    path: str = getattr(logs, name, {}).get(rank, "")
    return path
