"""The driver of one agent: brings events to `core.supervision`, performs its commands, and tells the story at the end.

Rules
- Nothing is decided here. Every event goes through `_feed`, one at a time and in order.
- The loop's thread does all; a rendezvous that blocks (a foreign handler) waits in a thread of its own, so that a
  signal is answered at any moment.
- Signals need the main thread. Elsewhere the program we run in stops us through `SimpleElasticAgent._shutdown`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque

from elastic_run import contract
from elastic_run.agent.environment import assign_ranks
from elastic_run.agent.round import Round
from elastic_run.agent.stuck import StuckWatch
from elastic_run.agent.surroundings import Surroundings
from elastic_run.agent.verdict import exit_code, failure_of, is_disk_full, program_name, start_failed
from elastic_run.core import supervision
from elastic_run.loop import Loop
from elastic_run.multiprocessing import processes
from elastic_run.rendezvous.errors import RendezvousGracefulExitError, is_kind
from elastic_run.store.listener import PortTakenError
from elastic_run.store.worker_store import choose_worker_store, open_worker_store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.api import WorkerGroup
    from elastic_run.agent.surroundings import AgentOptions
    from elastic_run.core.rootcause import WorkerEnd
    from elastic_run.core.supervision import Command, Event
    from elastic_run.multiprocessing.logs import LogsSpecs
    from elastic_run.report import Attempt, Ending, OomKills
    from elastic_run.store.worker_store import WorkerStore

#: Seconds that the guardian gets to leave after the farewell.
_FAREWELL = 2.0


class Supervisor:
    """Runs the rounds of one agent to their end.

    Args:
        group: The workers; their ranks and states are kept up to date.
        logs_specs: Where output goes.
        options: What the user asked for.
        on_state: Called with `RENDEZVOUS` and its duration in milliseconds, and with `START`, in every round.
    """

    def __init__(
        self,
        group: WorkerGroup,
        logs_specs: LogsSpecs,
        options: AgentOptions,
        *,
        on_state: Callable[[str, float | None], None] = lambda *_: None,
    ) -> None:
        self._group = group
        self._on_state = on_state
        self._joined_at = 0.0
        self._options = options
        self._loop = Loop()
        self._around = Surroundings(group, logs_specs, options, self._loop)
        self._agent = supervision.Agent(
            policy=options.policy,
            local_world_size=group.spec.local_world_size,
            forwarded=frozenset(options.forwarded),
        )
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._is_closing = False
        self._round: Round | None = None
        self._store: WorkerStore | None = None
        self._stuck_watch: StuckWatch | None = None
        self._oom_kills: OomKills | None = None
        self._use_torch_store = False
        self._attempts: list[Attempt] = []
        self._ends: tuple[WorkerEnd, ...] = ()
        self._root: WorkerEnd | None = None
        self._survivors: tuple[tuple[int, str], ...] = ()
        self._finish: supervision.Finish | None = None
        self.console = self._around.console

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request_stop(self, number: int) -> None:
        """Stop as if this signal had come; may be called from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._feed(supervision.Signalled(number)))

    def run(self) -> Ending:
        """Run to the end.

        Returns:
            What happened, for the report.
        """
        self._watch_signals()
        self._start_guardian()
        self._agent, commands = supervision.begin(self._agent)
        self._perform_all(commands)
        self._loop.run_until(lambda: self._finish is not None)
        return self._conclude()

    def close(self) -> None:
        """Give back everything: store, guardian, temporary files, console, signal handlers."""
        self._is_closing = True
        if self._store is not None:
            self._store.close()
        cleanup = getattr(self._around.logs_specs, "cleanup", None)
        if cleanup is not None:
            cleanup()
        self._dismiss_guardian()
        self.console.flush(None)
        self.console.close()
        self._loop.close()

    # --- signals and the guardian ----------------------------------------------------------------------------------
    def _watch_signals(self) -> None:
        try:
            if self._options.is_whole_process:
                # Inherited as ignored it would make the kernel throw the workers' exit codes away.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._loop.watch_signals(
                (*self._options.signals, *self._options.forwarded),
                lambda number: self._feed(supervision.Signalled(number)),
            )
            self._loop.watch_signals((signal.SIGWINCH,), lambda _: self._resize())
            if os.getpid() == 1:
                self._loop.reap_strangers()
        except ValueError:
            # Not the main thread: the program we run in has the signals.
            pass

    def _resize(self) -> None:
        if self._round is not None:
            self._round.output.resize()

    def _start_guardian(self) -> None:
        self._loop.watch_exit(self._around.guardian.start(), lambda _: self._replace_guardian())

    def _replace_guardian(self) -> None:
        if not self._is_closing:
            self.console.say("the guardian process was killed; starting another")
            self._start_guardian()

    def _dismiss_guardian(self) -> None:
        guardian = self._around.guardian
        if self._finish is not None:
            guardian.dismiss()
        else:
            guardian.alarm()
        self._loop.run_until(lambda: processes.is_gone(guardian.pid), self._loop.now() + _FAREWELL)

    # --- events and commands ---------------------------------------------------------------------------------------
    def _feed(self, event: Event) -> None:
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                jitter = int.from_bytes(os.urandom(2), "big") / 65536
                before = self._agent
                self._agent, commands = supervision.decide(before, self._events.popleft(), self._loop.now(), jitter)
                self._tell(before, commands)
                self._perform_all(commands)
        finally:
            self._is_feeding = False

    def _perform_all(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        if isinstance(command, supervision.Join):
            self._join(command)
        elif isinstance(command, supervision.StartWorkers):
            self._start_workers(command)
        elif isinstance(command, supervision.StopWorkers):
            self._stop_workers(command)
        elif isinstance(command, supervision.Hurry) and self._round is not None:
            self._round.workers.hurry()
        elif isinstance(command, supervision.Forward) and self._round is not None:
            self._round.workers.forward(command.signal)
        elif isinstance(command, supervision.Pause):
            number = command.round
            self._loop.call_later(command.delay, lambda: self._feed(supervision.PauseOver(number)))
        elif isinstance(command, supervision.Finish):
            self._finish = command

    # --- joining ---------------------------------------------------------------------------------------------------
    def _join(self, command: supervision.Join) -> None:
        self._joined_at = self._loop.now()
        handler = self._group.spec.rdzv_handler
        offer = getattr(handler, "offer_worker_store", None)
        try:
            if offer is not None:
                self._store = self._open_store()
                offer(self._store.host, self._store.port, use_agent_store=self._store.use_agent_store)
        except PortTakenError as error:
            self._feed(supervision.RoundFailed(command.round, verdict="usage", detail=f"--master-port: {error}"))
            return
        except OSError as error:
            self._feed(supervision.RoundFailed(command.round, verdict="cannot_start", detail=str(error)))
            return
        if getattr(handler, "is_immediate", False):
            self._rendezvous(command.round)
        else:
            import threading  # noqa: PLC0415 - only for handlers that block

            threading.Thread(target=self._rendezvous, args=(command.round,), daemon=True).start()

    def _open_store(self) -> WorkerStore:
        if self._store is not None and not self._use_torch_store:
            return self._store.renew()
        spec = self._group.spec
        mode = choose_worker_store(self._options.worker_store, spec.local_world_size, os.environ)
        if self._use_torch_store and mode == "agent":
            mode = "torch"
        if self._store is not None:
            self._store.close()
            self._use_torch_store = False
        python = os.environ.get(contract.ENV_PYTHON_EXEC, sys.executable)
        return open_worker_store(
            mode,
            loop=self._loop,
            port=spec.master_port,
            python=python,
            env=os.environ,
            on_unknown_operation=self._on_unknown_operation,
            on_lost=self.console.say,
        )

    def _on_unknown_operation(self, operation: int) -> None:
        self._use_torch_store = True
        self.console.say(
            f"a worker's torch asked the store for operation {operation}, which elastic-run doesn't know; "
            "the next round uses torch's own store (--worker-store=torch does at once)"
        )

    def _rendezvous(self, number: int) -> None:
        """Ask the handler, in whatever thread this is, and bring the answer to the loop's thread."""
        event: Event
        try:
            self._take_place(self._group.spec.rdzv_handler.next_rendezvous())
            event = supervision.RoundFormed(number)
        except Exception as error:  # noqa: BLE001 - a plug-in's; torch's classes of errors are not ours
            is_exit = is_kind(error, RendezvousGracefulExitError)
            detail = str(error) if is_exit else f"{type(error).__name__}: {error}"
            event = supervision.RoundFailed(number, verdict="success" if is_exit else "rendezvous", detail=detail)
        self._loop.call_soon_threadsafe(lambda: self._feed(event))

    def _take_place(self, found: Any) -> None:  # noqa: ANN401 - a foreign handler's class
        group, spec = self._group, self._group.spec
        group.store = found.store
        info = found.bootstrap_store_info
        is_ours = self._store is not None
        group.master_addr = info.master_addr if is_ours else spec.master_addr or info.master_addr
        group.master_port = info.master_port if is_ours else spec.master_port or info.master_port
        assign_ranks(group, group_rank=found.rank, group_world_size=found.world_size)

    # --- the round's workers ---------------------------------------------------------------------------------------
    def _start_workers(self, command: supervision.StartWorkers) -> None:
        number = command.round
        handler = self._group.spec.rdzv_handler
        self._on_state("RENDEZVOUS", (self._loop.now() - self._joined_at) * 1000)
        self._round = Round(
            self._around,
            number=number,
            restart_count=self._agent.restart_count,
            use_agent_store=self._store.use_agent_store if self._store is not None else handler.use_agent_store,
            on_exit=lambda rank, code: self._feed(supervision.WorkerExited(number, local_rank=rank, exitcode=code)),
        )
        try:
            self._round.start()
        except (OSError, ValueError) as error:
            self._feed(start_failed(number, error, str(self._group.spec.entrypoint)))
        workers = self._round.workers
        if self._oom_kills is None:
            self._oom_kills = self._count_oom_kills()
        self._stuck_watch = StuckWatch(
            self._loop,
            self._options.stuck_timeout,
            pids=lambda: [workers.pids[rank] for rank in workers.alive],
            on_stuck=lambda _: self._feed(supervision.WorkerStuck(number)),
        )

    def _stop_workers(self, command: supervision.StopWorkers) -> None:
        if self._stuck_watch is not None:
            self._stuck_watch.close()
        if self._round is not None:
            self._round.workers.stop(command.signal, self._options.shutdown_timeout, self._on_gone)

    def _on_gone(self, survivors: list[int]) -> None:
        current = self._round
        if current is None:
            return
        self._survivors = tuple((pid, processes.wait_channel(pid)) for pid in survivors)
        self._ends = current.close()
        self._root = self._find_root_cause()
        failure = failure_of(self._root, current.uptime) if self._root is not None else None
        self._feed(supervision.GroupGone(current.number, failure=failure, is_unkillable=bool(survivors)))

    def _find_root_cause(self) -> WorkerEnd | None:
        if not self._ends:
            return None
        from elastic_run.core.rootcause import find_root_cause  # noqa: PLC0415 - only after a failure

        return find_root_cause(self._ends)

    def _count_oom_kills(self) -> OomKills:
        from elastic_run.report.memory import read_oom_kills  # noqa: PLC0415 - the workers start before it

        kills = read_oom_kills()
        return kills if self._oom_kills is None else kills.since(self._oom_kills)

    # --- telling ---------------------------------------------------------------------------------------------------
    def _tell(self, before: supervision.Agent, commands: tuple[Command, ...]) -> None:
        """Say in one line what changes while the job goes on; the end is told by the report."""
        size = self._group.spec.local_world_size
        after = self._agent
        if (after.restart_count, after.signal, after.is_hurried) == (
            before.restart_count,
            before.signal,
            before.is_hurried,
        ):
            return
        from elastic_run.report import lines  # noqa: PLC0415 - only when there is something to say

        if after.restart_count > before.restart_count and self._root is not None:
            self._remember_attempt()
            pause = next((command.delay for command in commands if isinstance(command, supervision.Pause)), 0.0)
            self.console.say(
                lines.restarting(self._root, size, after.restart_count, self._options.policy.max_restarts, pause)
            )
        elif after.signal is not None and before.signal is None and after.state == supervision.STOPPING:
            self.console.say(lines.stopping(after.signal, size, self._options.shutdown_timeout))
        elif after.is_hurried and not before.is_hurried:
            self.console.say(lines.hurrying())

    def _remember_attempt(self) -> None:
        from elastic_run.report import Attempt  # noqa: PLC0415

        if self._round is not None and self._root is not None:
            self._attempts.append(
                Attempt(
                    restart_count=self._round.restart_count,
                    root=self._root,
                    started_at=self._round.started_at,
                    uptime=self._round.uptime,
                )
            )

    def _conclude(self) -> Ending:
        from elastic_run.report import Ending  # noqa: PLC0415

        finish = self._finish or supervision.Finish("internal_error")
        spec = self._group.spec
        return Ending(
            verdict=finish.verdict,
            exit_code=exit_code(finish, self._root),
            entrypoint=program_name(spec.entrypoint, spec.args),
            role=spec.role,
            run_id=self._around.run_id,
            root=self._root,
            ends=self._ends,
            attempts=tuple(self._attempts),
            restarts_used=self._agent.restart_count,
            max_restarts=self._options.policy.max_restarts,
            log_dir=self._around.log_directory,
            detail=finish.detail,
            signal=finish.signal,
            world_size=self._group.workers[0].world_size,
            nnodes=self._group.group_world_size or 1,
            survivors=self._survivors,
            ended_at=time.time(),
            is_log_disk_full=is_disk_full(self._around.log_directory),
            oom_kills=self._count_oom_kills() if self._root is not None else None,
        )
