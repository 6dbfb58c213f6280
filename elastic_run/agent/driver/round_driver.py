"""The workers of an agent's rounds: starts them, watches them, stops them, and tells the machine how they ended.

It performs the machine's commands StartWorkers, StopWorkers and Hurry. Nothing is decided here.
"""

from __future__ import annotations

import errno
import gc
import os

from elastic_run.agent.driver.round import Round
from elastic_run.agent.driver.stack_reports import StackReports
from elastic_run.agent.driver.watches import Watches
from elastic_run.agent.driver.worker_launch import launch_workers
from elastic_run.core.agent import machine, messages
from elastic_run.signals import SIGINT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.background import Background
    from elastic_run.agent.driver.flight_recorder import RecorderQuestion
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.worker_launch import LaunchedWorkers
    from elastic_run.core.job.restart_policy import Failure
    from elastic_run.timer.timer_file import FileTimerRequest

#: Seconds in which only the workers' first lines count: programs that are quick to start have written some by then.
_FIRST_LINES = 0.05
#: Seconds after which workers are past their own start, or fail for a reason that needs no hurry.
_SETTLED = 1.0
#: Bytes of a script's first line: as much as the kernel looks at (BINPRM_BUF_SIZE).
_FIRST_LINE = 256


class RoundDriver:
    """Drives the rounds of one agent, one after another.

    Args:
        parts: The parts of the agent.
        launched: The first round's workers, if they were started already.
        background: Keeps processes that workers leave running.
        on_step: Called with torch's name of each step of a round, and its duration in milliseconds.
        on_timer: Called with the name of an event of the workers' timers, and the request that it is about.

    Attributes:
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
        self.failure: Failure | None = None
        self.start_error: Exception | None = None
        self.stacks = StackReports(parts)
        self.watches = Watches(parts, self.stacks, on_timer)
        self._parts = parts
        self._context = parts.context
        self._options = parts.context.options
        self._loop = parts.loop
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
        """Start the workers of a round that was asked for at `joined_at`, unless they were started, and watch them."""
        self._record_step("RENDEZVOUS", joined_at)
        # The rendezvous has brought the ranks of all nodes with it.
        self._on_step("ASSIGN_WORKER_RANKS", 0.0)
        launched, self._launched = self._launched or self._launch(), None
        current = self._parts.current = Round(
            self._context,
            launched,
            loop=self._loop,
            console=self._parts.console,
            number=command.round,
            restart_count=self._parts.agent.restart_count,
            on_exit=self._on_exit,
            on_output=self._on_output,
            on_overdue=self.stacks.tell_before_kill,
            on_uncaught=self._on_uncaught,
        )
        try:
            current.watch()
        except (OSError, ValueError) as error:
            if launched.is_of_plugin:
                raise
            self.start_error = error
            spec = self._context.group.spec
            program = spec.entrypoint if isinstance(spec.entrypoint, str) else spec.get_entrypoint_name()
            self._parts.feed(explain_failed_start(command.round, error, program))
        else:
            self._record_step("START", launched.started)
            if faults := self._options.faults:
                from elastic_run.agent.driver.fault_injection import inject_faults

                self._end_faults = inject_faults(
                    faults, self._context.group.workers, current, loop=self._loop, say=self._parts.say
                )
            self._parts.observation.record(lambda recorder, moment: recorder.workers_started(moment, current))
        if self._is_observing or self._parts.job is not None:
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

    def _launch(self) -> LaunchedWorkers:
        source = self._parts.job or self._parts.round_join

        def give_up() -> None:
            """In a forked worker: close the launcher's descriptors."""
            self._loop.abandon()
            self._context.guardian.abandon()

        return launch_workers(
            self._context,
            restart_count=self._parts.agent.restart_count,
            use_agent_store=source.use_agent_store,
            on_fork=give_up,
        )

    def _begin_to_observe(self) -> None:
        """Begin with what takes milliseconds: the first lines of the first workers would have to wait for it."""
        self._is_observing = True
        self._parts.history.begin()
        self._parts.observation.begin()
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
        """Import what the end or a restart of the job needs; see `History.prepare`."""
        import elastic_run.agent.driver.failed_ranks
        import elastic_run.agent.driver.round_checks  # noqa: F401

        if self._parts.agent.state != machine.ENDED:
            self._parts.history.prepare()
            if self._parts.current is not None:
                self._parts.current.listen_for_stacks()

    # --- while it runs ---------------------------------------------------------------------------------------------
    def _on_output(self, current: Round, local_rank: int, silence: float | None) -> None:
        self.watches.add_output(local_rank)
        self._parts.observation.record(
            lambda recorder, moment: recorder.output_came(moment, current, local_rank, silence)
        )

    def _on_exit(self, current: Round, local_rank: int, exitcode: int) -> None:
        self._parts.observation.record(
            lambda recorder, moment: recorder.worker_exited(moment, current, local_rank, exitcode)
        )
        self._parts.feed_exit(current, local_rank, exitcode)

    def _on_uncaught(self, current: Round, local_rank: int) -> None:
        """Watch a worker whose main thread an exception has ended; after its round is stopped, its end tells all."""
        if self._parts.is_running(current.number):
            self.watches.add_failed(current, local_rank)

    # --- the stop --------------------------------------------------------------------------------------------------
    def stop(self, command: messages.StopWorkers) -> None:
        """Stop the workers, or leave their background processes alone after a success."""
        agent, current = self._parts.agent, self._parts.current
        self.watches.end_round()
        self._end_faults()
        self._stopped_at = self._loop.now()
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
        recorder = self._context.flight_recorder
        if self._parts.agent.stop_reason == machine.AFTER_SIGNAL:
            from elastic_run.agent.driver.failed_ranks import keep_last_words

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

    def hurry(self) -> None:
        """Wait for nothing more: kill the workers that are being stopped."""
        if self._collection is not None:
            self._collection.finish()
        if self._parts.current is not None:
            self._parts.current.workers.hurry()

    def _on_released(self, background: list[int]) -> None:
        if background and self._parts.current is not None:
            self._background.keep(self._parts.current)
        self._on_gone([])

    def _on_gone(self, survivors: list[int]) -> None:
        current = self._parts.current
        if current is None:
            return
        history = self._parts.history
        failure = self.failure = history.add_round(current, survivors)
        history.tell_folded(current)
        ends, root = history.ends, history.root
        self._parts.observation.record(lambda recorder, moment: recorder.round_gone(moment, ends, root, len(survivors)))
        if failure is not None:
            self._on_step("FAILED", 0.0)
        if self._parts.agent.stop_reason != machine.AFTER_SUCCESS:
            self._record_step("STOP", self._stopped_at)
        self._parts.feed(messages.GroupGone(current.number, failure=failure, is_unkillable=bool(survivors)))

    def _record_step(self, step: str, began_at: float) -> None:
        self._on_step(step, (self._loop.now() - began_at) * 1000)


def explain_failed_start(number: int, error: Exception, program: str) -> messages.RoundFailed:
    """Return the event that says why a program could not be started, in words for the user."""
    if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
        detail = f"{program} is not in a format that can be executed: a script needs a first line such as #!/bin/bash"
        return messages.RoundFailed(number, verdict="not_executable", detail=detail)
    is_program = getattr(error, "filename", None) in (None, program)
    if isinstance(error, FileNotFoundError) and is_program:
        return messages.RoundFailed(number, verdict="not_found", detail=f"{program}: {_name_missing(program)}")
    if isinstance(error, PermissionError) and is_program:
        return messages.RoundFailed(number, verdict="not_executable", detail=_name_denied(program, error.filename))
    return messages.RoundFailed(number, verdict="cannot_start", detail=f"{program} can't be started: {error}")


def _name_denied(program: str, path: object) -> str:
    """Name the file or directory that denies the execution, of the program or of its interpreter."""
    from elastic_run.files import find_program, name_denier

    found = path if isinstance(path, str) and os.path.dirname(path) else find_program(program, os.environ) or program
    denier = name_denier(found) if os.path.dirname(found) else ""
    interpreter = _read_interpreter(found)
    if not denier and interpreter and not os.access(interpreter, os.X_OK):
        return f"{program}: its interpreter {interpreter!r} may not be executed{name_denier(interpreter)}"
    return f"{program} may not be executed{denier}"


def _name_missing(program: str) -> str:
    """Name the missing file. The system gives the same error for a missing script and for a missing interpreter."""
    from elastic_run.files import find_program

    path = find_program(program, os.environ)
    if path is None:
        return "no such program"
    interpreter = _read_interpreter(path)
    if interpreter and not os.path.exists(interpreter):
        return f"its first line names the interpreter {interpreter!r}, which does not exist"
    return "its interpreter or loader does not exist here"


def _read_interpreter(path: str) -> str:
    """Return the interpreter in the first line of a script, as the kernel reads it; empty for other programs."""
    try:
        with open(path, "rb") as file:
            start = file.read(_FIRST_LINE)
    except OSError:
        return ""
    line = start.partition(b"\n")[0].replace(b"\t", b" ")
    return os.fsdecode(line[2:].strip(b" ").partition(b" ")[0]) if line.startswith(b"#!") else ""
