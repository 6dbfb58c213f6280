"""The driver of one agent: makes its parts, brings their events to its state machine, and has the commands performed.

- Nothing is decided here: `core.agent.machine` decides. One event at a time, in order: an event that arises while
  commands are performed waits until they are done.
- All work happens in the loop's thread, except a rendezvous that blocks.
- Signals need the main thread. In another thread, the program around us stops the agent through
  `SimpleElasticAgent._shutdown`.
"""

from __future__ import annotations

import os
import time
from collections import deque

from elastic_run.agent.control_server import ControlServer
from elastic_run.agent.driver.event_recorder import EventRecorder
from elastic_run.agent.driver.round_driver import RoundDriver
from elastic_run.agent.plugin_calls import PluginCalls, close_part
from elastic_run.agent.worker_launch import RoundJoin
from elastic_run.core.agent import machine, messages
from elastic_run.core.agent.shutdown import KILL_LIMIT
from elastic_run.core.job.restart_policy import CAUSE_WAIT
from elastic_run.loop import Loop
from elastic_run.multiprocessing.fork_exec import ensure_standard_descriptors, list_handled
from elastic_run.multiprocessing.output.console import Console
from elastic_run.signals import SIGINT, SIGQUIT, SIGTERM, SIGWINCH, restore_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.driver import AgentParts
    from elastic_run.agent.worker_launch import LaunchedWorkers
    from elastic_run.core.agent.messages import Command, Event
    from elastic_run.core.failure.job_result import JobResult

#: Seconds that are long for a reader of the output, or for the loop, and short for a person.
_MOMENT = 2.0
#: Seconds after which workers are past their own start: what commands need may be imported then.
_SETTLED = 1.0


class Supervisor:
    """Runs the rounds of one agent; `early_start` are the workers of the first round, if they run already."""

    def __init__(self, context: AgentParts, early_start: LaunchedWorkers | None = None) -> None:
        # Before anything is opened: a closed standard descriptor's number would go to the first file.
        ensure_standard_descriptors()
        self._context, self._options = context, context.options
        self._loop = context.loop = Loop()
        try:
            self.console = context.console = Console(self._loop)
        except OSError:
            self._loop.close()
            raise
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._is_closed = False
        self._is_quiet = False
        self._finish: messages.Finish | None = None
        self._result: JobResult | None = None
        self._signals_seen = 0
        context.started = self._loop.now()
        context.feed = self._feed
        self._round_join = (early_start and early_start.round_join) or RoundJoin(context)
        self._round_join.serve()
        if hasattr(context.group.spec.rdzv_handler, "open_session"):
            from elastic_run.agent.driver.job import MultiNodeJob

            context.job = MultiNodeJob(context, self._round_join)
        self._job = context.job
        context.agent = machine.Agent(
            config=self._options.job_config,
            local_world_size=context.group.spec.local_world_size,
            forwarded=frozenset(self._options.forwarded),
            follows_job=self._job is not None,
            wait_limit=min(CAUSE_WAIT, self._options.shutdown_timeout),
        )
        self._recorder = context.events = EventRecorder(context)
        self.plugin_calls = context.plugin_calls = PluginCalls(
            self._loop, context.say, grace=self._options.shutdown_timeout, count_signals=lambda: self._signals_seen
        )
        self._end_kept_server: Callable[[], None] = lambda: None
        #: Events of a round that waits, and whether it waits for warm workers.
        self._waiting: list[Event] = []
        self._is_warming = False
        if context.worker_pool is not None:
            context.worker_pool.attach(self._loop, context.say)
        self.rounds = RoundDriver(context, self._round_join, early_start, on_background_ended=self._feed_waiting)
        self._control = ControlServer(context, self.rounds.watches)
        if context.health_port is not None:
            context.health_port.serve_health(self._loop, lambda: context.agent.state)
        if context.metrics_port is not None:
            context.metrics_port.serve_metrics(
                self._loop, lambda: context.agent.state, self._find_silences, context.kept, self._find_shares
            )
        if self._options.stop_time:
            # The wall clock is read once: a clock that is set later moves nothing.
            self._loop.call_later(max(0.0, self._options.stop_time - time.time()), self._tell_time_limit)
        self._performers: dict[type[Command], Callable[[Any], object]] = {
            messages.Join: self.rounds.join,
            messages.StartWorkers: self.rounds.start,
            messages.StopWorkers: self.rounds.stop,
            messages.Hurry: lambda _: self.rounds.hurry(),
            messages.Forward: self._pass_on,
            messages.Pause: self._pause,
            messages.AwaitCause: self.rounds.await_cause,
            messages.Warn: self._warn,
            messages.ReportFailing: self.rounds.report_failing,
            messages.ReportReady: self.rounds.report_ready,
            messages.Leave: self._leave,
            messages.Finish: self._end,
        }

    def _find_silences(self) -> dict[int, float]:
        return {} if self._context.current is None else self._context.current.find_silences()

    def _find_shares(self) -> dict[int, float]:
        return {} if (watch := self.rounds.watches.slow_ranks) is None else watch.shares

    # --- the run ---------------------------------------------------------------------------------------------------
    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> JobResult:
        """Run to the end."""
        self._watch_signals()
        self._recorder.agent_started()
        try:
            self._context.guardian.attach(self._loop, self._context.say)
        except OSError as error:
            detail = f"the guardian process can't be started: {error.strerror}"
            self._finish = messages.Finish("cannot_start", detail=detail)
            return self._conclude()
        try:
            self._context.agent, commands = machine.begin(self._context.agent)
            self._perform(commands)
            self._control.open(os.environ)
            self._loop.call_later(_SETTLED, self._control.settle)
            if self._context.kept is not None:
                from elastic_run.agent.driver.round_waits import serve_kept_state

                self._end_kept_server = serve_kept_state(self._context, self._context.kept)
            self._loop.run_until(self._is_finished)
        except BaseException as error:
            # A defect, or Ctrl-C in a program that has kept SIGINT to itself: the workers get their grace all the same.
            self._stop_after(error)
            raise
        return self._conclude()

    def _is_finished(self) -> bool:
        is_checking = self.rounds.check is not None and self.rounds.check.is_running
        return self._finish is not None and not self.rounds.is_ending_background and not is_checking

    def _stop_after(self, error: BaseException) -> None:
        current = self._context.current
        if current is None and self._job is None:
            return  # nothing was started, so nothing has to be stopped
        if isinstance(error, KeyboardInterrupt):
            self._feed(messages.Signalled(SIGINT))
        else:
            from elastic_run.utils import describe_exception

            # The caller tells the exception; a line says before why workers that run are stopped.
            self._is_quiet = current is None or not current.workers.alive
            self._stop_without_signal(SIGTERM, describe_exception(error))
        wait_limit = self._options.shutdown_timeout + KILL_LIMIT + _MOMENT
        self._loop.run_until(self._is_finished, self._loop.now() + wait_limit)

    def _conclude(self) -> JobResult:
        history, kept, before = self._context.history, self._context.kept, self._signals_seen
        if kept is not None and self._finish is not None and self._finish.verdict != "success":
            from elastic_run.agent.driver.round_waits import write_kept_state

            write_kept_state(self._context, kept, is_stopped=lambda: self._signals_seen > before)
        if self._job is not None and self._job.place is not None:
            history.versions = self._job.place.versions
        if self._job is not None and self._job.ended is not None:
            history.add_verdict(self._job.ended)
        finish = self._finish or messages.Finish("internal_error")
        self._result = history.conclude(finish, self._context.agent)
        self._recorder.agent_ended(self._result)
        self._recorder.begin()
        if not self._options.is_whole_process:
            return self._result
        if finish.verdict != "success":
            from elastic_run.report.closing_report import print_ending

            print_ending(self._result, self.console, os.environ)
        elif self._result.log_dir and getattr(self._context.logs_specs, "is_unnamed", False):
            self.console.say(f"the log files are in {self._result.log_dir} (--log-dir names another place)")
        return self._result

    @property
    def rendezvous_error(self) -> Exception | None:
        """The error that prevented a round: the job's, or the exception of a foreign handler."""
        return self.rounds.handler_error if self._job is None else self._job.error

    def close(self) -> None:
        """Give back everything: store, temporary files, guardian, console, signal handlers."""
        self._is_closed = True
        context, before = self._context, self._signals_seen
        try:
            if self._job is not None:
                barrier = self._options.node_config.exit_barrier_timeout or 0.0
                self._job.close(barrier, is_hurried=lambda: self._signals_seen > before)
            self._end_kept_server()
            self._round_join.close()
            self.rounds.watches.close()
            context.close_timers()
            self._clean_up()
        finally:
            try:
                if context.worker_pool is not None:
                    context.worker_pool.close()
                self._context.guardian.close(is_clean=self._is_finished())
                self._recorder.close()
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

    def _clean_up(self) -> None:
        """Remove the temporary files; after a failure a program may yet look for those that its exception names."""
        specs = self._context.logs_specs
        is_failure = self._finish is not None and self._finish.verdict == "worker_failed"
        keeps_files = is_failure and not self._options.is_whole_process
        method = "remove_empty_directories" if keeps_files else "cleanup"
        if hasattr(specs, method):
            close_part(specs, method, self.plugin_calls.post)

    def _flush(self, signals_before: int) -> None:
        """Wait for a slow reader of the output, but not after a stop signal, nor when one comes while closing."""
        is_stopped = self._finish is not None and self._finish.signal is not None
        self._loop.run_until(
            lambda: self.console.is_idle or self._signals_seen > signals_before,
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

    # --- events and commands ---------------------------------------------------------------------------------------
    def _feed(self, event: Event) -> None:
        if isinstance(event, (messages.Signalled, messages.JobOver)) or not self._has_to_wait(event):
            self._feed_machine(event)

    def _has_to_wait(self, event: Event) -> bool:
        """Whether a round that was formed waits, and its other events too: a warning reaches no worker then.

        No round begins before the background processes of the last one have ended, and the warm workers are ready or
        are given up. A round that is stopped before begins with cold workers.
        """
        if isinstance(event, messages.RoundFormed):
            self.rounds.end_background()
            pool = self._context.worker_pool
            if pool is not None and not pool.is_settled:
                self._is_warming = True
                pool.await_settled(self._end_warming)
        elif self._is_warming and isinstance(event, messages.RoundHalted):
            self._end_warming()
        if not self._is_waiting:
            return False
        if not isinstance(event, messages.RoundWarned):
            self._waiting.append(event)
        return True

    @property
    def _is_waiting(self) -> bool:
        return self._is_warming or self.rounds.is_ending_background

    def _end_warming(self) -> None:
        self._is_warming = False
        self._feed_waiting()

    def _feed_waiting(self) -> None:
        if not self._is_waiting:
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                self._feed_machine(event)

    def _feed_machine(self, event: Event) -> None:
        self._events.append(event)
        if self._is_feeding or self._is_closed:
            return
        self._is_feeding = True
        try:
            while self._events:
                jitter = int.from_bytes(os.urandom(2), "big") / 65536
                before, event = self._context.agent, self._events.popleft()
                after, commands = machine.decide(before, event, self._loop.now(), jitter)
                self._context.agent = after
                # The event log and the user hear of a step before its commands are performed.
                self._recorder.stepped(event, before, after, commands, self._job)
                if machine.has_news(before, after) and not self._is_quiet:
                    self._context.history.tell(before, after, commands)
                self._perform(commands)
        finally:
            self._is_feeding = False

    def _perform(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            self._performers[type(command)](command)

    def _pause(self, command: messages.Pause) -> None:
        self._loop.call_later(command.delay, lambda: self._feed(messages.PauseOver(command.round)))

    def _pass_on(self, command: messages.Forward) -> None:
        self._context.senders.passed_on.add(command.signal)
        self._forward(command.signal)

    def _warn(self, _: messages.Warn) -> None:
        if number := self._options.scale_up_signal:
            self._context.senders.warned_with.add(number)
            self._forward(number)

    def _leave(self, command: messages.Leave) -> None:
        if self._job is not None:
            self._job.leave(command.reason, command.detail)

    def _end(self, command: messages.Finish) -> None:
        self._finish = command
        if self.rounds.check is not None:
            self.rounds.check.cancel()
        self.rounds.conclude_background(is_success=command.verdict == "success")

    # --- signals ---------------------------------------------------------------------------------------------------
    def request_stop(self, number: int, reason: str = "the program that launches the job stops it") -> None:
        """Stop as if this signal had come; may be called from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._stop_without_signal(number, reason))

    def _stop_without_signal(self, number: int, reason: str) -> None:
        self._signals_seen += 1
        self._context.senders.explain(number, reason)
        self._feed(messages.Signalled(number))

    def _tell_time_limit(self) -> None:
        """Tell the user before the scheduler ends the job, and stop the workers in time if the user asks for it.

        Slurm sends SIGTERM when the time is over, and SIGKILL `KillWait` seconds later: too late for a long
        save. A variable gives the workers the same moment, from which on their `stop_requested()` is true.
        """
        left = max(0, round(self._options.node_config.end_time - time.time()))
        if self._options.node_config.stops_in_time:
            self._context.say(f"the job's time limit is in {left} s: stopping the workers, to run the job again")
            number = self._options.signals[0] if self._options.signals else SIGTERM
            self._stop_without_signal(number, "the job's time limit is near")
        else:
            self._context.say(
                f"the job's time limit is in {left} s: stop_requested() is true in the workers from now on"
            )

    def _watch_signals(self) -> None:
        """Watch from now on; does nothing outside the main thread, where the program around us has the signals."""
        options, loop = self._options, self._loop
        try:
            loop.watch_signals((*options.signals, *options.unnamed_signals), self._on_stop)
            loop.watch_signals(options.forwarded, self._on_forwarded)
            loop.watch_signals(options.offered, self._on_offered)
            has_senders = options.is_whole_process and not options.is_wrapped and loop.find_senders()
            if options.is_whole_process and not has_senders and self._context.mask is not None:
                restore_signals(self._context.mask)
            if SIGWINCH not in list_handled("self"):
                loop.watch_signals((SIGWINCH,), self._on_resize)
            loop.keep_exits()
        except ValueError:
            pass  # not the main thread

    def _forward(self, number: int) -> None:
        if self._context.current is not None:
            self._context.current.workers.forward(number)

    def _read_sender(self, number: int) -> None:
        self._context.senders.add(number, self._loop.senders.get(number))

    def _on_stop(self, number: int) -> None:
        if number == SIGQUIT and self.rounds.show_stacks():
            return
        self._signals_seen += 1
        self._read_sender(number)
        self.rounds.hurry_background()
        self._feed(messages.Signalled(number, None if number in self._options.signals else SIGTERM))

    def _on_forwarded(self, number: int) -> None:
        self._read_sender(number)
        self._feed(messages.Signalled(number))

    def _on_offered(self, number: int) -> None:
        """Pass a signal on to the workers that handle it; in no state that changes anything else."""
        self._read_sender(number)
        current = self._context.current
        reached = [] if current is None else current.workers.offer(number)
        if reached:
            self._context.senders.passed_on.add(number)
        from elastic_run.report import lines

        workers, sender = self._context.group.workers, self._context.senders.find(number)
        ranks = [worker.global_rank for worker in workers if worker.local_rank in reached]
        has_workers = current is not None and bool(current.workers.alive)
        self._context.say(lines.offered(number, sender, ranks, size=len(workers), has_workers=has_workers))

    def _on_resize(self, _: int) -> None:
        if self._context.current is not None:
            self._context.current.output.resize()
