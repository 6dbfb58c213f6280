"""The driver of one agent: makes its parts, brings their events to its state machine, and performs the commands.

Rules
- Nothing is decided here. Every event goes through `_feed` to the `machine_driver`, one at a time and in order.
- All work happens in the loop's thread, except a rendezvous that blocks (`joining`).
- The commands that start and stop workers are performed by `round_driver`, the reports to a job of several nodes by
  `job_reports`, all others here.
- Signals need the main thread. In another thread, the program around us stops the agent through
  `SimpleElasticAgent._shutdown`.
"""

from __future__ import annotations

from elastic_run.agent.background import Background
from elastic_run.agent.driver.joining import Joining
from elastic_run.agent.driver.machine_driver import MachineDriver
from elastic_run.agent.driver.observation import Observation
from elastic_run.agent.driver.parts import AgentParts
from elastic_run.agent.driver.round_driver import RoundDriver
from elastic_run.agent.driver.round_join import RoundJoin
from elastic_run.agent.driver.signal_watch import SignalWatch
from elastic_run.agent.driver.stack_reports import WAIT_BEFORE_STOP
from elastic_run.agent.driver.step import Step
from elastic_run.agent.plugin_calls import PluginCalls, close_part
from elastic_run.agent.senders import Senders
from elastic_run.core.agent import machine, messages
from elastic_run.core.agent.shutdown import KILL_LIMIT
from elastic_run.core.job.restart_policy import CAUSE_WAIT
from elastic_run.loop import Loop
from elastic_run.multiprocessing.output.console import Console
from elastic_run.multiprocessing.process.fork_exec import ensure_standard_descriptors
from elastic_run.multiprocessing.process.guardian import GuardianKeeper
from elastic_run.signals import SIGINT, SIGTERM, restore_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.control_server import ControlServer
    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.early_start import EarlyStart
    from elastic_run.agent.driver.held_round import HeldRound
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.round_checks import RoundChecks
    from elastic_run.agent.history import History
    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.report import JobResult
    from elastic_run.timer.requests import FileTimerRequest

#: Seconds that are long for a reader of the output, or for the loop, and short for a person.
_MOMENT = 2.0
#: Seconds after which workers are past their own start: what commands need may be imported then.
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
        # Before anything is opened: a closed standard descriptor's number would go to the first file.
        ensure_standard_descriptors()
        self._loop = Loop()
        self._started = self._loop.now()
        self.console = Console(self._loop)
        self._round_join = (
            RoundJoin(self._group, self._options.agent_config.worker_store)
            if early_start is None
            else early_start.round_join
        )
        self._round_join.serve(self._loop, self.console.say)
        self._guardian_keeper = GuardianKeeper(self._loop, context.guardian, say=self.console.say)
        self._senders = Senders()
        self._observation = Observation(context, self._loop, self.console.say)
        self._job = self._find_job()
        self._parts = self._gather_parts()
        self._machine = self._make_machine()
        self._lazy_history: History | None = None
        self._result: JobResult | None = None
        self._is_quiet = False
        self._finish: messages.Finish | None = None
        self._checks: RoundChecks | None = None
        self._control: ControlServer | None = None
        self.plugin_calls = context.plugin_calls = PluginCalls(
            self._loop,
            self.console.say,
            grace=self._options.shutdown_timeout,
            count_signals=lambda: self._signals.seen,
        )
        self._held_round = self._hold_rounds()
        self._background = Background(context, self.console.say)
        self._joining = Joining(self._parts)
        self._rounds = RoundDriver(
            self._parts,
            None if early_start is None else early_start.launched,
            background=self._background,
            on_step=on_step,
            on_timer=on_timer,
        )
        self._signals = SignalWatch(
            self._parts,
            hurry=self._background.hurry,
            find_round=lambda: self._rounds.current,
            show_stacks=self._rounds.stacks.show_on_quit,
        )
        self._serve_ports()
        self._watch_time_limit()
        self._performers = self._find_performers()

    def _gather_parts(self) -> AgentParts:
        return AgentParts(
            context=self._context,
            loop=self._loop,
            console=self.console,
            senders=self._senders,
            observation=self._observation,
            round_join=self._round_join,
            job=self._job,
            feed=self._feed,
            find_agent=lambda: self._machine.agent,
            find_history=lambda: self._history,
        )

    def _make_machine(self) -> MachineDriver:
        agent = machine.Agent(
            config=self._options.job_config,
            local_world_size=self._group.spec.local_world_size,
            forwarded=frozenset(self._options.forwarded),
            follows_job=self._job is not None,
            wait_limit=min(CAUSE_WAIT, self._options.shutdown_timeout),
        )
        return MachineDriver(
            agent,
            self._loop,
            perform=lambda command: self._performers[type(command)](command),
            observe=self._observe_step,
        )

    def _find_performers(self) -> dict[type[Command], Callable[[Any], None]]:
        """Return the function that performs each command of the machine."""
        performers: dict[type[Command], Callable[[Any], None]] = {
            messages.Join: self._perform_join,
            messages.StartWorkers: self._perform_start_workers,
            messages.StopWorkers: self._rounds.stop,
            messages.Hurry: lambda _: self._rounds.hurry(),
            messages.Forward: self._perform_forward,
            messages.Pause: self._perform_pause,
            messages.AwaitCause: self._perform_await_cause,
            messages.Warn: self._perform_warn,
            messages.Finish: self._perform_finish,
        }
        if self._job is None:
            return performers  # the machine reports to a job only if it follows one
        from elastic_run.agent.driver.job_reports import JobReports

        reports = JobReports(
            self._parts, self._job, find_failure=lambda: self._rounds.failure, check_first=self._check_first
        )
        return performers | {
            messages.ReportFailing: reports.report_failing,
            messages.ReportReady: reports.report_ready,
            messages.Leave: reports.leave,
        }

    def _serve_ports(self) -> None:
        """Answer the health checks and the requests for metrics, if the user asked for them."""
        context = self._context
        if context.health_port is not None:
            context.health_port.serve(self._loop, lambda: self._machine.agent.state)
        if context.metrics_port is not None:
            context.metrics_port.serve(self._loop, lambda: self._machine.agent.state, self._rounds.find_silences)

    def _watch_time_limit(self) -> None:
        """Stop the workers in time, if the scheduler will end the job."""
        if self._options.stop_time:
            from elastic_run.agent.driver.time_limit import watch_time_limit

            stop = self._options.signals[0] if self._options.signals else SIGTERM
            watch_time_limit(
                self._loop,
                self._options,
                say=self.console.say,
                stop=lambda: self.request_stop(stop, "the job's time limit is near"),
            )

    def _hold_rounds(self) -> HeldRound | None:
        """With warm workers, let rounds wait until they are there."""
        worker_pool = self._context.worker_pool
        if worker_pool is None:
            return None
        from elastic_run.agent.driver.held_round import HeldRound

        worker_pool.attach(self._loop, self.console.say)
        return HeldRound(worker_pool, self._machine.feed)

    def _find_job(self) -> MultiNodeJob | None:
        """Return the job of several nodes, where the rendezvous knows one; a foreign handler has rounds only."""
        if not hasattr(self._group.spec.rdzv_handler, "open_session"):
            return None
        from elastic_run.agent.driver.job import MultiNodeJob

        return MultiNodeJob(
            self._group, self._options, self._round_join, loop=self._loop, feed=self._feed, console=self.console
        )

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
        self._observation.tell(lambda recorder, moment: recorder.agent_started(moment))
        try:
            self._guardian_keeper.start()
        except OSError as error:
            detail = f"the guardian process can't be started: {error.strerror}"
            self._finish = messages.Finish("cannot_start", detail=detail)
            return self._conclude()
        try:
            self._machine.begin()
            self._open_control()
            self._loop.call_later(_SETTLED, self._settle)
            self._loop.run_until(self._is_finished)
        except BaseException as error:
            # A defect, or Ctrl-C in a program that has kept SIGINT to itself: the workers get their grace all the same.
            self._stop_after(error)
            raise
        return self._conclude()

    def _open_control(self) -> None:
        from elastic_run.agent.driver.control import open_control

        self._control = open_control(self._parts, self._rounds, started=self._started)

    def _settle(self) -> None:
        from elastic_run.agent.driver import late_imports  # noqa: F401 - the workers come first
        from elastic_run.agent.driver.control import serve_control

        if self._control is not None:
            serve_control(self._parts, self._control)

    @property
    def restart_count(self) -> int:
        """Number of restarts of the workers so far."""
        return self._machine.agent.restart_count

    @property
    def rendezvous_error(self) -> Exception | None:
        """The error that prevented a round: the job's, or the exception of a foreign handler."""
        return self._joining.handler_error if self._job is None else self._job.error

    @property
    def start_error(self) -> Exception | None:
        """The error for which the program of this node's workers could not be started."""
        return self._rounds.start_error

    def return_values(self) -> dict[int, Any]:
        """Return the values of the workers' functions in the last round by global rank; empty for commands."""
        return self._rounds.return_values()

    def _conclude(self) -> JobResult:
        if self._job is not None and self._job.place is not None:
            self._history.add_versions(self._job.place.versions)
        if self._job is not None and self._job.ended is not None:
            self._history.add_verdict(self._job.ended)
        result = self._history.conclude(self._finish or messages.Finish("internal_error"), self._machine.agent)
        self._observation.tell(lambda recorder, moment: recorder.agent_ended(moment, result))
        self._observation.begin()
        self._result = result
        return result

    def _is_finished(self) -> bool:
        is_checking = self._checks is not None and self._checks.is_running
        return self._finish is not None and not self._background.is_ending and not is_checking

    def _stop_after(self, error: BaseException) -> None:
        if self._rounds.current is None and self._job is None:
            return  # nothing was started, so nothing has to be stopped
        if isinstance(error, KeyboardInterrupt):
            self._feed(messages.Signalled(SIGINT))
        else:
            from elastic_run.utils.exceptions import describe_exception

            # The caller tells the exception; a line says before why workers that run are stopped.
            self._is_quiet = self._rounds.current is None or not self._rounds.current.workers.alive
            self._signals.stop_without(SIGTERM, describe_exception(error))
        wait_limit = self._options.shutdown_timeout + KILL_LIMIT + _MOMENT
        self._loop.run_until(self._is_finished, self._loop.now() + wait_limit)

    def close(self) -> None:
        """Give back everything: store, temporary files, guardian, console, signal handlers."""
        self._machine.close()
        before = self._signals.seen
        try:
            if self._job is not None:
                barrier = self._options.node_config.exit_barrier_timeout or 0.0
                self._job.close(barrier, is_hurried=lambda: self._signals.seen > before)
            self._round_join.close()
            self._rounds.watches.close()
            self._clean_up()
        finally:
            try:
                if self._context.worker_pool is not None:
                    self._context.worker_pool.close()
                self._guardian_keeper.close(is_clean=self._is_finished())
                self._observation.close()
                self.plugin_calls.close()
                self._flush(before)
                if self._options.is_whole_process:
                    self._let_go_of_signals()
            finally:
                for server in (self._control, self._context.health_port, self._context.metrics_port):
                    if server is not None:
                        server.close()
                self.console.close()
                self._loop.close()

    def _clean_up(self) -> None:
        """Remove temporary files, by a plug-in's logs specs as well."""
        is_failure = self._finish is not None and self._finish.verdict == "worker_failed"
        if call := self._context.find_clean_up(is_failure=is_failure):
            close_part(self._context.logs_specs, call, self.plugin_calls.post)

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
            self._machine.feed(event)

    def _observe_step(
        self, before: machine.Agent, event: Event, after: machine.Agent, commands: tuple[Command, ...]
    ) -> None:
        place, halt = (None, "") if self._job is None else (self._job.place, self._job.halt)
        sender = self._senders.find(event.number) if isinstance(event, messages.Signalled) else ""
        step = Step(before, event, after, commands, place, halt, sender)
        self._observation.tell(lambda recorder, moment: recorder.stepped(moment, step))
        if machine.has_news(before, after) and not self._is_quiet:
            self._history.tell(before, after, commands)

    @property
    def _history(self) -> History:
        """The history; its modules are imported after the first worker was started: no worker waits for them."""
        if self._lazy_history is None:
            from elastic_run.agent.history import History

            self._lazy_history = History(self._context, self._senders, self.console.say)
        return self._lazy_history

    def _perform_forward(self, command: messages.Forward) -> None:
        self._senders.passed_on.add(command.signal)
        self._signals.forward(command.signal)

    def _perform_pause(self, command: messages.Pause) -> None:
        self._loop.call_later(command.delay, lambda: self._feed(messages.PauseOver(command.round)))

    def _perform_await_cause(self, command: messages.AwaitCause) -> None:
        self._history.tell_awaiting_cause(command.delay)
        # Not before: the signal lets `signal.pause` return, and a worker that tells the cause needs no question.
        before = max(0.0, command.delay - WAIT_BEFORE_STOP)
        self._loop.call_later(before, lambda: self._rounds.stacks.ask_before_stop(command.round))
        self._loop.call_later(command.delay, lambda: self._feed(messages.WaitOver(command.round)))

    def _perform_finish(self, command: messages.Finish) -> None:
        self._finish = command
        if self._checks is not None:
            self._checks.cancel()
        self._background.conclude(is_success=command.verdict == "success")

    def _perform_join(self, command: messages.Join) -> None:
        is_joined = self._rounds.has_launched
        self._check_first(command.round, lambda: self._joining.begin(command.round, is_joined=is_joined))

    def _perform_start_workers(self, command: messages.StartWorkers) -> None:
        self._rounds.start(command, joined_at=self._joining.began_at)

    def _check_first(self, number: int, go_on: Callable[[], None]) -> None:
        """Go on towards the next round when its checks hold; see `round_checks`."""
        former = () if (current := self._rounds.current) is None else tuple(current.workers.pids.values())
        if not (self._options.node_config.health_check or former):
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
        self._checks.begin(former)

    def _perform_warn(self, _: messages.Warn) -> None:
        if self._options.scale_up_signal:
            self._senders.warned_with.add(self._options.scale_up_signal)
            self._signals.forward(self._options.scale_up_signal)
