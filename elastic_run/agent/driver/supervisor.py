"""The driver of one agent: brings events to `core.agent.machine` and performs its commands.

Rules
- Nothing is decided here. Every event goes through `_feed`, one at a time and in order.
- All work happens in the loop's thread, but for a rendezvous that blocks (`joining`).
- The file is longer than others: it has one function for each command of the machine.
- Signals need the main thread. In another thread, the program around us stops the agent through
  `SimpleElasticAgent._shutdown`.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import deque

from elastic_run.agent import steps
from elastic_run.agent.background import Background
from elastic_run.agent.driver.joining import Joining
from elastic_run.agent.driver.observation import Observation
from elastic_run.agent.driver.round import Round
from elastic_run.agent.driver.round_join import RoundJoin
from elastic_run.agent.driver.signal_watch import SignalWatch
from elastic_run.agent.driver.stack_reports import StackReports
from elastic_run.agent.driver.step import Step
from elastic_run.agent.driver.watches import Watches
from elastic_run.agent.driver.worker_launch import launch_workers
from elastic_run.agent.senders import Senders
from elastic_run.cluster.gpu_processes import find_query
from elastic_run.core.agent import machine, messages
from elastic_run.core.agent.shutdown import CAUSE_PATIENCE, KILL_LIMIT
from elastic_run.core.protocol.outcomes import FAILED, STOPPED
from elastic_run.loop import Loop
from elastic_run.multiprocessing.output.console import Console
from elastic_run.multiprocessing.process.descriptors import ensure_standard_descriptors
from elastic_run.multiprocessing.process.guardian_keeper import GuardianKeeper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.control_server import ControlServer
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.early_start import EarlyStart
    from elastic_run.agent.driver.flight_recorder import RecorderQuestion
    from elastic_run.agent.driver.hang_detection import Hang
    from elastic_run.agent.driver.held_round import HeldRound
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round_checks import RoundChecks
    from elastic_run.agent.driver.worker_launch import LaunchedWorkers
    from elastic_run.agent.history import History
    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.core.agent.restart_policy import Failure
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.report import JobResult
    from elastic_run.timer.requests import FileTimerRequest

#: Seconds that are long for a reader of the output, or for the loop, and short for a person.
_MOMENT = 2.0
#: Seconds in which only the workers' first lines count: programs that are quick to start have written some by then.
_FIRST_LINES = 0.05
#: Seconds after which workers are past their own start, or fail for a reason that needs no hurry.
_SETTLED = 1.0


class Supervisor:
    """Runs the rounds of one agent to their end.

    Args:
        context: The workers and the user's settings; the group's ranks and states are kept up to date.
        early_start: The first round, if its workers were started already.
        on_step: Called with each step of a round (`agent.steps`), and its duration in milliseconds.
        on_timer: Called with the name of an event of the workers' timers, and the request that it is about.
    """

    def __init__(
        self,
        context: AgentContext,
        early_start: EarlyStart | None = None,
        *,
        on_step: Callable[[str, float], None] = lambda *_: None,
        on_timer: Callable[[str, FileTimerRequest | None], None] = lambda *_: None,
    ) -> None:
        self._context = context
        self._group = context.group
        self._options = context.options
        self._on_step = on_step
        self._stopped_at = 0.0
        # Before anything is opened: a closed standard descriptor's number would go to the first file.
        ensure_standard_descriptors()
        self._loop = Loop()
        self._started = self._loop.now()
        self.console = Console(self._loop)
        self._launched = None if early_start is None else early_start.launched
        self._round_join = (
            RoundJoin(self._group, self._options.agent_config.worker_store)
            if early_start is None
            else early_start.round_join
        )
        self._round_join.serve(self._loop, self.console.say)
        self._guardian_keeper = GuardianKeeper(self._loop, context.guardian, say=self.console.say)
        self._senders = Senders()
        self._job = self._find_job()
        self._agent = machine.Agent(
            config=self._options.job_config,
            local_world_size=self._group.spec.local_world_size,
            forwarded=frozenset(self._options.forwarded),
            follows_job=self._job is not None,
            patience=min(CAUSE_PATIENCE, self._options.shutdown_timeout),
        )
        self._watches = Watches(
            self._loop,
            context,
            self._job,
            is_polled=self._job is None and not self._round_join.is_immediate,
            say=self.console.say,
            on_stuck=lambda number: self._feed(messages.WorkerStuck(number)),
            on_hang=self._react_to_hang,
            on_waiting_nodes=self._stop_for_waiting_nodes,
            on_timer=on_timer,
        )
        self._failure: Failure | None = None
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._is_closing = False
        self._is_reaping = False
        self._is_observing = False
        self._round: Round | None = None
        self._lazy_history: History | None = None
        self._finish: messages.Finish | None = None
        self._checks: RoundChecks | None = None
        self._collection: RecorderQuestion | None = None
        self._held_round = self._hold_rounds()
        self._background = Background(context, self.console.say)
        self._observation = Observation(context, self._loop, self.console.say)
        if context.health_port is not None:
            context.health_port.serve(self._loop, lambda: self._agent.state)
        if context.metrics_port is not None:
            context.metrics_port.serve(self._loop, lambda: self._agent.state, self._find_silences)
        self._control: ControlServer | None = None
        self._joining = Joining(context, self._round_join, self._job, loop=self._loop, feed=self._feed)
        self._stacks = StackReports(
            context,
            self._loop,
            self.console,
            current_round=lambda: self._round,
            find_state=lambda: self._agent.state,
        )
        self._signals = SignalWatch(
            self._loop,
            context,
            self._senders,
            feed=self._feed,
            hurry=self._background.hurry,
            current_round=lambda: self._round,
            history=lambda: self._history,
            show_stacks=self._stacks.show_on_quit,
        )
        if self._options.stop_time:
            from elastic_run.agent.driver.time_limit import watch_time_limit  # noqa: PLC0415 - only if there is a limit

            stop = self._options.signals[0] if self._options.signals else signal.SIGTERM
            watch_time_limit(self._loop, self._options, say=self.console.say, stop=lambda: self.request_stop(stop))
        self._performers: dict[type[Command], Callable[[Any], None]] = {
            messages.Join: self._perform_join,
            messages.StartWorkers: self._perform_start_workers,
            messages.StopWorkers: self._perform_stop_workers,
            messages.Hurry: self._perform_hurry,
            messages.Forward: self._perform_forward,
            messages.Pause: self._perform_pause,
            messages.AwaitCause: self._perform_await_cause,
            messages.Warn: self._perform_warn,
            messages.ReportFailing: self._perform_report_failing,
            messages.ReportReady: self._perform_report_ready,
            messages.Leave: self._perform_leave,
            messages.Finish: self._perform_finish,
        }

    def _hold_rounds(self) -> HeldRound | None:
        """With warm workers, let rounds wait until they are there."""
        worker_pool = self._context.worker_pool
        if worker_pool is None:
            return None
        from elastic_run.agent.driver.held_round import HeldRound  # noqa: PLC0415 - only with --preload

        worker_pool.attach(self._loop, self.console.say)
        return HeldRound(worker_pool, self._work_off)

    def _find_job(self) -> MultiNodeJob | None:
        """Return the job of several nodes, where the rendezvous knows one; a foreign handler has rounds only."""
        if not hasattr(self._group.spec.rdzv_handler, "open_session"):
            return None
        from elastic_run.agent.driver.job import MultiNodeJob  # noqa: PLC0415 - one node needs none of it

        return MultiNodeJob(
            self._group, self._options, self._round_join, loop=self._loop, feed=self._feed, console=self.console
        )

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request_stop(self, number: int) -> None:
        """Stop as if this signal had come; may be called from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._feed(messages.Signalled(number)))

    def run(self) -> JobResult:
        """Run to the end."""
        self._signals.begin()
        self._observation.tell(lambda recorder, moment: recorder.agent_started(moment))
        try:
            self._guardian_keeper.start()
        except OSError as error:
            detail = f"the guardian process can't be started: {error.strerror}"
            self._finish = messages.Finish("cannot_start", detail=detail)
            return self._conclude()
        try:
            self._agent, commands = machine.begin(self._agent)
            self._perform_all(commands)
            self._loop.call_later(_SETTLED, self._open_control)
            self._loop.run_until(self._is_finished)
        except BaseException as error:
            # A defect, or Ctrl-C in a program that has kept SIGINT to itself: the workers get their grace all the same.
            self._stop_after(error)
            raise
        return self._conclude()

    def _open_control(self) -> None:
        """Open the control socket. Without one the job goes on, and commands don't find it."""
        from elastic_run.agent.agent_view import AgentView  # noqa: PLC0415 - the workers come first
        from elastic_run.agent.control_server import ControlServer  # noqa: PLC0415 - ditto
        from elastic_run.agent.job_questions import answer_question  # noqa: PLC0415 - ditto

        view = AgentView(
            loop=self._loop,
            context=self._context,
            job=self._job,
            find_agent=lambda: self._agent,
            find_round=lambda: self._round,
            stop=self._stop_for_request,
            started=self._started,
            describe_hang=self._watches.describe_hang,
        )
        if self._job is not None:
            self._job.answer = lambda question, deliver: answer_question(view, question, deliver)
        self._control = ControlServer(self._loop, view)
        try:
            self._control.open(os.environ)
        except OSError:
            self._control = None

    def _stop_for_request(self, number: int, sender: str) -> None:
        self._senders.name(number, sender)
        self._feed(messages.Signalled(number))

    @property
    def restart_count(self) -> int:
        """Number of restarts of the workers so far."""
        return self._agent.restart_count

    @property
    def rendezvous_error(self) -> Exception | None:
        """The error that prevented a round: the job's, or the exception of a foreign handler."""
        return self._joining.handler_error if self._job is None else self._job.error

    def return_values(self) -> dict[int, Any]:
        """Return the values of the workers' functions in the last round by global rank; empty for commands."""
        return {} if self._round is None else self._round.return_values()

    def _conclude(self) -> JobResult:
        if self._job is not None and self._job.ended is not None:
            place = self._job.place
            self._history.add_verdict(self._job.ended, versions="" if place is None else place.versions)
        result = self._history.conclude(self._finish or messages.Finish("internal_error"), self._agent)
        self._observation.tell(lambda recorder, moment: recorder.agent_ended(moment, result))
        self._observation.begin()
        return result

    def _is_finished(self) -> bool:
        is_checking = self._checks is not None and self._checks.is_running
        return self._finish is not None and not self._background.is_ending and not is_checking

    def _stop_after(self, error: BaseException) -> None:
        if self._round is None and self._job is None:
            return  # nothing was started, so nothing has to be stopped
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        self._feed(messages.Signalled(number))
        patience = self._options.shutdown_timeout + KILL_LIMIT + _MOMENT
        self._loop.run_until(self._is_finished, self._loop.now() + patience)

    def close(self) -> None:
        """Give back everything: store, temporary files, guardian, console, signal handlers."""
        self._is_closing = True
        before = self._signals.seen
        try:
            if self._job is not None:
                barrier = self._options.node_config.exit_barrier_timeout or 0.0
                self._job.close(barrier, is_hurried=lambda: self._signals.seen > before)
            self._round_join.close()
            self._watches.close()
            self._context.clean_up(is_failure=self._finish is not None and self._finish.verdict == "worker_failed")
        finally:
            try:
                if self._context.worker_pool is not None:
                    self._context.worker_pool.close()
                self._guardian_keeper.close(is_clean=self._is_finished())
                self._observation.close()
                self._flush(before)
                if self._options.is_whole_process:
                    # The exit code is known; a signal that comes now must not replace it.
                    self._loop.ignore_signals()
            finally:
                if self._control is not None:
                    self._control.close()
                if self._context.health_port is not None:
                    self._context.health_port.close()
                if self._context.metrics_port is not None:
                    self._context.metrics_port.close()
                self.console.close()
                self._loop.close()

    def _flush(self, signals_before: int) -> None:
        """Wait for a slow reader of the output, but not after a stop signal, nor when one comes while closing."""
        is_stopped = self._finish is not None and self._finish.signal is not None
        self._loop.run_until(
            lambda: self.console.is_idle or self._signals.seen > signals_before,
            self._loop.now() + _MOMENT if is_stopped else None,
        )

    # --- events and commands ---------------------------------------------------------------------------------------
    def _feed(self, event: Event) -> None:
        if self._background.takes(event, self._feed):
            return
        if self._held_round is None or not self._held_round.takes(event):
            self._work_off(event)

    def _work_off(self, event: Event) -> None:
        self._events.append(event)
        if self._is_feeding or self._is_closing:
            return
        self._is_feeding = True
        try:
            while self._events:
                jitter = int.from_bytes(os.urandom(2), "big") / 65536
                before, event = self._agent, self._events.popleft()
                self._agent, commands = machine.decide(before, event, self._loop.now(), jitter)
                self._observe_step(before, event, commands)
                if machine.has_news(before, self._agent):
                    self._history.tell(before, self._agent, commands)
                self._perform_all(commands)
        finally:
            self._is_feeding = False

    def _observe_step(self, before: machine.Agent, event: Event, commands: tuple[Command, ...]) -> None:
        place, halt = (None, "") if self._job is None else (self._job.place, self._job.halt)
        sender = self._senders.find(event.number) if isinstance(event, messages.Signalled) else ""
        step = Step(before, event, self._agent, commands, place, halt, sender)
        self._observation.tell(lambda recorder, moment: recorder.stepped(moment, step))

    @property
    def _history(self) -> History:
        """The history; its modules are imported after the first worker was started: no worker waits for them."""
        if self._lazy_history is None:
            from elastic_run.agent.history import History  # noqa: PLC0415

            self._lazy_history = History(self._context, self._senders, self.console.say)
        return self._lazy_history

    def _perform_all(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self._performers[type(command)](command)

    def _perform_hurry(self, _: messages.Hurry) -> None:
        if self._collection is not None:
            self._collection.finish()
        if self._round is not None:
            self._round.workers.hurry()

    def _perform_forward(self, command: messages.Forward) -> None:
        self._senders.passed_on.add(command.signal)
        self._signals.forward(command.signal)

    def _perform_pause(self, command: messages.Pause) -> None:
        self._loop.call_later(command.delay, lambda: self._feed(messages.PauseOver(command.round)))

    def _perform_await_cause(self, command: messages.AwaitCause) -> None:
        self._history.tell_awaiting_cause(command.delay)
        self._loop.call_later(command.delay, lambda: self._feed(messages.PatienceOver(command.round)))

    def _perform_finish(self, command: messages.Finish) -> None:
        self._finish = command
        if self._checks is not None:
            self._checks.cancel()
        self._background.conclude(is_success=command.verdict == "success")

    def _perform_join(self, command: messages.Join) -> None:
        is_joined = self._launched is not None
        self._check_first(command.round, lambda: self._joining.begin(command.round, is_joined=is_joined))

    def _check_first(self, number: int, go_on: Callable[[], None]) -> None:
        """Go on towards the next round when its checks hold; see `round_checks`."""
        former = () if self._round is None else tuple(self._round.workers.pids.values())
        if not (self._options.node_config.health_check or (former and find_query(os.environ))):
            go_on()
            return
        from elastic_run.agent.driver.round_checks import RoundChecks  # noqa: PLC0415 - only when there is something to check

        self._checks = RoundChecks(
            self._loop,
            self._context,
            say=self.console.say,
            on_ready=go_on,
            on_unhealthy=lambda reason: self._feed(messages.RoundFailed(number, verdict="unhealthy", detail=reason)),
        )
        self._checks.begin(former)

    # --- reports to the job ----------------------------------------------------------------------------------------
    def _perform_warn(self, _: messages.Warn) -> None:
        if self._options.scale_up_signal:
            self._senders.warned_with.add(self._options.scale_up_signal)
            self._signals.forward(self._options.scale_up_signal)

    def _perform_leave(self, command: messages.Leave) -> None:
        if self._job is not None:
            self._job.leave(command.reason, command.detail)

    def _perform_report_failing(self, command: messages.ReportFailing) -> None:
        if self._job is None:
            return
        self._job.report_failing(is_secondary=command.is_secondary)
        if command.is_secondary and not self._agent.running and self._job.has_others:
            # All of this node have failed: the worker that has the cause is on another, which is not stopped yet.
            self._history.tell_awaiting_cause(CAUSE_PATIENCE)

    def _perform_report_ready(self, command: messages.ReportReady) -> None:
        if command.outcome in (FAILED, STOPPED):
            self._check_first(self._agent.round, lambda: self._report_ready(command))
        else:
            self._report_ready(command)

    def _report_ready(self, command: messages.ReportReady) -> None:
        if self._job is None:
            return
        try:
            self._job.report_ready(command, self._history.root_cause_document(self._failure))
        except OSError as error:
            self._feed(messages.JobOver(messages.Finish("cannot_start", detail=str(error))))

    # --- the round's workers ---------------------------------------------------------------------------------------
    def _perform_start_workers(self, command: messages.StartWorkers) -> None:
        number = command.round
        self._tell_step(steps.RENDEZVOUS, self._joining.began_at)
        # The rendezvous has brought the ranks of all nodes with it.
        self._on_step(steps.ASSIGN_WORKER_RANKS, 0.0)
        launched = self._take_launched() or self._launch()
        self._round = Round(
            self._context,
            launched,
            loop=self._loop,
            console=self.console,
            number=number,
            restart_count=self._agent.restart_count,
            on_exit=lambda rank, code: self._on_exit(number, rank, code),
            on_output=self._on_output,
            on_overdue=self._stacks.tell_before_kill,
        )
        try:
            self._round.watch()
        except (OSError, ValueError) as error:
            from elastic_run.agent.driver.start_errors import start_failed  # noqa: PLC0415 - only after a failure

            spec = self._group.spec
            program = spec.entrypoint if isinstance(spec.entrypoint, str) else spec.get_entrypoint_name()
            self._feed(start_failed(number, error, program))
        else:
            self._tell_step(steps.START, launched.started)
            started = self._round
            if self._options.faults:
                from elastic_run.agent.driver.fault_injection import inject_faults  # noqa: PLC0415 - only when asked for

                inject_faults(self._options.faults, started, self._group, loop=self._loop, say=self.console.say)
            self._observation.tell(lambda recorder, moment: recorder.workers_started(moment, started))
        if self._is_observing or self._job is not None:
            self._begin_to_observe()
        else:
            self._loop.call_later(_FIRST_LINES, self._begin_to_observe)
        self._round.output.resize()  # the window may have changed since the workers' terminals got its size
        if self._options.is_whole_process:
            self._context.adopt_orphans()
            self._begin_to_reap()
        # Now the workers need the processors. Preparations for a quick answer to a failure wait until they are up.
        self._loop.call_later(_SETTLED, self._prepare_for_failure)
        if self._context.worker_pool is not None:
            self._loop.call_later(_SETTLED, self._context.worker_pool.tell_sharing)
        self._watches.begin(self._round)

    def _begin_to_observe(self) -> None:
        """Begin with what takes milliseconds: the first lines of the first workers would have to wait for it."""
        self._is_observing = True
        self._history.begin()
        self._observation.begin()
        if self._options.is_whole_process:
            gc.enable()

    def _on_output(self, local_rank: int, silence: float | None) -> None:
        if (current := self._round) is not None:
            self._observation.tell(lambda recorder, moment: recorder.output_came(moment, current, local_rank, silence))

    def _find_silences(self) -> dict[int, float]:
        """Return seconds since the last output of each worker that runs, by global rank."""
        return {} if self._round is None else self._round.find_silences()

    def _on_exit(self, number: int, local_rank: int, exitcode: int) -> None:
        if (ended := self._round) is not None:
            self._observation.tell(lambda recorder, moment: recorder.worker_exited(moment, ended, local_rank, exitcode))
        # If other workers still run, or other nodes, one of them may have the root cause.
        has_others = self._job is not None or self._agent.running != {local_rank}
        is_asked = exitcode != 0 and has_others and self._agent.state == machine.RUNNING
        current = self._round if is_asked else None
        self._feed(
            messages.WorkerExited(
                number,
                local_rank=local_rank,
                exitcode=exitcode,
                is_secondary=current is not None and current.is_secondary(local_rank),
            )
        )

    def _begin_to_reap(self) -> None:
        """Collect orphans, which come to PID 1, and to a subreaper, as the command is from now on.

        Only now, when it is known which children are the first round's workers.
        """
        if self._is_reaping:
            return
        self._is_reaping = True
        if os.getpid() == 1 or self._context.worker_pool is not None:
            self._loop.reap_strangers()
        elif self._context.adopt_orphans():
            self._loop.reap_strangers(own_session=os.getsid(0))

    def _take_launched(self) -> LaunchedWorkers | None:
        launched, self._launched = self._launched, None
        return launched

    def _launch(self) -> LaunchedWorkers:
        use_agent_store = self._round_join.use_agent_store if self._job is None else self._job.use_agent_store
        return launch_workers(
            self._context,
            restart_count=self._agent.restart_count,
            use_agent_store=use_agent_store,
            on_fork=self._give_up,
        )

    def _give_up(self) -> None:
        """In a forked worker: close the launcher's descriptors."""
        self._loop.abandon()
        self._context.guardian.abandon()

    def _prepare_for_failure(self) -> None:
        if self._finish is None:
            self._history.prepare()
            if self._round is not None:
                self._round.listen_for_stacks()

    def _stop_for_waiting_nodes(self, number: int) -> None:
        if self._agent.state == machine.RUNNING:
            self.console.say("stopping the workers: nodes wait to join")
        self._feed(messages.RoundHalted(number))

    def _react_to_hang(self, current: Round, found: Hang) -> None:
        from elastic_run.agent.driver.hang_reaction import HangReaction  # noqa: PLC0415 - only if the job hangs

        reaction = HangReaction(
            self._context,
            self._job,
            self._loop,
            say=self.console.say,
            write=self._stacks.write,
            stop=self._stop_hung,
        )
        action = self._options.agent_config.hang_action
        self._observation.tell(lambda recorder, moment: recorder.hang_found(moment, found, action))
        reaction.react(current, found)

    def _stop_hung(self, end: WorkerEnd, event: Event) -> None:
        if self._agent.state == machine.RUNNING and self._agent.round == event.round:
            self._history.blame(end)
            self._feed(event)

    def _tell_step(self, step: str, began_at: float) -> None:
        self._on_step(step, (self._loop.now() - began_at) * 1000)

    def _perform_stop_workers(self, command: messages.StopWorkers) -> None:
        self._watches.end_round()
        self._stopped_at = self._loop.now()
        if self._round is not None:
            is_success = self._agent.stop_reason == machine.AFTER_SUCCESS
            if is_success and not self._options.agent_config.kill_background_processes:
                self._round.workers.release(self._on_released)
            else:
                self._stop_workers(self._round, command.signal, has_dumps=not is_success)
        if self._context.worker_pool is not None and machine.may_start_again(self._agent):
            self._context.worker_pool.prepare()

    def _stop_workers(self, current: Round, number: int, *, has_dumps: bool) -> None:
        """Stop the workers, when those that live have written the dumps of their flight recorders."""
        recorder = self._context.flight_recorder

        def stop() -> None:
            self._collection = None
            current.workers.stop(number, self._options.shutdown_timeout, self._on_gone)

        if recorder is None or not has_dumps:
            stop()
        else:
            self._collection = recorder.collect(self._loop, stop)

    def _on_released(self, background: list[int]) -> None:
        if background and self._round is not None:
            self._background.keep(self._round)
        self._on_gone([])

    def _on_gone(self, survivors: list[int]) -> None:
        current = self._round
        if current is None:
            return
        self._failure = self._history.add_round(current, survivors)
        ends, root = self._history.last_ends, self._history.last_root
        self._observation.tell(lambda recorder, moment: recorder.round_gone(moment, ends, root, len(survivors)))
        if self._failure is not None:
            self._on_step(steps.FAILED, 0.0)
        if self._agent.stop_reason != machine.AFTER_SUCCESS:
            self._tell_step(steps.STOP, self._stopped_at)
        self._feed(messages.GroupGone(current.number, failure=self._failure, is_unkillable=bool(survivors)))
