"""The driver of one agent: makes its parts, brings their events to its state machine, and performs the commands.

- Nothing is decided here: `core.agent.machine` decides. One event at a time, in order: an event that arises while
  commands are performed waits until they are done.
- All work happens in the loop's thread, except a rendezvous that blocks.
- `round_driver` performs the commands that start and stop workers.
- Signals need the main thread. In another thread, the program around us stops the agent through
  `SimpleElasticAgent._shutdown`.
"""

from __future__ import annotations

import os
from collections import deque

from elastic_run.agent.background import Background
from elastic_run.agent.control_server import ControlServer
from elastic_run.agent.driver.parts import AgentParts, Observation
from elastic_run.agent.driver.round_driver import RoundDriver
from elastic_run.agent.driver.round_join import RoundJoin
from elastic_run.agent.driver.signal_watch import SignalWatch
from elastic_run.agent.driver.stack_reports import WAIT_BEFORE_STOP
from elastic_run.agent.driver.watches import watch_time_limit
from elastic_run.agent.plugin_calls import PluginCalls, close_part
from elastic_run.agent.senders import Senders
from elastic_run.core.agent import machine, messages
from elastic_run.core.agent.shutdown import KILL_LIMIT
from elastic_run.core.job.restart_policy import CAUSE_WAIT, FAILED, STOPPED
from elastic_run.loop import Loop
from elastic_run.multiprocessing.output.console import Console
from elastic_run.multiprocessing.process.fork_exec import ensure_standard_descriptors
from elastic_run.multiprocessing.process.guardian import GuardianKeeper
from elastic_run.rendezvous.api import RendezvousGracefulExitError, is_kind
from elastic_run.signals import SIGINT, SIGTERM, restore_signals
from elastic_run.store.worker_store import PortTakenError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round_checks import CheckProcess, RoundChecks
    from elastic_run.agent.driver.warm_start import HeldRound
    from elastic_run.agent.driver.worker_launch import EarlyStart
    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.report import JobResult
    from elastic_run.timer.timer_file import FileTimerRequest

#: Seconds that are long for a reader of the output, or for the loop, and short for a person.
_MOMENT = 2.0
#: Seconds after which workers are past their own start: what commands need may be imported then.
_SETTLED = 1.0


class Supervisor:
    """Runs the rounds of one agent to their end.

    Args:
        context: The workers and the user's settings; the group's ranks and states are kept up to date.
        early_start: The first round, if its workers were started already.
        on_step: Called with torch's name of each step of a round, and its duration in milliseconds.
        on_timer: Called with the name of an event of the workers' timers, and the request that it is about.

    Attributes:
        parts: The parts of the agent, with the state of its machine and its rounds.
        rounds: The driver of the rounds.
    """

    def __init__(
        self,
        context: AgentContext,
        early_start: EarlyStart | None = None,
        *,
        on_step: Callable[[str, float], None] = lambda *_: None,
        on_timer: Callable[[str, FileTimerRequest | None], None] = lambda *_: None,
    ) -> None:
        # Before anything is opened: a closed standard descriptor's number would go to the first file.
        ensure_standard_descriptors()
        self._context, self._options = context, context.options
        self._loop = Loop()
        try:
            self.console = Console(self._loop)
        except OSError:
            self._loop.close()
            raise
        say = self.console.say
        if early_start is None:
            self._round_join = RoundJoin(context.group, self._options.agent_config.worker_store)
        else:
            self._round_join = early_start.round_join
        self._round_join.serve(self._loop, say)
        self._guardian_keeper = GuardianKeeper(self._loop, context.guardian, say=say)
        self._senders = Senders()
        self._observation = Observation(context, self._loop, say)
        self._job = self._make_job()
        self.parts = AgentParts(
            context=context,
            loop=self._loop,
            console=self.console,
            senders=self._senders,
            observation=self._observation,
            round_join=self._round_join,
            job=self._job,
            feed=self._feed,
            agent=machine.Agent(
                config=self._options.job_config,
                local_world_size=context.group.spec.local_world_size,
                forwarded=frozenset(self._options.forwarded),
                follows_job=self._job is not None,
                wait_limit=min(CAUSE_WAIT, self._options.shutdown_timeout),
            ),
            started=self._loop.now(),
        )
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._is_closed = False
        self._joined_at = 0.0
        self._handler_error: Exception | None = None
        self._result: JobResult | None = None
        self._is_quiet = False
        self._finish: messages.Finish | None = None
        self._checks: RoundChecks | None = None
        self.plugin_calls = context.plugin_calls = PluginCalls(
            self._loop, say, grace=self._options.shutdown_timeout, count_signals=lambda: self._signals.seen
        )
        self._held_round: HeldRound | None = None
        self._kept_server: CheckProcess | None = None
        if context.worker_pool is not None:
            from elastic_run.agent.driver.warm_start import HeldRound

            context.worker_pool.attach(self._loop, say)
            self._held_round = HeldRound(context.worker_pool, self._feed_machine)
        self._background = Background(context, say=say, feed=self._feed)
        launched = None if early_start is None else early_start.launched
        self.rounds = RoundDriver(self.parts, launched, background=self._background, on_step=on_step, on_timer=on_timer)
        self._signals = SignalWatch(
            self.parts, hurry=self._background.hurry, show_stacks=self.rounds.stacks.show_on_quit
        )
        self._control = ControlServer(self.parts, self.rounds.watches.describe_hang)
        if context.health_port is not None:
            context.health_port.serve_health(self._loop, lambda: self.parts.agent.state)
        if context.metrics_port is not None:
            context.metrics_port.serve_metrics(self._loop, lambda: self.parts.agent.state, self.parts.find_silences)
        if self._options.stop_time:
            watch_time_limit(self._loop, self._options, say=say, stop=self.request_stop)
        self._performers: dict[type[Command], Callable[[Any], None]] = {
            messages.Join: self._perform_join,
            messages.StartWorkers: lambda command: self.rounds.start(command, joined_at=self._joined_at),
            messages.StopWorkers: self.rounds.stop,
            messages.Hurry: lambda _: self.rounds.hurry(),
            messages.Forward: self._perform_forward,
            messages.Pause: lambda command: self._feed_later(command.delay, messages.PauseOver(command.round)),
            messages.AwaitCause: self._perform_await_cause,
            messages.Warn: self._perform_warn,
            messages.ReportFailing: self._perform_report_failing,
            messages.ReportReady: self._perform_report_ready,
            messages.Leave: self._perform_leave,
            messages.Finish: self._perform_finish,
        }

    def _make_job(self) -> MultiNodeJob | None:
        """Return the job of several nodes, where the rendezvous knows one; a foreign handler has rounds only."""
        group = self._context.group
        if not hasattr(group.spec.rdzv_handler, "open_session"):
            return None
        from elastic_run.agent.driver.job import MultiNodeJob

        return MultiNodeJob(
            group, self._options, self._round_join, loop=self._loop, feed=self._feed, console=self.console
        )

    # --- the run ---------------------------------------------------------------------------------------------------
    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request_stop(self, number: int, reason: str = "the program that launches the job stops it") -> None:
        """Stop as if this signal had come; may be called from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._signals.stop_without(number, reason))

    def run(self) -> JobResult:
        """Run to the end."""
        self._signals.begin()
        self._observation.record(lambda recorder, moment: recorder.agent_started(moment))
        try:
            self._guardian_keeper.start()
        except OSError as error:
            detail = f"the guardian process can't be started: {error.strerror}"
            self._finish = messages.Finish("cannot_start", detail=detail)
            return self._conclude()
        try:
            self.parts.agent, commands = machine.begin(self.parts.agent)
            self._perform(commands)
            self._control.open(os.environ)
            self._loop.call_later(_SETTLED, self._control.settle)
            self._serve_kept_state()
            self._loop.run_until(self._is_finished)
        except BaseException as error:
            # A defect, or Ctrl-C in a program that has kept SIGINT to itself: the workers get their grace all the same.
            self._stop_after(error)
            raise
        return self._conclude()

    def _is_finished(self) -> bool:
        is_checking = self._checks is not None and self._checks.is_running
        return self._finish is not None and not self._background.is_ending and not is_checking

    def _stop_after(self, error: BaseException) -> None:
        current = self.parts.current
        if current is None and self._job is None:
            return  # nothing was started, so nothing has to be stopped
        if isinstance(error, KeyboardInterrupt):
            self._feed(messages.Signalled(SIGINT))
        else:
            from elastic_run.utils import describe_exception

            # The caller tells the exception; a line says before why workers that run are stopped.
            self._is_quiet = current is None or not current.workers.alive
            self._signals.stop_without(SIGTERM, describe_exception(error))
        wait_limit = self._options.shutdown_timeout + KILL_LIMIT + _MOMENT
        self._loop.run_until(self._is_finished, self._loop.now() + wait_limit)

    def _conclude(self) -> JobResult:
        self._write_kept_state()
        history = self.parts.history
        if self._job is not None and self._job.place is not None:
            history.add_versions(self._job.place.versions)
        if self._job is not None and self._job.ended is not None:
            history.add_verdict(self._job.ended)
        result = history.conclude(self._finish or messages.Finish("internal_error"), self.parts.agent)
        self._observation.record(lambda recorder, moment: recorder.agent_ended(moment, result))
        self._observation.begin()
        self._result = result
        return result

    def _serve_kept_state(self) -> None:
        """Start the process that gives this node's kept state to other nodes, if there may be others."""
        kept = self._context.kept
        if kept is None or (command := kept.serve_command()) is None:
            return
        from elastic_run.agent.driver.round_checks import CheckEnd, CheckProcess

        def tell(end: CheckEnd) -> None:
            self.console.say(f"the process that serves the kept state has ended: {end.output.strip()[-500:]}")

        self._kept_server = CheckProcess(self._loop, self._context, tell)
        argv, variables, listening = command
        try:
            self._kept_server.start(argv, variables, timeout=None, kept=(listening,))
        except OSError as error:
            self.console.say(f"the kept state can't be served to other nodes: {error.strerror}")

    def _write_kept_state(self) -> None:
        """Write the state that the workers have kept to a disk, if the job has not succeeded; a signal ends it."""
        directory, kept = self._options.agent_config.keep_state_dir, self._context.kept
        if not directory or kept is None or self._finish is None or self._finish.verdict == "success":
            return
        from elastic_run.agent.driver.round_checks import CheckEnd, CheckProcess

        def tell(end: CheckEnd) -> None:
            late = f"the kept state was not written to {directory} within {self._options.shutdown_timeout:g} s"
            lines = end.output.strip().splitlines()
            self.console.say(late if end.is_late else lines[-1] if lines else "there is no kept state to write")

        process, before = CheckProcess(self._loop, self._context, tell), self._signals.seen
        try:
            process.start(*kept.write_command(directory), timeout=self._options.shutdown_timeout)
        except OSError as error:
            self.console.say(f"the kept state was not written to {directory}: {error}")
            return
        self._loop.run_until(lambda: not process.is_running or self._signals.seen > before)
        if process.is_running:
            process.cancel()
            self._loop.run_until(lambda: not process.is_running)

    @property
    def rendezvous_error(self) -> Exception | None:
        """The error that prevented a round: the job's, or the exception of a foreign handler."""
        return self._handler_error if self._job is None else self._job.error

    def close(self) -> None:
        """Give back everything: store, temporary files, guardian, console, signal handlers."""
        self._is_closed = True
        context, before = self._context, self._signals.seen
        try:
            if self._job is not None:
                barrier = self._options.node_config.exit_barrier_timeout or 0.0
                self._job.close(barrier, is_hurried=lambda: self._signals.seen > before)
            if self._kept_server is not None:
                self._kept_server.cancel()
            self._round_join.close()
            self.rounds.watches.close()
            is_failure = self._finish is not None and self._finish.verdict == "worker_failed"
            if call := context.find_clean_up(is_failure=is_failure):
                close_part(context.logs_specs, call, self.plugin_calls.post)
        finally:
            try:
                if context.worker_pool is not None:
                    context.worker_pool.close()
                self._guardian_keeper.close(is_clean=self._is_finished())
                self._observation.close()
                self.plugin_calls.close()
                self._flush(before)
                if self._options.is_whole_process:
                    self._let_go_of_signals()
            finally:
                if context.kept is not None:
                    context.kept.close()
                for server in (self._control, context.health_port, context.metrics_port):
                    if server is not None:
                        server.close()
                self.console.close()
                self._loop.close()

    def _flush(self, signals_before: int) -> None:
        """Wait for a slow reader of the output, but not after a stop signal, nor when one comes while closing."""
        is_stopped = self._finish is not None and self._finish.signal is not None
        self._loop.run_until(
            lambda: self.console.is_idle or self._signals.seen > signals_before,
            self._loop.now() + _MOMENT if is_stopped else None,
        )

    def _let_go_of_signals(self) -> None:
        """Let no signal replace the exit code, which is known; after calls of plug-ins the second one ends the process.

        A plug-in may hang in what Python calls at its end.
        """
        if not self.plugin_calls.is_used or self._result is None:
            self._loop.ignore_signals()
            return
        self._loop.end_at_second_signal(self._result.exit_code)
        if self._context.mask is not None:
            restore_signals(self._context.mask)

    # --- events ----------------------------------------------------------------------------------------------------
    def _feed(self, event: Event) -> None:
        if self._background.takes(event):
            return
        if self._held_round is None or not self._held_round.takes(event):
            self._feed_machine(event)

    def _feed_later(self, delay: float, event: Event) -> None:
        self._loop.call_later(delay, lambda: self._feed(event))

    def _feed_machine(self, event: Event) -> None:
        self._events.append(event)
        if self._is_feeding or self._is_closed:
            return
        self._is_feeding = True
        try:
            while self._events:
                jitter = int.from_bytes(os.urandom(2), "big") / 65536
                before, event = self.parts.agent, self._events.popleft()
                after, commands = machine.decide(before, event, self._loop.now(), jitter)
                self.parts.agent = after
                self._tell_step(before, event, after, commands)
                self._perform(commands)
        finally:
            self._is_feeding = False

    def _tell_step(
        self, before: machine.Agent, event: Event, after: machine.Agent, commands: tuple[Command, ...]
    ) -> None:
        """Tell the event log and the user of a step, before its commands are performed."""
        record = self._observation.record
        if isinstance(event, messages.Signalled):
            number, sender = event.number, self._senders.find(event.number)
            record(lambda recorder, moment: recorder.signal_received(moment, number, sender))
        if isinstance(event, messages.RoundWarned) and after.state == machine.RUNNING:
            record(lambda recorder, moment: recorder.round_warned(moment))
        place, halt = (None, "") if self._job is None else (self._job.place, self._job.halt)
        record(lambda recorder, moment: recorder.stepped(moment, before, after, commands, place, halt))
        if machine.has_news(before, after) and not self._is_quiet:
            self.parts.history.tell(before, after, commands)

    # --- commands --------------------------------------------------------------------------------------------------
    def _perform(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self._performers[type(command)](command)

    def _perform_join(self, command: messages.Join) -> None:
        is_joined = self.rounds.has_launched  # by `worker_launch.start_early`
        self._check_first(command.round, lambda: self._join(command.round, is_joined=is_joined))

    def _check_first(self, number: int, go_on: Callable[[], None]) -> None:
        """Go on towards the next round when its checks hold; see `round_checks`."""
        current = self.parts.current
        old_pids = () if current is None else tuple(current.workers.pids.values())
        if not (self._options.node_config.health_check or old_pids):
            go_on()
            return
        from elastic_run.agent.driver.round_checks import RoundChecks

        self._checks = RoundChecks(
            self._loop,
            self._context,
            say=self.console.say,
            on_ready=go_on,
            on_unhealthy=lambda reason: self._feed(messages.RoundFailed(number, verdict="unhealthy", detail=reason)),
        )
        self._checks.begin(old_pids)

    def _join(self, number: int, *, is_joined: bool) -> None:
        """Join a round; an event tells when it is formed, or that it can't be."""
        self._joined_at = self._loop.now()
        if is_joined:
            self._feed(messages.RoundFormed(number))
            return
        try:
            if self._job is not None:
                self._job.join()
                self._job.entrust_connections(self._context.guardian)
                return
            self._round_join.offer_store()
        except (ValueError, OSError) as error:
            is_usage = isinstance(error, (PortTakenError, ValueError))
            detail = self._round_join.describe_taken_port(error) if isinstance(error, PortTakenError) else str(error)
            self._feed(messages.RoundFailed(number, verdict="usage" if is_usage else "cannot_start", detail=detail))
            return
        if self._round_join.is_immediate:
            self._ask_handler(number)
        else:
            import threading

            # A handler that blocks waits in a thread of its own, so that the agent answers a signal at any moment.
            threading.Thread(target=self._ask_handler, args=(number,), daemon=True).start()

    def _ask_handler(self, number: int) -> None:
        """Ask the handler for a place, in any thread, and bring the answer to the loop's thread."""
        event: Event
        if not self._round_join.is_immediate and self._context.mask is not None:
            # A process that a plug-in starts here must not begin with signals blocked.
            restore_signals(self._context.mask)
        try:
            self._round_join.take_place()
            event = messages.RoundFormed(number)
        except Exception as error:  # noqa: BLE001 - a plug-in's error; torch's classes of errors are not ours
            from elastic_run.utils import describe_exception

            self._handler_error = error
            is_exit = is_kind(error, RendezvousGracefulExitError)
            detail = str(error) if is_exit else describe_exception(error)
            event = messages.RoundFailed(number, verdict="success" if is_exit else "rendezvous", detail=detail)
        self._loop.call_soon_threadsafe(lambda: self._feed(event))

    def _perform_forward(self, command: messages.Forward) -> None:
        self._senders.passed_on.add(command.signal)
        self._signals.forward(command.signal)

    def _perform_warn(self, _: messages.Warn) -> None:
        if self._options.scale_up_signal:
            self._senders.warned_with.add(self._options.scale_up_signal)
            self._signals.forward(self._options.scale_up_signal)

    def _perform_await_cause(self, command: messages.AwaitCause) -> None:
        self.parts.history.tell_awaiting_cause(command.delay)
        # Not before: the signal lets `signal.pause` return, and a worker that tells the cause needs no question.
        before = max(0.0, command.delay - WAIT_BEFORE_STOP)
        self._loop.call_later(before, lambda: self.rounds.stacks.ask_before_stop(command.round))
        self._feed_later(command.delay, messages.WaitOver(command.round))

    def _perform_report_failing(self, command: messages.ReportFailing) -> None:
        if self._job is not None:
            self._job.report_failing(is_secondary=command.is_secondary)
            if command.is_secondary and not self.parts.agent.running and self._job.has_others:
                # All of this node have failed: the worker that has the cause is on another, which isn't stopped yet.
                self.parts.history.tell_awaiting_cause(CAUSE_WAIT)

    def _perform_report_ready(self, command: messages.ReportReady) -> None:
        if command.outcome in (FAILED, STOPPED):
            self._check_first(self.parts.agent.round, lambda: self._report_ready(command))
        else:
            self._report_ready(command)

    def _report_ready(self, command: messages.ReportReady) -> None:
        """Report how the round ended on this node, which is then ready for the next round."""
        history = self.parts.history
        document, ends = history.root_cause_document(self.rounds.failure), history.describe_ends()
        try:
            if self._job is not None:
                self._job.report_ready(command, document, ends)
        except OSError as error:
            self._feed(messages.JobOver(messages.Finish("cannot_start", detail=str(error))))

    def _perform_leave(self, command: messages.Leave) -> None:
        if self._job is not None:
            self._job.leave(command.reason, command.detail)

    def _perform_finish(self, command: messages.Finish) -> None:
        self._finish = command
        if self._checks is not None:
            self._checks.cancel()
        self._background.conclude(is_success=command.verdict == "success")
