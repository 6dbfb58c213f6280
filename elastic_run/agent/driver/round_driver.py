"""The workers of an agent's rounds: starts them, watches them, stops them, and tells the machine how they ended.

It performs the machine's commands StartWorkers, StopWorkers and Hurry. Nothing is decided here.
"""

from __future__ import annotations

import gc
import os

from elastic_run.agent import steps
from elastic_run.agent.driver.round import Round
from elastic_run.agent.driver.stack_reports import StackReports
from elastic_run.agent.driver.watches import Watches
from elastic_run.agent.driver.worker_launch import launch_workers
from elastic_run.core.agent import machine, messages
from elastic_run.signals import SIGINT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.background import Background
    from elastic_run.agent.driver.flight_recorder import RecorderQuestion
    from elastic_run.agent.driver.hang_detection import Hang
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.worker_launch import LaunchedWorkers
    from elastic_run.core.agent.messages import Event
    from elastic_run.core.failure.root_cause import WorkerEnd
    from elastic_run.core.job.restart_policy import Failure
    from elastic_run.timer.requests import FileTimerRequest

#: Seconds in which only the workers' first lines count: programs that are quick to start have written some by then.
_FIRST_LINES = 0.05
#: Seconds after which workers are past their own start, or fail for a reason that needs no hurry.
_SETTLED = 1.0


class RoundDriver:
    """Drives the rounds of one agent, one after another.

    Args:
        parts: The parts of the agent.
        launched: The first round's workers, if they were started already.
        background: Keeps processes that workers leave running.
        on_step: Called with each step of a round (`agent.steps`), and its duration in milliseconds.
        on_timer: Called with the name of an event of the workers' timers, and the request that it is about.

    Attributes:
        current: The current round, or the last one, or None before the first.
        failure: The last round's failure for the restart policy, or None.
        start_error: The error for which the program of this node's workers could not be started, or None.
        stacks: Shows the workers' stacks.
        watches: The watches over the current round.
    """

    def __init__(
        self,
        parts: AgentParts,
        launched: LaunchedWorkers | None,
        *,
        background: Background,
        on_step: Callable[[str, float], None],
        on_timer: Callable[[str, FileTimerRequest | None], None],
    ) -> None:
        self.current: Round | None = None
        self.failure: Failure | None = None
        self.start_error: Exception | None = None
        self.stacks = StackReports(
            parts.context,
            parts.loop,
            parts.console,
            current_round=lambda: self.current,
            find_state=lambda: parts.find_agent().state,
            keep=lambda dumps: parts.find_history().keep_overdue(dumps),
            keep_before_stop=lambda dumps: parts.find_history().keep_before_stop(dumps),
        )
        self.watches = Watches(
            parts.loop,
            parts.context,
            parts.job,
            is_polled=parts.job is None and not parts.round_join.is_immediate,
            say=parts.console.say,
            on_stuck=lambda number: parts.feed(messages.WorkerStuck(number)),
            on_failed=self._fail_alive,
            on_hang=self._react_to_hang,
            on_waiting_nodes=self._stop_for_waiting_nodes,
            read_resources=self._read_resources if parts.observation.is_written else None,
            on_timer=on_timer,
        )
        self._parts = parts
        self._context = parts.context
        self._options = parts.context.options
        self._loop = parts.loop
        self._observation = parts.observation
        self._job = parts.job
        self._say = parts.console.say
        self._feed = parts.feed
        self._find_agent = parts.find_agent
        self._find_history = parts.find_history
        self._launched = launched
        self._background = background
        self._on_step = on_step
        self._stopped_at = 0.0
        self._collection: RecorderQuestion | None = None
        self._is_observing = False
        self._is_reaping = False
        self._end_faults: Callable[[], None] = lambda: None

    @property
    def has_launched(self) -> bool:
        """Whether the workers of the next round were started already."""
        return self._launched is not None

    def start(self, command: messages.StartWorkers, *, joined_at: float) -> None:
        """Start the workers of a round, unless they were started already, and watch them.

        Args:
            command: The machine's command.
            joined_at: Monotonic seconds at which the round was asked for.
        """
        self._tell_step(steps.RENDEZVOUS, joined_at)
        # The rendezvous has brought the ranks of all nodes with it.
        self._on_step(steps.ASSIGN_WORKER_RANKS, 0.0)
        launched = self._take_launched() or self._launch()
        self.current = current = self._make_round(command.round, launched)
        try:
            current.watch()
        except (OSError, ValueError) as error:
            if launched.is_of_plugin:
                raise
            self._tell_start_failed(command.round, error)
        else:
            self._tell_step(steps.START, launched.started)
            self._inject_faults(current)
            self._observation.tell(lambda recorder, moment: recorder.workers_started(moment, current))
        if self._is_observing or self._job is not None:
            self._begin_to_observe()
        else:
            self._loop.call_later(_FIRST_LINES, self._begin_to_observe)
        current.output.resize()  # the window may have changed since the workers' terminals got its size
        if self._options.is_whole_process:
            self._context.adopt_orphans()
            self._begin_to_reap()
        # Now the workers need the processors. Preparations for a quick answer to a failure wait until they are up.
        self._loop.call_later(_SETTLED, self._prepare_for_failure)
        if self._context.worker_pool is not None:
            self._loop.call_later(_SETTLED, self._context.worker_pool.tell_sharing)
        self.watches.begin(current)

    def _make_round(self, number: int, launched: LaunchedWorkers) -> Round:
        return Round(
            self._context,
            launched,
            loop=self._loop,
            console=self._parts.console,
            number=number,
            restart_count=self._find_agent().restart_count,
            on_exit=lambda rank, code: self._on_exit(number, rank, code),
            on_output=self._on_output,
            on_overdue=self.stacks.tell_before_kill,
            on_uncaught=self._take_uncaught,
        )

    def _tell_start_failed(self, number: int, error: OSError | ValueError) -> None:
        from elastic_run.agent.driver.start_errors import start_failed

        self.start_error = error
        spec = self._context.group.spec
        program = spec.entrypoint if isinstance(spec.entrypoint, str) else spec.get_entrypoint_name()
        self._feed(start_failed(number, error, program))

    def _inject_faults(self, current: Round) -> None:
        if faults := self._options.faults:
            from elastic_run.agent.driver.fault_injection import inject_faults

            self._end_faults = inject_faults(faults, current, self._context.group, loop=self._loop, say=self._say)

    def _take_launched(self) -> LaunchedWorkers | None:
        launched, self._launched = self._launched, None
        return launched

    def _launch(self) -> LaunchedWorkers:
        source = self._parts.round_join if self._job is None else self._job
        return launch_workers(
            self._context,
            restart_count=self._find_agent().restart_count,
            use_agent_store=source.use_agent_store,
            on_fork=self._give_up,
        )

    def _give_up(self) -> None:
        """In a forked worker: close the launcher's descriptors."""
        self._loop.abandon()
        self._context.guardian.abandon()

    def _begin_to_observe(self) -> None:
        """Begin with what takes milliseconds: the first lines of the first workers would have to wait for it."""
        self._is_observing = True
        self._find_history().begin()
        self._observation.begin()
        if self._options.is_whole_process:
            gc.enable()

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

    def _prepare_for_failure(self) -> None:
        if self._find_agent().state != machine.ENDED:
            self._find_history().prepare()
            if self.current is not None:
                self.current.listen_for_stacks()

    def _on_output(self, local_rank: int, silence: float | None) -> None:
        self.watches.note_output(local_rank)
        if (current := self.current) is not None:
            self._observation.tell(lambda recorder, moment: recorder.output_came(moment, current, local_rank, silence))

    def _read_resources(self) -> None:
        """Write to the event log what the workers have used."""
        from elastic_run.agent.driver.resource_readings import read_usage

        if (current := self.current) is not None:
            usage = read_usage(current)
            self._observation.tell(lambda recorder, moment: recorder.resources_read(moment, current, usage))

    def find_silences(self) -> dict[int, float]:
        """Return seconds since the last output of each worker that runs, by global rank."""
        return {} if self.current is None else self.current.find_silences()

    def _on_exit(self, number: int, local_rank: int, exitcode: int) -> None:
        if (ended := self.current) is not None:
            self._observation.tell(lambda recorder, moment: recorder.worker_exited(moment, ended, local_rank, exitcode))
        self._feed_exit(number, local_rank, exitcode)

    def _take_uncaught(self, local_rank: int) -> None:
        """Watch a worker whose main thread an exception has ended; after its round is stopped, its end tells all."""
        if self.current is not None and self._is_running(self.current.number):
            self.watches.add_failed(self.current, local_rank)

    def _fail_alive(self, current: Round, local_rank: int) -> None:
        """Let a worker that has failed and does not end count as one that has ended."""
        current.count_as_failed(local_rank)
        self._feed_exit(current.number, local_rank, 1)

    def _feed_exit(self, number: int, local_rank: int, exitcode: int) -> None:
        # If other workers still run, or other nodes, one of them may have the root cause.
        agent = self._find_agent()
        has_others = self._job is not None or agent.running != {local_rank}
        is_asked = exitcode != 0 and has_others and agent.state == machine.RUNNING
        current = self.current if is_asked else None
        self._feed(
            messages.WorkerExited(
                number,
                local_rank=local_rank,
                exitcode=exitcode,
                is_secondary=current is not None and current.is_secondary(local_rank),
            )
        )

    def _stop_for_waiting_nodes(self, number: int) -> None:
        if self._find_agent().state == machine.RUNNING:
            self._say("stopping the workers: nodes wait to join")
        self._feed(messages.RoundHalted(number))

    def _react_to_hang(self, current: Round, found: Hang) -> None:
        from elastic_run.agent.driver.hang_reaction import HangReaction

        reaction = HangReaction(
            self._context,
            self._loop,
            say=self._say,
            write=self.stacks.write,
            stop=self._stop_hung,
            fail=self._fail_alive,
            is_running=lambda hung: self._is_running(hung.number),
        )
        action = self._options.agent_config.hang_action
        self._observation.tell(lambda recorder, moment: recorder.hang_found(moment, found, action))
        reaction.react(current, found)

    def _stop_hung(self, end: WorkerEnd, event: Event) -> None:
        if self._is_running(event.round):
            self._find_history().blame(end)
            self._feed(event)

    def _is_running(self, number: int | None) -> bool:
        agent = self._find_agent()
        return agent.state == machine.RUNNING and agent.round == number

    def stop(self, command: messages.StopWorkers) -> None:
        """Stop the workers, or leave their background processes alone after a success."""
        agent = self._find_agent()
        self.watches.end_round()
        self._end_faults()
        self._stopped_at = self._loop.now()
        if self.current is not None:
            is_success = agent.stop_reason == machine.AFTER_SUCCESS
            if is_success and not self._options.agent_config.kill_background_processes:
                self.current.workers.release(self._on_released)
            else:
                self._stop_workers(self.current, command.signal, has_dumps=not is_success)
        if self._context.worker_pool is not None and machine.may_start_again(agent):
            self._context.worker_pool.prepare()

    def hurry(self) -> None:
        """Wait for nothing more: kill the workers that are being stopped."""
        if self._collection is not None:
            self._collection.finish()
        if self.current is not None:
            self.current.workers.hurry()

    def return_values(self) -> dict[int, Any]:
        """Return the values of the workers' functions in the last round by global rank; empty for commands."""
        return {} if self.current is None else self.current.return_values()

    def _stop_workers(self, current: Round, number: int, *, has_dumps: bool) -> None:
        """Stop the workers, after the living ones have written the dumps of their flight recorders."""
        recorder = self._context.flight_recorder

        if self._find_agent().stop_reason == machine.AFTER_SIGNAL:
            from elastic_run.agent.driver.last_words import keep_last_words

            keep_last_words(current, self._loop.now())

        def stop() -> None:
            self._collection = None
            if number == SIGINT:
                current.output.fold_interrupts()
            current.workers.stop(number, self._options.shutdown_timeout, self._on_gone)

        if recorder is None or not has_dumps:
            stop()
        else:
            self._collection = recorder.collect(self._loop, stop)

    def _on_released(self, background: list[int]) -> None:
        if background and self.current is not None:
            self._background.keep(self.current)
        self._on_gone([])

    def _on_gone(self, survivors: list[int]) -> None:
        current = self.current
        if current is None:
            return
        history = self._find_history()
        self.failure = history.add_round(current, survivors)
        history.tell_folded(current)
        ends, root = history.last_ends, history.last_root
        self._observation.tell(lambda recorder, moment: recorder.round_gone(moment, ends, root, len(survivors)))
        if self.failure is not None:
            self._on_step(steps.FAILED, 0.0)
        if self._find_agent().stop_reason != machine.AFTER_SUCCESS:
            self._tell_step(steps.STOP, self._stopped_at)
        self._feed(messages.GroupGone(current.number, failure=self.failure, is_unkillable=bool(survivors)))

    def _tell_step(self, step: str, began_at: float) -> None:
        self._on_step(step, (self._loop.now() - began_at) * 1000)
