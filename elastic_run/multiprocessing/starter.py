"""Starts one worker: its streams, variables and CPUs, exec or function, and the message to the guardian.

The agent, `start_processes` and `spawn` start every worker through this module. On the way to the first worker it needs
neither the loop nor multiprocessing.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.files import make_directory
from elastic_run.multiprocessing.fork_exec import (
    SpawnOptions,
    inheritable_descriptors,
    inherited_environment,
    stack_variables,
    start_process,
    start_time,
)
from elastic_run.multiprocessing.logs import is_log
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elastic_run.multiprocessing.functions.launch import Functions, StartedFunction
    from elastic_run.multiprocessing.guardian import Guardian
    from elastic_run.multiprocessing.logs import LogsDest
    from elastic_run.multiprocessing.wiring import Wiring


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that runs, of which the guardian knows; its process leads a session."""

    pid: int
    #: Its start time in clock ticks.
    born: int
    #: None for a command.
    function: StartedFunction | None = None


@dataclass(slots=True)
class WorkerStarter:
    """Starts the workers of one round."""

    guardian: Guardian
    wiring: Wiring
    #: The files for their output; None for this process's own streams.
    logs: LogsDest | None = None
    #: Logical CPUs by local rank.
    affinities: Mapping[int, frozenset[int]] = field(default_factory=dict)
    #: Signals that are blocked when commands begin; None for the signals that this thread blocks.
    mask: frozenset[int] | None = None
    #: The commands' soft limit of descriptors, or None for this process's own.
    descriptor_limit: int | None = None
    #: Descriptors that the workers must not inherit, and variables that they do.
    closed: Sequence[int] = field(default_factory=inheritable_descriptors)
    inherited: Mapping[str, str] = field(default_factory=inherited_environment)
    #: Whether they can be asked for their stacks, through pipes of the wiring.
    has_stacks: bool = False
    #: Whether a worker's own directory, which has its error file, is made when it starts.
    makes_directories: bool = False

    def start_command(
        self,
        local_rank: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        take_fork: Callable[..., int | None] | None = None,
    ) -> StartedWorker:
        """Start a command, with variables in addition to the inherited ones.

        `take_fork` starts it as a fork of a template instead, where one waits; see `WorkerPool.start_worker`.
        """
        options = self._options(local_rank, env)
        try:
            kept = () if options.stacks < 0 else (options.stacks,)
            whole_env = {**self.inherited, **options.env, **stack_variables(options.stacks)}
            pid = take_fork and take_fork(local_rank, argv, whole_env, (options.stdout, options.stderr, *kept))
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
        return self._watch_session(pid)

    def start_function(
        self, functions: Functions, local_rank: int, env: Mapping[str, str], *, on_fork: Callable[[], None]
    ) -> StartedWorker:
        """Start a function's process; `StartedFunction.begin` lets it call the function.

        `on_fork` is called in a forked worker, and closes the launcher's descriptors there.
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
        return self._watch_session(started.pid, started)

    def _options(self, rank: int, env: Mapping[str, str]) -> SpawnOptions:
        own = {**env, contract.ENV_TOKEN: self.guardian.worker_token}
        if self.logs is None:
            return SpawnOptions(own, closed=self.closed)
        logs = self.logs
        if self.makes_directories and is_log(logs.error_files[rank]):
            make_directory(os.path.dirname(logs.error_files[rank]))
        stdout, stderr = self.wiring.open(rank, logs)
        replaced = [fd for fd, paths in ((1, logs.stdouts), (2, logs.stderrs)) if paths[rank]]
        stacks = self.wiring.open_stacks(rank) if self.has_stacks else -1
        return SpawnOptions(own, stdout, stderr, replaced, self.affinities.get(rank), self.closed, stacks)

    def _watch_session(self, pid: int, function: StartedFunction | None = None) -> StartedWorker:
        born = start_time(pid)
        self.guardian.watch(pid, born)
        return StartedWorker(pid, born, function)
