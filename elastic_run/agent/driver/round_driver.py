"""An agent's rounds, one after another: joins them, starts and stops their workers, reports how they ended.

It performs the commands of the machine that concern a round. Nothing is decided here.
"""

from __future__ import annotations

import gc
import os

from elastic_run.agent.driver.round import Round
from elastic_run.agent.driver.watches import Watches
from elastic_run.agent.worker_launch import explain_failed_start, launch_workers
from elastic_run.core.agent import machine, messages
from elastic_run.core.job.restart_policy import CAUSE_WAIT, FAILED, STOPPED
from elastic_run.multiprocessing.fork_exec import can_ask_for_stacks
from elastic_run.rendezvous.api import RendezvousGracefulExitError, is_kind
from elastic_run.signals import SIGTERM, restore_signals
from elastic_run.store.worker_store import PortTakenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver import AgentParts
    from elastic_run.agent.driver.flight_recorder import RecorderQuestion
    from elastic_run.agent.driver.round_waits import CheckProcess
    from elastic_run.agent.worker_launch import LaunchedWorkers, RoundJoin
    from elastic_run.core.failure.stacks import Dump
    from elastic_run.core.job.restart_policy import Failure
    from elastic_run.multiprocessing.workers import Workers

#: Seconds in which only the workers' first lines count: programs that are quick to start have written some by then.
_FIRST_LINES = 0.05
#: Seconds after which workers are past their own start, or fail for a reason that needs no hurry.
_SETTLED = 1.0
#: Seconds that workers get to write their stacks before SIGKILL, which must not come late, and before a stop.
_WAIT_BEFORE_KILL = 0.4
_WAIT_BEFORE_STOP = 0.4
#: Seconds in which a second SIGQUIT stops the job, and that workers get to write their stacks for a user who waits.
_TWICE = 2.0
_STACKS_WAIT = 3.0


class RoundDriver:
    """Drives the rounds of one agent; `launched` are the first round's workers, if they were started already.

    Processes that workers with exit code 0 left running in the background live on once the whole job has succeeded.
    Until then, in a job of several nodes, the round may still fail on another node. In that case they end before the
    next round begins, and before the launcher ends; `on_background_ended` is called then.
    """

    def __init__(
        self,
        context: AgentParts,
        round_join: RoundJoin,
        launched: LaunchedWorkers | None,
        *,
        on_background_ended: Callable[[], None],
    ) -> None:
        self.start_error: Exception | None = None  # For which the program could not be started
        self.handler_error: Exception | None = None  # Of a foreign rendezvous handler
        self.check: CheckProcess | None = None  # The last health check
        self.watches = Watches(context)
        self._failure: Failure | None = None
        self._context = context
        self._options = context.options
        self._loop = context.loop
        self._feed = context.feed
        self._round_join = round_join
        self._launched = launched
        self._on_background_ended = on_background_ended
        #: The workers of a round that left background processes, and those of which they are being stopped.
        self._background: Workers | None = None
        self._ending_background: Workers | None = None
        self._joined_at = 0.0
        self._stopped_at = 0.0
        self._quit_at: float | None = None  # When SIGQUIT came last
        self._collection: RecorderQuestion | None = None
        self._is_observing = False
        self._is_reaping = False

    # --- the way into a round --------------------------------------------------------------------------------------
    def join(self, command: messages.Join) -> None:
        """Join a round when the health check has passed; an event tells when it is formed, or that it can't be."""
        is_joined = self._launched is not None  # by `worker_launch.start_early`
        self._check_first(command.round, lambda: self._join(command.round, is_joined=is_joined))

    def _check_first(self, number: int, go_on: Callable[[], None]) -> None:
        if not self._options.node_config.health_check:
            go_on()
            return
        from elastic_run.agent.driver.round_waits import check_health

        def conclude(reason: str) -> None:
            if reason:
                self._feed(messages.RoundFailed(number, verdict="unhealthy", detail=reason))
            else:
                go_on()

        self.check = check_health(self._context, conclude)

    def _join(self, number: int, *, is_joined: bool) -> None:
        self._joined_at = self._loop.now()
        if is_joined:
            self._feed(messages.RoundFormed(number))
            return
        try:
            if self._context.job is not None:
                self._context.job.join()
                return
            self._round_join.offer_store()
        except (ValueError, OSError) as error:
            verdict, detail = "usage" if isinstance(error, (PortTakenError, ValueError)) else "cannot_start", str(error)
            if isinstance(error, PortTakenError):
                detail = f"--master-port: {error}"
                if self._context.group.spec.rdzv_handler.get_backend() == "static":
                    detail = (
                        f"--master-port: {error.fact}: choose another port, the same on all nodes; if that process is "
                        "another node of this job, give this node another --node-rank"
                    )
            self._feed(messages.RoundFailed(number, verdict=verdict, detail=detail))
            return
        if self._round_join.is_immediate:
            self._ask_handler(number)
        else:
            import threading

            # A handler that blocks waits in a thread of its own, so that the agent answers a signal at any moment.
            threading.Thread(target=self._ask_handler, args=(number,), daemon=True).start()

    def _ask_handler(self, number: int) -> None:
        """Ask the handler for a place, in any thread, and bring the answer to the loop's thread."""
        event: messages.Event
        if not self._round_join.is_immediate and self._context.mask is not None:
            # A process that a plug-in starts here must not begin with signals blocked.
            restore_signals(self._context.mask)
        try:
            self._round_join.take_place()
            event = messages.RoundFormed(number)
        except Exception as error:  # noqa: BLE001 - a plug-in's error; torch's classes of errors are not ours
            from elastic_run.utils import describe_exception

            self.handler_error = error
            is_exit = is_kind(error, RendezvousGracefulExitError)
            detail = str(error) if is_exit else describe_exception(error)
            event = messages.RoundFailed(number, verdict="success" if is_exit else "rendezvous", detail=detail)
        self._loop.call_soon_threadsafe(lambda: self._feed(event))

    # --- the start -------------------------------------------------------------------------------------------------
    def start(self, command: messages.StartWorkers) -> None:
        """Start the workers of a round that was formed, unless they were started, and watch them."""
        on_step = self._context.on_step
        on_step("RENDEZVOUS", (self._loop.now() - self._joined_at) * 1000)
        # The rendezvous has brought the ranks of all nodes with it.
        on_step("ASSIGN_WORKER_RANKS", 0.0)
        launched, self._launched = self._launched or self._launch(), None
        current = self._context.current = self._make_round(command.round, launched)
        try:
            current.watch()
        except (OSError, ValueError) as error:
            if launched.is_of_plugin:
                raise
            self.start_error = error
            spec = self._context.group.spec
            program = spec.entrypoint if isinstance(spec.entrypoint, str) else spec.get_entrypoint_name()
            self._feed(explain_failed_start(command.round, error, program))
        else:
            on_step("START", 0.0)
            if self._options.faults:
                from elastic_run.agent.driver.fault_injection import inject_faults

                inject_faults(self._context, current)
            self._context.events.workers_started(current)
        if self._is_observing or self._context.job is not None:
            self._begin_to_observe()
        else:
            self._loop.call_later(_FIRST_LINES, self._begin_to_observe)
        current.output.resize()  # the window may have changed since the workers' terminals got its size
        if self._options.is_whole_process:
            self._context.adopt_orphans()
            self._begin_to_reap()
        # Now the workers need the processors. Preparations for a quick answer to a failure wait until they are up.
        self._loop.call_later(_SETTLED, self._prepare_for_failure)
        self.watches.begin(current)

    def _make_round(self, number: int, launched: LaunchedWorkers) -> Round:
        events = self._context.events

        def on_output(local_rank: int, silence: float | None) -> None:
            self.watches.add_output(local_rank)
            events.output_came(current, local_rank, silence)

        current = Round(
            self._context,
            launched,
            number=number,
            on_exit=lambda local_rank, exitcode: events.worker_exited(current, local_rank, exitcode),
            on_output=on_output,
            on_overdue=lambda: self._ask_overdue(current),
            on_uncaught=lambda local_rank: self.watches.add_failed(current, local_rank),
        )
        return current

    def _launch(self) -> LaunchedWorkers:
        def give_up() -> None:
            """In a forked worker: close the launcher's descriptors."""
            self._loop.abandon()
            self._context.guardian.abandon()

        source = self._context.job or self._round_join
        count = self._context.agent.restart_count
        return launch_workers(
            self._context, restart_count=count, use_agent_store=source.use_agent_store, on_fork=give_up
        )

    def _begin_to_observe(self) -> None:
        """Begin with what takes milliseconds: the first lines of the first workers would have to wait for it."""
        self._is_observing = True
        self._context.history.begin()
        self._context.events.begin()
        if self._options.is_whole_process:
            gc.enable()

    def _begin_to_reap(self) -> None:
        """Collect orphans from now on, when it is known which children are the first round's workers."""
        if self._is_reaping:
            return
        self._is_reaping = True
        if os.getpid() == 1 or self._context.worker_pool is not None:
            self._loop.reap_strangers()
        elif self._context.adopt_orphans():
            self._loop.reap_strangers(own_session=os.getsid(0))

    def _prepare_for_failure(self) -> None:
        """Import what the end or a restart of the job needs; see `History.prepare`."""
        if self._context.agent.state != machine.ENDED:
            self._context.history.prepare()
            if self._context.current is not None:
                self._context.current.listen_for_stacks()

    # --- the workers' stacks on SIGQUIT (Ctrl-\) --------------------------------------------------------------------
    def show_stacks(self) -> bool:
        """Show the stacks; return False if the signal has to stop the job: at a second SIGQUIT soon after the first."""
        now, before = self._loop.now(), self._quit_at
        self._quit_at = now
        if not can_ask_for_stacks() or (before is not None and now - before < _TWICE):
            return False
        current, state = self._context.current, self._context.agent.state
        if current is not None and current.workers.alive:
            current.ask_stacks(_STACKS_WAIT, lambda dumps: self._tell_stacks(current, dumps))
            return True
        if state not in (machine.JOINING, machine.PAUSING):
            return False
        from elastic_run.report.stack_lines import no_workers

        self._context.say(no_workers(state, _TWICE))
        return True

    def _tell_stacks(self, current: Round, dumps: dict[int, Dump]) -> None:
        from elastic_run.agent.driver.worker_readings import add_silences
        from elastic_run.report.stack_lines import closing, details, summary

        dumps = add_silences(dumps, current, self._loop.now())
        path = current.write_stacks(dumps)
        goes_on = self._context.agent.state != machine.STOPPING
        shown = () if path else details(dumps)
        for line in (summary(dumps), *shown, closing(path, _TWICE if goes_on else None)):
            self._context.say(line)

    # --- the stop --------------------------------------------------------------------------------------------------
    def await_cause(self, command: messages.AwaitCause) -> None:
        """Wait for the cause of a lost peer; ask the workers that run on for their stacks: one of them may be stuck."""
        from elastic_run.report import lines

        self._context.say(lines.awaiting_cause(command.delay))

        def ask_before_stop() -> None:
            current = self._context.current
            if current is not None and self._context.is_running(command.round) and can_ask_for_stacks():
                current.ask_stacks(_WAIT_BEFORE_STOP, self._context.history.keep_before_stop)

        # Not before: the signal lets `signal.pause` return, and a worker that tells the cause needs no question.
        self._loop.call_later(max(0.0, command.delay - _WAIT_BEFORE_STOP), ask_before_stop)
        self._loop.call_later(command.delay, lambda: self._feed(messages.WaitOver(command.round)))

    def stop(self, command: messages.StopWorkers) -> None:
        """Stop the workers, or leave their background processes alone after a success."""
        agent, current = self._context.agent, self._context.current
        self.watches.end_round()
        if current is not None:
            is_success = agent.stop_reason == machine.AFTER_SUCCESS
            if is_success and not self._options.agent_config.kill_background_processes:
                current.workers.release(self._on_released)
            else:
                self._stop_workers(current, command.signal, has_dumps=not is_success)
        if self._context.worker_pool is not None and machine.may_start_again(agent):
            self._context.worker_pool.prepare()

    def _stop_workers(self, current: Round, number: int, *, has_dumps: bool) -> None:
        """Stop the workers, after the living ones have written the dumps of their flight recorders."""
        self._stopped_at = self._loop.now()
        recorder = self._context.flight_recorder
        if self._context.agent.stop_reason == machine.AFTER_SIGNAL:
            current.keep_last_words()

        def stop() -> None:
            self._collection = None
            current.workers.stop(number, self._options.shutdown_timeout, self._on_gone)

        if recorder is None or not has_dumps:
            stop()
        else:
            self._collection = recorder.collect(self._loop, stop)

    def _ask_overdue(self, current: Round) -> None:
        """Show the stacks of workers that did not stop, before the end of their grace period."""

        def show(dumps: dict[int, Dump]) -> None:
            from elastic_run.report.stack_lines import overdue

            if dumps:
                self._context.history.overdue = dumps
                self._context.say(overdue(dumps, current.write_stacks(dumps)))

        if can_ask_for_stacks():
            current.ask_stacks(_WAIT_BEFORE_KILL, show)

    def hurry(self) -> None:
        """Wait for nothing more: kill the workers that are being stopped."""
        if self._collection is not None:
            self._collection.finish()
        if self._context.current is not None:
            self._context.current.workers.hurry()

    def _on_released(self, background: list[int]) -> None:
        if background and self._context.current is not None:
            self._keep_background(self._context.current)
        self._on_gone([])

    # --- what the workers left in the background -------------------------------------------------------------------
    @property
    def is_ending_background(self) -> bool:
        """Whether background processes are being stopped."""
        return self._ending_background is not None

    def _keep_background(self, ended: Round) -> None:
        self._background = ended.workers
        try:
            self._context.guardian.spared.update(ended.output.leave())
        except OSError as error:
            self._context.say(f"the output of background processes is lost from now on: {error.strerror}")

    def conclude_background(self, *, is_success: bool) -> None:
        """Let them live on after a success, and name them; end them otherwise."""
        if self._background is None or not is_success:
            self.end_background()
            return
        # First: from now on they live, also if the launcher is killed.
        self._context.guardian.spare_all()
        if pids := self._background.find_survivors():
            from elastic_run.report import lines

            self._context.say(lines.background([(pid, _read_command(pid)) for pid in sorted(pids)]))

    def end_background(self) -> None:
        """End them, if there are any."""
        if self._background is not None:
            self._ending_background, self._background = self._background, None
            timeout = self._options.shutdown_timeout
            self._ending_background.stop(SIGTERM, timeout, lambda _: self._conclude_end())

    def hurry_background(self) -> None:
        """Kill those that are being stopped."""
        if self._ending_background is not None:
            self._ending_background.hurry()

    def _conclude_end(self) -> None:
        self._ending_background = None
        self._on_background_ended()

    # --- the end of a round ----------------------------------------------------------------------------------------

    def _on_gone(self, survivors: list[int]) -> None:
        current, history = self._context.current, self._context.history
        if current is None:
            return
        failure = self._failure = history.add_round(current, survivors)
        self._context.events.round_gone(history.ends, history.root, len(survivors))
        if failure is not None:
            self._context.on_step("FAILED", 0.0)
        if self._context.agent.stop_reason != machine.AFTER_SUCCESS:
            self._context.on_step("STOP", (self._loop.now() - self._stopped_at) * 1000)
        self._feed(messages.GroupGone(current.number, failure=failure, is_unkillable=bool(survivors)))

    # --- reports to a job of several nodes -------------------------------------------------------------------------
    def report_failing(self, command: messages.ReportFailing) -> None:
        """Say that a worker of the round has failed."""
        agent, job = self._context.agent, self._context.job
        if job is not None:
            job.report_failing(is_secondary=command.is_secondary)
            if command.is_secondary and not agent.running and job.nodes > 1:
                # All of this node have failed: the worker that has the cause is on another, which isn't stopped yet.
                from elastic_run.report import lines

                self._context.say(lines.awaiting_cause(CAUSE_WAIT))

    def report_ready(self, command: messages.ReportReady) -> None:
        """Report how the round ended on this node, which is then ready for the next round."""

        def report() -> None:
            history, job = self._context.history, self._context.job
            document, ends = history.root_cause_document(self._failure), history.describe_ends()
            try:
                if job is not None:
                    job.report_ready(command, document, ends)
            except OSError as error:
                self._feed(messages.JobOver(messages.Finish("cannot_start", detail=str(error))))

        if command.outcome in (FAILED, STOPPED):
            self._check_first(self._context.agent.round, report)
        else:
            report()


def _read_command(pid: int) -> str:
    import psutil

    try:
        return " ".join(psutil.Process(pid).cmdline())[:400]
    except (psutil.Error, OSError):
        return ""
