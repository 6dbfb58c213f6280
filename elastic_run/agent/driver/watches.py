"""The watches over a running round beside the loop: state D, timers, waiting nodes, failures, hangs, resources.

Each watch is imported and runs only if the user asked for it, except for the watches over quiet rounds and over ranks
that have failed and live (`failed_ranks`).
"""

from __future__ import annotations

import os
import time

from elastic_run.agent.plugin_calls import name_call
from elastic_run.core.agent import messages
from elastic_run.multiprocessing.process.fork_exec import can_ask_for_stacks
from elastic_run.records import dataclass
from elastic_run.signals import SIGTERM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from elastic_run.agent.driver.context import AgentOptions
    from elastic_run.agent.driver.failed_ranks import FailedRanks
    from elastic_run.agent.driver.hang_detection import Hang, HangDetection
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.agent.driver.stack_reports import StackReports
    from elastic_run.agent.driver.timers import TimerWatch, WorkerTimers
    from elastic_run.loop import Loop, Timer
    from elastic_run.timer.timer_file import FileTimerRequest

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


class Watches:
    """The watches of one agent.

    Args:
        parts: The parts of the agent.
        stacks: Writes the stacks of a hang.
        on_timer: Called with the name of an event of the workers' timers, and the request that it is about.
    """

    def __init__(
        self, parts: AgentParts, stacks: StackReports, on_timer: Callable[[str, FileTimerRequest | None], None]
    ) -> None:
        self._parts = parts
        self._stacks = stacks
        self._on_timer = on_timer
        self._loop = parts.loop
        self._options = parts.context.options
        self._round: Round | None = None
        self._timers: TimerWatch | None = None
        self._hang: HangDetection | None = None
        self._failed: FailedRanks | None = None
        #: Timers of this round, by the watch that has set them.
        self._due: dict[str, Timer] = {}
        self._stuck_since: dict[int, float] = {}

    def begin(self, current: Round) -> None:
        """Begin to watch a round; its workers run."""
        self._round = current
        self._hang = None
        if self._options.stuck_timeout > 0:
            self._look_at_states(current)
        if (timers := self._parts.context.timers) is not None and self._timers is None:
            self._timers = self._watch_timers(timers)
        if self._parts.job is None and not self._parts.round_join.is_immediate:
            self._ask_for_nodes(current)
        self._due["late start"] = self._loop.call_later(_SETTLED, lambda: self._begin_late(current))

    def _begin_late(self, current: Round) -> None:
        """Begin with what would only delay the start of the workers."""
        settings = self._options.agent_config
        is_awake = settings.events_file or settings.metrics_port is not None or settings.hang_timeout is not None
        if self._parts.observation.is_written:
            self._record_resources(current)
            if is_awake:
                self._due["resources"] = self._loop.call_later(_SHORTEST, lambda: self._read_resources(current))
        if can_ask_for_stacks() and self._failed is None:
            self._failed = self._watch_failed(current)
        if settings.hang_timeout is not None:
            self._watch_hang(current)
        elif can_ask_for_stacks():
            self._watch_quiet(current, records=self._parts.observation.is_written and not is_awake)

    def end_round(self) -> None:
        """Look no more after this round: its workers are being stopped."""
        if self._timers is not None:
            self._timers.clear()
        for timer in self._due.values():
            timer.cancel()
        self._due.clear()
        for watch in (self._hang, self._failed):
            if watch is not None:
                watch.close()
        self._failed = None

    def close(self) -> None:
        """End the watches that outlast a round."""
        if self._timers is not None:
            self._timers.close()

    # --- ranks that have failed and live ---------------------------------------------------------------------------
    def add_failed(self, current: Round, local_rank: int) -> None:
        """Watch a worker that has told of the exception which has ended its main thread."""
        if self._failed is None:
            self._failed = self._watch_failed(current)
        self._failed.add(local_rank)

    def _watch_failed(self, current: Round) -> FailedRanks:
        from elastic_run.agent.driver.failed_ranks import FailedRanks

        return FailedRanks(self._parts, current, lambda rank: self._fail_alive(current, rank))

    def _fail_alive(self, current: Round, local_rank: int) -> None:
        """Let a worker that has failed and does not end count as one that has ended."""
        current.count_as_failed(local_rank)
        self._parts.feed_exit(current, local_rank, 1)

    def add_output(self, local_rank: int) -> None:
        """Take note that a worker has written something after a silence."""
        if self._failed is not None:
            self._failed.watch_silence(local_rank)

    # --- state D ---------------------------------------------------------------------------------------------------
    def _look_at_states(self, current: Round) -> None:
        """Watch for workers in uninterruptible sleep (state D): a driver or a file system does not answer.

        Only with TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT. The kernel reports no change of a process's state, so the
        watch reads it a few times within the timeout (law 2 lists that). A short stay is normal disk traffic.
        """
        now, workers, timeout = self._loop.now(), current.workers, self._options.stuck_timeout
        stuck = {pid for pid in (workers.pids[rank] for rank in workers.alive) if _is_uninterruptible(pid)}
        self._stuck_since = {pid: self._stuck_since.get(pid, now) for pid in stuck}
        if any(now - since >= timeout for since in self._stuck_since.values()):
            self._parts.feed(messages.WorkerStuck(current.number))
            return
        self._due["state D"] = self._loop.call_later(timeout / _D_LOOKS, lambda: self._look_at_states(current))

    # --- waiting nodes ---------------------------------------------------------------------------------------------
    def _ask_for_nodes(self, current: Round) -> None:
        """Ask a foreign rendezvous whether nodes wait for the next round; it has no way to notify the agent.

        A job also learns of a failed worker on another node in this way: that node's agent returns to the rendezvous
        and waits. `monitor_interval` is the time between two questions; elastic-run uses it only here.
        """
        spec, calls = self._parts.context.group.spec, self._parts.context.plugin_calls
        name = name_call(spec.rdzv_handler, "num_nodes_waiting")

        def ask() -> None:
            try:
                has_waiting = spec.rdzv_handler.num_nodes_waiting() > 0
            except Exception:  # noqa: BLE001 - a plug-in's; it can't be reached now, and may be later
                has_waiting = False
            self._loop.call_soon_threadsafe(lambda: take(has_waiting=has_waiting))

        def take(*, has_waiting: bool) -> None:
            if not self._parts.is_running(current.number):
                return
            if has_waiting:
                self._parts.say("stopping the workers: nodes wait to join")
                self._parts.feed(messages.RoundHalted(current.number))
            else:
                self._ask_for_nodes(current)

        if calls is not None:
            self._due["nodes"] = self._loop.call_later(spec.monitor_interval, lambda: calls.post(name, ask))

    # --- resources -------------------------------------------------------------------------------------------------
    def _read_resources(self, current: Round) -> None:
        """Read the workers' processor time and memory, for the curves of the job's history, again and again.

        A reading costs 40 us for each worker. A timer of its own reads only if the user asked for what needs the loop
        anyway (--events-file, --metrics-port, --hang-timeout): every 10 s, and once a minute after an hour. With a log
        directory alone, the watch over quiet rounds reads every five minutes, so an idle launcher is not woken for it.
        """
        self._record_resources(current)
        age = self._loop.now() - current.started
        pause = max(_SHORTEST, min(_LONGEST, age / _PARTS))
        self._due["resources"] = self._loop.call_later(pause, lambda: self._read_resources(current))

    def _record_resources(self, current: Round) -> None:
        from elastic_run.agent.driver.worker_readings import read_usage

        usage = read_usage(current)
        self._parts.observation.record(lambda recorder, moment: recorder.resources_read(moment, current, usage))

    # --- hangs -----------------------------------------------------------------------------------------------------
    def _watch_quiet(self, current: Round, *, records: bool) -> Activity:
        """Find out that the workers do nothing any more, where the user has not asked for --hang-timeout.

        A timer compares the workers' activity with the last reading. So a job that begins to hang is noticed after five
        to ten minutes, and a running job pays a millisecond every five minutes. The rounds of all nodes begin at about
        the same time, and so do these readings. Every ordinary job has this watch, so it reads /proc as the guardian
        does: psutil's import would take 16 ms and 2 MB. Returns the first reading.
        """
        workers = current.workers
        before, began_at = read_activity([workers.pids[rank] for rank in workers.alive]), self._loop.now()

        def look() -> None:
            if records:
                self._record_resources(current)
            seconds = self._loop.now() - began_at
            now = self._watch_quiet(current, records=records)
            if is_quiet(before, now, seconds) and self._hang is None:
                self._watch_hang(current, quiet_for=seconds)
                self._due["look"] = self._loop.call_later(_LOOK_TIME, self._end_look)

        self._due["quiet"] = self._loop.call_later(QUIET_PERIOD, look)
        return before

    def _end_look(self) -> None:
        if self._hang is not None:
            self._hang.close()
            self._hang = None

    def _watch_hang(self, current: Round, *, quiet_for: float = 0.0) -> None:
        from elastic_run.agent.driver.hang_detection import HangDetection

        timeout = _QUIET_TIMEOUT if quiet_for else self._options.agent_config.hang_timeout or 0.0
        self._hang = HangDetection(
            self._parts,
            current,
            timeout=timeout,
            on_hang=lambda found: self._react(current, found),
            quiet_for=quiet_for,
        )

    def _react(self, current: Round, found: Hang) -> None:
        from elastic_run.agent.driver.hang_reaction import HangReaction

        if (quiet := self._due.get("quiet")) is not None:  # once in a round
            quiet.cancel()
            self._end_look()
        action = self._options.agent_config.hang_action
        self._parts.observation.record(
            lambda recorder, moment: recorder.hang_found(moment, found.seconds, found.ranks, found.ended, action)
        )
        HangReaction(self._parts, current, found, fail=lambda rank: self._fail_alive(current, rank)).begin(
            self._stacks.write(found.dumps)
        )

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

    # --- timers of the workers -------------------------------------------------------------------------------------
    def _watch_timers(self, timers: WorkerTimers) -> TimerWatch:
        from elastic_run.agent.driver.timers import TimerWatch

        return TimerWatch(self._loop, timers.file, ranks=self._list_ranks, say=self._parts.say, on_event=self._on_timer)

    def _list_ranks(self) -> dict[int, int]:
        """Return the global rank of each worker that lives, by pid."""
        current = self._round
        if current is None:
            return {}
        ranks = current.global_ranks
        return {current.workers.pids[local_rank]: ranks[local_rank] for local_rank in current.workers.alive}


#: Part of one processor that all background threads of a worker take at most while it waits.
_QUIET = 0.005


@dataclass(frozen=True, slots=True)
class Activity:
    """What the processes of a round have done so far."""

    cpu: float  # Seconds of processor time
    written: int  # Bytes that they have written to files, pipes and terminals
    workers: int  # Workers that run


def is_quiet(before: Activity, after: Activity, seconds: float) -> bool:
    """Whether nothing happened between two moments.

    Processes that have ended take their time with them, so less is a change too.
    """
    if not after.workers or before.workers != after.workers or before.written != after.written:
        return False
    return abs(after.cpu - before.cpu) <= _QUIET * after.workers * seconds


def read_activity(workers: Sequence[int]) -> Activity:
    """Return CPU time and written bytes of workers and their descendants, such as data loaders, so far."""
    from elastic_run.multiprocessing.process.process_table import find_descendants, read_stat

    pids = find_descendants(frozenset(workers), since=0)
    stats = [stat for pid in pids if (stat := read_stat(pid)) is not None]
    cpu = sum(stat.cpu for stat in stats) / os.sysconf("SC_CLK_TCK")
    return Activity(cpu, sum(map(_read_written, pids)), len(workers))


def _read_written(pid: int) -> int:
    """Return how many bytes a process has written; 0 where the kernel doesn't tell."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"wchar:")), 0)
    except OSError:
        return 0


def _is_uninterruptible(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP
    except (psutil.Error, OSError):
        return False  # it has ended, or no file can be opened


def watch_time_limit(
    loop: Loop, options: AgentOptions, *, say: Callable[[str], object], stop: Callable[[int, str], None]
) -> None:
    """Tell the user before the scheduler ends the job, and stop the workers in time if the user asks for it.

    Slurm sends SIGTERM when the time is over, and SIGKILL `KillWait` seconds later (30 unless the site sets it).
    Workers that need longer to save have to begin before. A variable gives the workers the same moment, from which on
    their `stop_requested()` is true.
    """

    def tell() -> None:
        left = max(0, round(options.node_config.end_time - time.time()))
        if options.node_config.stops_in_time:
            say(f"the job's time limit is in {left} s: stopping the workers, to run the job again")
            stop(options.signals[0] if options.signals else SIGTERM, "the job's time limit is near")
        else:
            say(f"the job's time limit is in {left} s: stop_requested() is true in the workers from now on")

    # The wall clock is read once: a clock that is set later moves nothing.
    loop.call_later(max(0.0, options.stop_time - time.time()), tell)
