"""The driver of one agent: brings events to `core.supervision` and performs its commands.

Rules
- Nothing is decided here. Every event goes through `_feed`, one at a time and in order.
- The loop's thread does all; a rendezvous that blocks (a foreign handler) waits in a thread of its own, so that a
  signal is answered at any moment.
- Signals need the main thread. Elsewhere the program we run in stops us through `SimpleElasticAgent._shutdown`.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import deque

from elastic_run.agent.guard import Guard
from elastic_run.agent.joining import Joining
from elastic_run.agent.launched import launch_workers
from elastic_run.agent.round import Round
from elastic_run.core import supervision
from elastic_run.core.shutdown import KILL_PATIENCE
from elastic_run.loop import Loop
from elastic_run.multiprocessing.descriptors import ensure_standard_descriptors
from elastic_run.multiprocessing.output.console import Console
from elastic_run.rendezvous.errors import RendezvousGracefulExitError, is_kind
from elastic_run.store.listener import PortTakenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.head_start import HeadStart
    from elastic_run.agent.job import Job
    from elastic_run.agent.launched import LaunchedWorkers
    from elastic_run.agent.newcomers import NewcomerWatch
    from elastic_run.agent.story import Story
    from elastic_run.agent.stuck import StuckWatch
    from elastic_run.agent.surroundings import Surroundings
    from elastic_run.core.policy import Failure
    from elastic_run.core.supervision import Command, Event
    from elastic_run.report import Ending

#: Seconds that are long for a reader of the output, or for the loop, and short for a person.
_MOMENT = 2.0
#: Seconds after which workers are past their own start, or fail for a reason that needs no hurry.
_SETTLED = 1.0


class Supervisor:
    """Runs the rounds of one agent to their end.

    Args:
        around: The workers and what the user asked for; the group's ranks and states are kept up to date.
        head_start: The first round, if its workers were started already.
        on_state: Called with `RENDEZVOUS` and its duration in milliseconds, and with `START`, in every round.
    """

    def __init__(
        self,
        around: Surroundings,
        head_start: HeadStart | None = None,
        *,
        on_state: Callable[[str, float | None], None] = lambda *_: None,
    ) -> None:
        self._around = around
        self._group = around.group
        self._options = around.options
        self._on_state = on_state
        self._joined_at = 0.0
        # Before anything is opened: a closed standard descriptor's number would go to the first file.
        ensure_standard_descriptors()
        self._loop = Loop()
        self.console = Console(self._loop)
        self._head_start = head_start
        self._launched = None if head_start is None else head_start.launched
        self._joining = Joining(self._group, self._options.worker_store) if head_start is None else head_start.joining
        self._joining.serve(self._loop, self.console.say)
        self._guard = Guard(self._loop, around.guardian, say=self.console.say)
        self._signals_seen = 0
        self._job = self._find_job()
        self._agent = supervision.Agent(
            policy=self._options.policy,
            local_world_size=self._group.spec.local_world_size,
            forwarded=frozenset(self._options.forwarded),
            follows_job=self._job is not None,
        )
        self._failure: Failure | None = None
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._is_closing = False
        self._is_reaping = False
        self._round: Round | None = None
        self._stuck_watch: StuckWatch | None = None
        self._newcomer_watch: NewcomerWatch | None = None
        self._told_story: Story | None = None
        self._finish: supervision.Finish | None = None

    def _find_job(self) -> Job | None:
        """Return the job of several nodes, where the rendezvous knows one; a foreign handler has rounds only."""
        if not hasattr(self._group.spec.rdzv_handler, "open_session"):
            return None
        from elastic_run.agent.job import Job  # noqa: PLC0415 - one node needs none of it

        return Job(self._group, self._options, self._joining, loop=self._loop, feed=self._feed, say=self.console.say)

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
        if self._head_start is not None:
            self._head_start.release_signals()
        try:
            self._guard.start()
        except OSError as error:
            detail = f"the guardian process can't be started: {error.strerror}"
            self._finish = supervision.Finish("cannot_start", detail=detail)
            return self._conclude()
        try:
            self._agent, commands = supervision.begin(self._agent)
            self._perform_all(commands)
            self._loop.run_until(self._is_finished)
        except BaseException as error:
            # A defect, or Ctrl-C in a program that has kept SIGINT to itself: the workers get their grace all the same.
            self._stop_after(error)
            raise
        return self._conclude()

    def _conclude(self) -> Ending:
        if self._job is not None and self._job.ended is not None:
            self._story.add_verdict(self._job.ended)
        return self._story.conclude(self._finish or supervision.Finish("internal_error"), self._agent)

    def _is_finished(self) -> bool:
        return self._finish is not None

    def _stop_after(self, error: BaseException) -> None:
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        self._feed(supervision.Signalled(number))
        patience = self._options.shutdown_timeout + KILL_PATIENCE + _MOMENT
        self._loop.run_until(self._is_finished, self._loop.now() + patience)

    def close(self) -> None:
        """Give back everything: store, temporary files, guardian, console, signal handlers."""
        self._is_closing = True
        try:
            if self._job is not None:
                before = self._signals_seen
                self._job.close(self._options.exit_barrier_timeout, is_hurried=lambda: self._signals_seen > before)
            self._joining.close()
            self._around.clean_up()
        finally:
            try:
                self._guard.close(is_clean=self._is_finished())
                self._flush()
                if self._options.is_whole_process:
                    # The exit code is known; a signal that comes now must not replace it.
                    self._loop.ignore_signals()
            finally:
                self.console.close()
                self._loop.close()

    def _flush(self) -> None:
        """Wait for a slow reader of the output, but not after a stop signal, nor when one comes while waiting."""
        signals_before = self._signals_seen
        is_stopped = self._finish is not None and self._finish.signal is not None
        self._loop.run_until(
            lambda: self.console.is_idle or self._signals_seen > signals_before,
            self._loop.now() + _MOMENT if is_stopped else None,
        )

    # --- signals -----------------------------------------------------------------------------------------------------
    def _watch_signals(self) -> None:
        try:
            self._loop.watch_signals((*self._options.signals, *self._options.forwarded), self._on_signal)
            self._loop.watch_signals((signal.SIGWINCH,), lambda _: self._resize())
            if self._options.is_whole_process:
                # Inherited as ignored it would make the kernel throw the workers' exit codes away.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except ValueError:
            # Not the main thread: the program we run in has the signals.
            pass

    def _on_signal(self, number: int) -> None:
        self._signals_seen += 1
        self._feed(supervision.Signalled(number))

    def _resize(self) -> None:
        if self._round is not None:
            self._round.output.resize()

    # --- events and commands ---------------------------------------------------------------------------------------
    def _feed(self, event: Event) -> None:
        self._events.append(event)
        if self._is_feeding or self._is_closing:
            return
        self._is_feeding = True
        try:
            while self._events:
                jitter = int.from_bytes(os.urandom(2), "big") / 65536
                before = self._agent
                self._agent, commands = supervision.decide(before, self._events.popleft(), self._loop.now(), jitter)
                if supervision.has_news(before, self._agent):
                    self._story.tell(before, self._agent, commands)
                self._perform_all(commands)
        finally:
            self._is_feeding = False

    @property
    def _story(self) -> Story:
        """The story, which no worker waits for: its modules are imported after the first of them was started."""
        if self._told_story is None:
            from elastic_run.agent.story import Story  # noqa: PLC0415

            self._told_story = Story(self._around, self.console.say)
        return self._told_story

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
        elif isinstance(command, supervision.Forward):
            self._forward(command.signal)
        elif isinstance(command, supervision.Pause):
            number = command.round
            self._loop.call_later(command.delay, lambda: self._feed(supervision.PauseOver(number)))
        elif isinstance(command, supervision.Finish):
            self._finish = command
        elif self._job is not None:
            self._tell_job(self._job, command)

    def _forward(self, number: int) -> None:
        if self._round is not None:
            self._round.workers.forward(number)

    def _tell_job(self, job: Job, command: Command) -> None:
        if isinstance(command, supervision.ReportFailing):
            job.report_failing()
        elif isinstance(command, supervision.Leave):
            job.leave(command.reason)
        elif isinstance(command, supervision.ReportReady):
            try:
                job.report_ready(command, self._story.write_report(self._failure))
            except OSError as error:
                self._feed(supervision.JobOver(supervision.Finish("cannot_start", detail=str(error))))
        elif isinstance(command, supervision.Warn) and self._options.scale_up_signal:
            self._forward(self._options.scale_up_signal)

    # --- joining ---------------------------------------------------------------------------------------------------
    def _join(self, command: supervision.Join) -> None:
        self._joined_at = self._loop.now()
        if self._launched is not None:
            self._feed(supervision.RoundFormed(command.round))
            return
        try:
            if self._job is not None:
                self._job.join()
                self._job.entrust_farewell(self._around.guardian)
                return
            self._joining.offer_store()
        except PortTakenError as error:
            self._feed(supervision.RoundFailed(command.round, verdict="usage", detail=f"--master-port: {error}"))
            return
        except OSError as error:
            self._feed(supervision.RoundFailed(command.round, verdict="cannot_start", detail=str(error)))
            return
        if self._joining.is_immediate:
            self._rendezvous(command.round)
        else:
            import threading  # noqa: PLC0415 - only for handlers that block

            threading.Thread(target=self._rendezvous, args=(command.round,), daemon=True).start()

    def _rendezvous(self, number: int) -> None:
        """Ask the handler, in whatever thread this is, and bring the answer to the loop's thread."""
        event: Event
        try:
            self._joining.take_place()
            event = supervision.RoundFormed(number)
        except Exception as error:  # noqa: BLE001 - a plug-in's; torch's classes of errors are not ours
            is_exit = is_kind(error, RendezvousGracefulExitError)
            detail = str(error) if is_exit else f"{type(error).__name__}: {error}"
            event = supervision.RoundFailed(number, verdict="success" if is_exit else "rendezvous", detail=detail)
        self._loop.call_soon_threadsafe(lambda: self._feed(event))

    # --- the round's workers ---------------------------------------------------------------------------------------
    def _start_workers(self, command: supervision.StartWorkers) -> None:
        number = command.round
        self._on_state("RENDEZVOUS", (self._loop.now() - self._joined_at) * 1000)
        self._round = Round(
            self._around,
            self._take_launched() or self._launch(),
            loop=self._loop,
            console=self.console,
            number=number,
            restart_count=self._agent.restart_count,
            on_exit=lambda rank, code: self._feed(supervision.WorkerExited(number, local_rank=rank, exitcode=code)),
        )
        try:
            self._round.watch()
        except (OSError, ValueError) as error:
            from elastic_run.agent.verdict import start_failed  # noqa: PLC0415 - only after a failure

            self._feed(start_failed(number, error, str(self._group.spec.entrypoint)))
        else:
            self._on_state("START", None)
        if self._options.is_whole_process:
            self._begin_to_reap()
            gc.enable()
        # Now the workers need the processors. What makes a failure's answer quicker waits until they are up.
        self._loop.call_later(_SETTLED, self._prepare_for_failure)
        if self._options.stuck_timeout > 0:
            self._watch_stuck(self._round)
        if self._job is None and not self._joining.is_immediate:
            self._watch_newcomers(number)

    def _begin_to_reap(self) -> None:
        """As PID 1, collect orphans; only now, when it is known which children are the first round's workers."""
        if os.getpid() == 1 and not self._is_reaping:
            self._is_reaping = True
            self._loop.reap_strangers()

    def _take_launched(self) -> LaunchedWorkers | None:
        launched, self._launched = self._launched, None
        return launched

    def _launch(self) -> LaunchedWorkers:
        use_agent_store = self._joining.use_agent_store if self._job is None else self._job.use_agent_store
        return launch_workers(self._around, restart_count=self._agent.restart_count, use_agent_store=use_agent_store)

    def _prepare_for_failure(self) -> None:
        if self._finish is None:
            self._story.prepare()

    def _watch_stuck(self, current: Round) -> None:
        from elastic_run.agent.stuck import StuckWatch  # noqa: PLC0415 - only where the user asks for it

        workers = current.workers
        self._stuck_watch = StuckWatch(
            self._loop,
            self._options.stuck_timeout,
            pids=lambda: [workers.pids[rank] for rank in workers.alive],
            on_stuck=lambda _: self._feed(supervision.WorkerStuck(current.number)),
        )

    def _watch_newcomers(self, number: int) -> None:
        from elastic_run.agent.newcomers import NewcomerWatch  # noqa: PLC0415 - only with a foreign rendezvous

        spec = self._group.spec
        self._newcomer_watch = NewcomerWatch(
            self._loop,
            spec.rdzv_handler,
            spec.monitor_interval,
            lambda: self._feed(supervision.RoundHalted(number)),
        )

    def _stop_workers(self, command: supervision.StopWorkers) -> None:
        for watch in (self._stuck_watch, self._newcomer_watch):
            if watch is not None:
                watch.close()
        if self._round is not None:
            self._round.workers.stop(command.signal, self._options.shutdown_timeout, self._on_gone)

    def _on_gone(self, survivors: list[int]) -> None:
        current = self._round
        if current is None:
            return
        self._failure = self._story.add_round(current, survivors)
        self._feed(supervision.GroupGone(current.number, failure=self._failure, is_unkillable=bool(survivors)))
