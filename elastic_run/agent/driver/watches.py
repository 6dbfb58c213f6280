"""The watches over a running round beside the loop: state D, timers, waiting nodes, failures, hangs, resources.

Each watch is imported and runs only if the user asked for it, except for the watches over quiet rounds and over ranks
that have failed and live (`failed_ranks`, `last_words`).
"""

from __future__ import annotations

from elastic_run.multiprocessing.process.stack_pipe import is_possible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.d_state import DStateWatch
    from elastic_run.agent.driver.failed_ranks import FailedRanks
    from elastic_run.agent.driver.hang_detection import Hang, HangDetection
    from elastic_run.agent.driver.job import MultiNodeJob
    from elastic_run.agent.driver.last_words import LastWords
    from elastic_run.agent.driver.quiet_watch import QuietWatch
    from elastic_run.agent.driver.resource_readings import ResourceReader
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.timers import TimerWatch, WorkerTimers
    from elastic_run.agent.driver.waiting_nodes import WaitingNodesWatch
    from elastic_run.agent.plugin_calls import PluginCalls
    from elastic_run.loop import Loop, Timer
    from elastic_run.timer.requests import FileTimerRequest

#: Seconds after which workers are past their own start.
_SETTLED = 1.0
#: Seconds without progress that are a hang where the workers have done nothing for minutes, and seconds in which all
#: nodes have to find that.
_QUIET_TIMEOUT = 10.0
_LOOK_TIME = 60.0


class Watches:
    """The watches of one agent.

    Args:
        loop: The agent's loop.
        context: The workers and the user's settings.
        job: This node's part in a job of several nodes, or None.
        is_polled: Whether the rendezvous has to be asked for waiting nodes, as with a foreign handler.
        say: Tells the user one line.
        on_stuck: Called with a round's number when one of its workers stays in uninterruptible sleep.
        on_failed: Called with a round, and with the local rank of a worker that has failed and does not end.
        on_hang: Called with a round when the job hangs in it.
        on_waiting_nodes: Called with a round's number when nodes wait for the next one.
        read_resources: Writes the workers' resources to the event log; None without an event log.
        on_timer: Called with the name of an event of the workers' timers, and the request that it is about.
    """

    def __init__(  # noqa: PLR0913 - a callback for each watch
        self,
        loop: Loop,
        context: AgentContext,
        job: MultiNodeJob | None = None,
        *,
        is_polled: bool,
        say: Callable[[str], None],
        on_stuck: Callable[[int], None],
        on_failed: Callable[[Round, int], None],
        on_hang: Callable[[Round, Hang], None],
        on_waiting_nodes: Callable[[int], None],
        read_resources: Callable[[], None] | None,
        on_timer: Callable[[str, FileTimerRequest | None], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._job = job
        self._is_polled = is_polled
        self._say = say
        self._on_stuck = on_stuck
        self._on_failed = on_failed
        self._on_hang = on_hang
        self._on_waiting_nodes = on_waiting_nodes
        self._on_timer = on_timer
        self._read_resources = read_resources
        self._round: Round | None = None
        self._d_state: DStateWatch | None = None
        self._timers: TimerWatch | None = None
        self._waiting_nodes: WaitingNodesWatch | None = None
        self._quiet: QuietWatch | None = None
        self._hang: HangDetection | None = None
        self._failed: FailedRanks | None = None
        self._last_words: LastWords | None = None
        self._resources: ResourceReader | None = None
        self._late_start: Timer | None = None
        self._look_end: Timer | None = None

    def begin(self, current: Round) -> None:
        """Begin to watch a round; its workers run."""
        self._round = current
        self._hang = None
        if self._context.options.stuck_timeout > 0:
            self._d_state = self._watch_d_state(current)
        if self._context.timers is not None and self._timers is None:
            self._timers = self._watch_timers(self._context.timers)
        if self._is_polled and self._context.plugin_calls is not None:
            self._waiting_nodes = self._watch_waiting_nodes(self._context.plugin_calls, current.number)
        self._late_start = self._loop.call_later(_SETTLED, lambda: self._begin_late(current))

    def _begin_late(self, current: Round) -> None:
        """Begin with what would only delay the start of the workers."""
        settings = self._context.options.agent_config
        is_awake = settings.events_file or settings.metrics_port is not None or settings.hang_timeout is not None
        if self._read_resources is not None:
            self._read_resources()
            if is_awake:
                self._watch_resources(self._read_resources)
        if is_possible():
            self._watch_last_words(current)
        if settings.hang_timeout is not None:
            self._watch_hang(current)
        elif is_possible():
            self._watch_quiet(current)

    def end_round(self) -> None:
        """Look no more after this round: its workers are being stopped."""
        if self._timers is not None:
            self._timers.clear()
        for timer in (self._late_start, self._look_end):
            if timer is not None:
                timer.cancel()
        of_round = (self._d_state, self._waiting_nodes, self._quiet, self._hang, self._failed, self._last_words)
        for watch in (*of_round, self._resources):
            if watch is not None:
                watch.close()
        self._failed = self._last_words = None

    def close(self) -> None:
        """End the watches that outlast a round."""
        if self._timers is not None:
            self._timers.close()

    def add_failed(self, current: Round, local_rank: int) -> None:
        """Watch a worker that has told of the exception which has ended its main thread."""
        if self._failed is None:
            from elastic_run.agent.driver.failed_ranks import FailedRanks

            self._failed = FailedRanks(
                self._loop,
                current,
                limit=self._context.options.shutdown_timeout,
                say=self._say,
                on_failed=lambda rank: self._on_failed(current, rank),
            )
        self._failed.add(local_rank)

    def _watch_last_words(self, current: Round) -> None:
        from elastic_run.agent.driver.last_words import LastWords

        self._last_words = LastWords(self._loop, current)

    def note_output(self, local_rank: int) -> None:
        """Take note that a worker has written something after a silence."""
        if self._last_words is not None:
            self._last_words.note_output(local_rank)

    def _watch_d_state(self, current: Round) -> DStateWatch:
        from elastic_run.agent.driver.d_state import DStateWatch

        workers = current.workers
        return DStateWatch(
            self._loop,
            self._context.options.stuck_timeout,
            pids=lambda: [workers.pids[rank] for rank in workers.alive],
            on_stuck=lambda _: self._on_stuck(current.number),
        )

    def _watch_quiet(self, current: Round) -> None:
        from elastic_run.agent.driver.quiet_watch import QuietWatch

        workers = current.workers
        read = self._read_resources if self._resources is None else None
        self._quiet = QuietWatch(
            self._loop,
            pids=lambda: [workers.pids[rank] for rank in workers.alive],
            on_quiet=lambda seconds: self._look_for_hang(current, seconds),
            on_look=read or (lambda: None),
        )

    def _watch_resources(self, read: Callable[[], None]) -> None:
        from elastic_run.agent.driver.resource_readings import ResourceReader

        self._resources = ResourceReader(self._loop, read)

    def _look_for_hang(self, current: Round, seconds: float) -> None:
        """Look for a short time whether the job hangs, whose workers here have done nothing for some seconds."""
        if self._hang is None:
            self._watch_hang(current, quiet_for=seconds)
            self._look_end = self._loop.call_later(_LOOK_TIME, self._end_look)

    def _end_look(self) -> None:
        if self._hang is not None:
            self._hang.close()
            self._hang = None

    def _tell_hang(self, current: Round, found: Hang) -> None:
        if self._quiet is not None:  # once in a round
            self._quiet.close()
            self._end_look()
        self._on_hang(current, found)

    def _watch_hang(self, current: Round, *, quiet_for: float = 0.0) -> None:
        from elastic_run.agent.driver.hang_detection import HangDetection

        context = self._context
        self._hang = HangDetection(
            self._loop,
            current,
            world_size=context.group.workers[0].world_size,
            timeout=_QUIET_TIMEOUT if quiet_for else context.options.agent_config.hang_timeout or 0.0,
            heartbeats=context.heartbeats,
            recorder=context.flight_recorder,
            job=self._job,
            say=self._say,
            on_hang=lambda found: self._tell_hang(current, found),
            quiet_for=quiet_for,
        )

    def describe_hang(self) -> dict[str, Any]:
        """Return what the other nodes need to know of this node's ranks to judge whether the job hangs."""
        from elastic_run.core.diagnosis.hang import NO_DETECTION, NOT_YET

        if self._hang is not None:
            return self._hang.answer()
        timeout = self._context.options.agent_config.hang_timeout
        if self._round is None or timeout is None or self._round.workers.alive:
            timeout = NO_DETECTION if timeout is None else NOT_YET
        number = -1 if self._round is None else self._round.number
        return {"round": number, "timeout": timeout, "age": 0.0, "workers": []}

    def _watch_timers(self, timers: WorkerTimers) -> TimerWatch:
        from elastic_run.agent.driver.timers import TimerWatch

        return TimerWatch(self._loop, timers.file, ranks=self._ranks, say=self._say, on_event=self._on_timer)

    def _ranks(self) -> dict[int, int]:
        """Return the global rank of each worker that lives, by pid."""
        current = self._round
        if current is None:
            return {}
        pids, alive = current.workers.pids, current.workers.alive
        workers = self._context.group.workers
        return {pids[worker.local_rank]: worker.global_rank for worker in workers if worker.local_rank in alive}

    def _watch_waiting_nodes(self, calls: PluginCalls, number: int) -> WaitingNodesWatch:
        from elastic_run.agent.driver.waiting_nodes import WaitingNodesWatch

        spec = self._context.group.spec
        return WaitingNodesWatch(
            self._loop, calls, spec.rdzv_handler, spec.monitor_interval, lambda: self._on_waiting_nodes(number)
        )
