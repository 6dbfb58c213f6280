"""The watches over a running round beside the loop: state D, timers, waiting nodes, hangs, resources, failed ranks.

Each watch is imported and runs only if the user asked for it, except for the watches over quiet rounds and over ranks
that have failed and live.
"""

from __future__ import annotations

from elastic_run.agent.plugin_calls import name_call
from elastic_run.core.agent import messages
from elastic_run.multiprocessing.fork_exec import can_ask_for_stacks
from elastic_run.multiprocessing.output.tail import SILENCE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.agent.driver import AgentParts
    from elastic_run.agent.driver.hang_detection import HangDetection
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.slow_rank import SlowRankWatch
    from elastic_run.agent.driver.timers import TimerWatch
    from elastic_run.agent.driver.worker_readings import Activity
    from elastic_run.core.failure.stacks import Dump
    from elastic_run.loop import Timer

#: Seconds after which workers are past their own start.
_SETTLED = 1.0
#: Seconds between two looks at whether the workers do anything, where the user has not asked for --hang-timeout.
QUIET_PERIOD = 300.0
#: Seconds without progress that are a hang where the workers have done nothing for minutes, and seconds in which all
#: nodes have to find that.
_QUIET_TIMEOUT = 10.0
_LOOK_TIME = 60.0
#: Seconds between two readings of resources: at first, at most, and how many parts of the round's age.
_SHORTEST = 10.0
_LONGEST = 60.0
_PARTS = 60.0
#: Looks at processes in state D within the timeout.
_D_LOOKS = 4
#: Seconds from an exception to the line about it; most workers have ended by then.
_PATIENCE = 5.0
#: Seconds from an exception in which Python ends a program that nothing keeps alive.
_LEAST = 1.0
#: Seconds that a rank gets for its stacks.
_WAIT_LIMIT = 1.5


class Watches:
    """The watches of one agent."""

    def __init__(self, context: AgentParts) -> None:
        self._context = context
        self._loop = context.loop
        self._options = context.options
        self._round: Round | None = None
        self._timers: TimerWatch | None = None
        self._hang: HangDetection | None = None
        self._failed: _FailedRanks | None = None
        #: The watch over the last round's ranks, where torch's flight recorder is on.
        self.slow_ranks: SlowRankWatch | None = None
        #: Timers of this round, by the watch that has set them.
        self._due: dict[str, Timer] = {}
        self._stuck_since: dict[int, float] = {}

    def begin(self, current: Round) -> None:
        """Begin to watch a round; its workers run."""
        self._round = current
        self._hang = None
        if self._options.stuck_timeout > 0:
            self._look_at_states(current)
        if (file := self._context.timer_file) is not None and self._timers is None:
            from elastic_run.agent.driver.timers import TimerWatch

            file.say = self._context.say
            self._timers = TimerWatch(self._loop, file, self._list_ranks, self._context.on_timer)
        handler: Any = self._context.group.spec.rdzv_handler
        if self._context.job is None and not getattr(handler, "is_immediate", False):
            self._ask_for_nodes(current)
        self._due["late start"] = self._loop.call_later(_SETTLED, lambda: self._begin_late(current))

    def _begin_late(self, current: Round) -> None:
        """Begin with what would only delay the start of the workers."""
        settings = self._options.agent_config
        if self._context.events.is_written:
            is_awake = settings.events_file or settings.metrics_port is not None or settings.hang_timeout is not None
            self._read_resources(current, is_awake=bool(is_awake))
        if can_ask_for_stacks() and self._failed is None:
            self._failed = _FailedRanks(self._context, current)
        if settings.hang_timeout is not None:
            self._watch_hang(current, settings.hang_timeout)
        elif can_ask_for_stacks():
            self._watch_quiet(current)
        if (recorder := self._context.flight_recorder) is not None and recorder.has_times:
            from elastic_run.agent.driver.slow_rank import SlowRankWatch

            self.slow_ranks = SlowRankWatch(self._context, current, recorder)

    def end_round(self) -> None:
        """Look no more after this round: its workers are being stopped."""
        if self._timers is not None:
            self._timers.clear()
        for timer in self._due.values():
            timer.cancel()
        self._due.clear()
        for watch in (self._hang, self._failed, self.slow_ranks):
            if watch is not None:
                watch.close()
        self._failed = None

    def close(self) -> None:
        """End the watches that outlast a round."""
        if self._timers is not None:
            self._timers.close()

    def _list_ranks(self) -> dict[int, int]:
        """Return the global rank of each worker that lives, by pid."""
        if (current := self._round) is None:
            return {}
        return {pid: current.global_ranks[rank] for rank, pid in current.alive_pids.items()}

    def add_failed(self, current: Round, local_rank: int) -> None:
        """Watch a worker that has told of the exception which has ended its main thread."""
        if self._failed is None:
            self._failed = _FailedRanks(self._context, current)
        self._failed.add(local_rank)

    def add_output(self, local_rank: int) -> None:
        """Take note that a worker has written something after a silence."""
        if self._failed is not None:
            self._failed.watch_silence(local_rank)

    # --- state D ---------------------------------------------------------------------------------------------------
    def _look_at_states(self, current: Round) -> None:
        """Look for workers in uninterruptible sleep a few times within the timeout: a short stay is disk traffic."""
        now, workers, timeout = self._loop.now(), current.workers, self._options.stuck_timeout
        stuck = {pid for pid in (workers.pids[rank] for rank in workers.alive) if _is_uninterruptible(pid)}
        self._stuck_since = {pid: self._stuck_since.get(pid, now) for pid in stuck}
        if any(now - since >= timeout for since in self._stuck_since.values()):
            self._context.feed(messages.WorkerStuck(current.number))
            return
        self._due["state D"] = self._loop.call_later(timeout / _D_LOOKS, lambda: self._look_at_states(current))

    # --- waiting nodes ---------------------------------------------------------------------------------------------
    def _ask_for_nodes(self, current: Round) -> None:
        """Ask a foreign rendezvous every `monitor_interval` seconds whether nodes wait, which it can't tell by itself.

        The node of a failed worker, too, returns to the rendezvous and waits.
        """
        spec, calls = self._context.group.spec, self._context.plugin_calls

        def ask() -> None:
            try:
                has_waiting = spec.rdzv_handler.num_nodes_waiting() > 0
            except Exception:  # noqa: BLE001 - a plug-in's; it can't be reached now, and may be later
                has_waiting = False
            self._loop.call_soon_threadsafe(lambda: take(has_waiting=has_waiting))

        def take(*, has_waiting: bool) -> None:
            if not self._context.is_running(current.number):
                return
            if has_waiting:
                self._context.say("stopping the workers: nodes wait to join")
                self._context.feed(messages.RoundHalted(current.number))
            else:
                self._ask_for_nodes(current)

        if calls is not None:
            name = name_call(spec.rdzv_handler, "num_nodes_waiting")
            self._due["nodes"] = self._loop.call_later(spec.monitor_interval, lambda: calls.post(name, ask))

    # --- resources -------------------------------------------------------------------------------------------------
    def _read_resources(self, current: Round, *, is_awake: bool) -> None:
        """Read the workers' processor time and memory, at 40 us for each, for the curves of the job's history.

        Every 10 s, once a minute after an hour, where a flag needs the loop anyway. With a log directory alone it comes
        together with the watch over quiet rounds, so an idle launcher is not woken for it.
        """
        from elastic_run.agent.driver.worker_readings import read_usage

        self._context.events.resources_read(current, read_usage(current))
        age = self._loop.now() - current.started
        pause = max(_SHORTEST, min(_LONGEST, age / _PARTS)) if is_awake else QUIET_PERIOD
        self._due["resources"] = self._loop.call_later(pause, lambda: self._read_resources(current, is_awake=is_awake))

    # --- hangs -----------------------------------------------------------------------------------------------------
    def _watch_quiet(self, current: Round) -> Activity:
        """Find out that the workers do nothing any more, where the user has not asked for --hang-timeout.

        A timer compares the workers' activity with the last reading, which is returned: a hang is noticed after 5 to 10
        minutes, and a running job pays a millisecond every five minutes. psutil's import would take 16 ms and 2 MB.
        """
        from elastic_run.agent.driver.worker_readings import is_quiet, read_activity

        workers = current.workers
        before, began_at = read_activity([workers.pids[rank] for rank in workers.alive]), self._loop.now()

        def look() -> None:
            seconds = self._loop.now() - began_at
            now = self._watch_quiet(current)
            if is_quiet(before, now, seconds) and self._hang is None:
                self._watch_hang(current, _QUIET_TIMEOUT, quiet_for=seconds)
                self._due["look"] = self._loop.call_later(_LOOK_TIME, self._end_look)

        self._due["quiet"] = self._loop.call_later(QUIET_PERIOD, look)
        return before

    def _end_look(self) -> None:
        if self._hang is not None:
            self._hang.close()
            self._hang = None

    def _end_quiet(self) -> None:
        """End the watch over quiet rounds: a hang is told once in a round."""
        self._due["quiet"].cancel()
        self._end_look()

    def _watch_hang(self, current: Round, timeout: float, *, quiet_for: float = 0.0) -> None:
        from elastic_run.agent.driver.hang_detection import HangDetection

        on_hang = self._end_quiet if quiet_for else lambda: None
        self._hang = HangDetection(self._context, current, timeout=timeout, quiet_for=quiet_for, on_hang=on_hang)

    def describe_hang(self) -> dict[str, Any]:
        """Return what the other nodes need to know of this node's ranks to decide whether the job hangs."""
        from elastic_run.core.failure.hang import NO_DETECTION, NOT_YET

        if self._hang is not None:
            return self._hang.answer()
        timeout = self._options.agent_config.hang_timeout
        if self._round is None or timeout is None or self._round.workers.alive:
            timeout = NO_DETECTION if timeout is None else NOT_YET
        number = -1 if self._round is None else self._round.number
        return {"round": number, "timeout": timeout, "age": 0.0, "workers": []}


class _FailedRanks:
    """Ranks of a round whose main thread an exception has ended, and whose process lives: the others wait for them.

    - An exit function may do useful work, such as saving a checkpoint: the rank has the grace period of every worker.
    - A worker tells of its exception (`worker_start`), unless its program has replaced `sys.excepthook`, as the package
      rich does. So a rank that has written an exception, and then nothing for a while, is asked for its stacks.
    - A rank whose Python has no handler tells nothing, and an exception that a program has handled stands on stderr as
      well. Of both the last words are shown only where the job hangs or is stopped.
    """

    def __init__(self, context: AgentParts, current: Round) -> None:
        self._loop = context.loop
        self._say = context.say
        self._round = current
        self._limit = max(context.options.shutdown_timeout, _LEAST)
        self._timers: list[Timer] = []
        self._silences: dict[int, Timer] = {}
        for rank in current.output.activities:
            self.watch_silence(rank)

    def close(self) -> None:
        """Watch no more."""
        for timer in (*self._timers, *self._silences.values()):
            timer.cancel()

    def add(self, rank: int) -> None:
        """Watch a local rank whose worker has told of its exception."""
        at = self._round.uncaught[rank].at
        self._timers += [
            self._loop.call_at(at + min(_PATIENCE, self._limit / 2), lambda: self._ask_survival(rank)),
            self._loop.call_at(at + self._limit, lambda: self._fail(rank)),
        ]

    def _fail(self, rank: int) -> None:
        if rank in self._round.workers.alive:
            self._round.fail_alive(rank)

    def _ask_survival(self, rank: int) -> None:
        from elastic_run.core.failure.hang import describe_survival
        from elastic_run.report import lines

        def tell(dumps: dict[int, Dump]) -> None:
            if rank in self._round.workers.alive:
                told = self._round.uncaught[rank]
                self._round.survivals[rank] = survival = describe_survival(told, dumps.get(rank))
                left = told.at + self._limit - self._loop.now()
                self._say(lines.lives_on(self._round.global_ranks[rank], told.exception, survival, left))

        if rank in self._round.workers.alive:
            pids = {rank: self._round.workers.pids[rank]}
            self._round.listen_for_stacks().ask(pids, min(_WAIT_LIMIT, self._limit / 4), tell, spares=True)

    def watch_silence(self, rank: int) -> None:
        """Watch a local rank that has written something after a silence."""
        if rank not in self._silences:
            self._silences[rank] = self._loop.call_later(SILENCE, lambda: self._look(rank))

    def _look(self, rank: int) -> None:
        del self._silences[rank]
        left = self._round.output.activities[rank].last + SILENCE - self._loop.now()
        if left > 0:
            self._silences[rank] = self._loop.call_later(left, lambda: self._look(rank))
        elif self._is_untold(rank) and self._round.find_last_words(rank) is not None:
            self._ask_untold(rank, insists=False)

    def _is_untold(self, rank: int) -> bool:
        return rank in self._round.workers.alive and rank not in self._round.uncaught

    def _ask_untold(self, rank: int, *, insists: bool) -> None:
        from elastic_run.core.failure.stacks import is_in_shutdown, parse_stacks

        def take(dumps: dict[int, Dump]) -> None:
            stacks = parse_stacks(dumps[rank].text if rank in dumps else "")
            # A main thread that waits for other threads at Python's end does not come to the handler by itself.
            if not insists and self._is_untold(rank) and is_in_shutdown(stacks):
                self._ask_untold(rank, insists=True)

        pids = {rank: self._round.workers.pids[rank]}
        self._round.listen_for_stacks().ask(pids, _WAIT_LIMIT, take, insists=insists, spares=True)


def _is_uninterruptible(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP
    except (psutil.Error, OSError):
        return False  # it has ended, or no file can be opened
