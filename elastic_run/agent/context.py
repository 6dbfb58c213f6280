"""What the parts of an agent share from before the first worker on: options, guardian, token, limit of descriptors."""

from __future__ import annotations

import errno
import os
import sys

from elastic_run import contract
from elastic_run.core.config import AgentConfig, NodeConfig
from elastic_run.multiprocessing.fork_exec import allowed_descriptors, can_ask_for_stacks, read_name
from elastic_run.multiprocessing.guardian import Guardian
from elastic_run.records import dataclass, field
from elastic_run.signals import SIGHUP, SIGINT, SIGQUIT, block_signals, signal_name, signal_number
from elastic_run.store.worker_store import raise_descriptor_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from threading import Thread

    from elastic_run.agent.api import WorkerGroup
    from elastic_run.agent.driver.flight_recorder import FlightRecorder
    from elastic_run.agent.http_server import HttpPort, MetricsPort
    from elastic_run.agent.kept_memory import KeptMemories
    from elastic_run.agent.plugin_calls import PluginCalls
    from elastic_run.core.agent.faults import Fault
    from elastic_run.core.agent.machine import Agent
    from elastic_run.core.agent.messages import Event
    from elastic_run.core.config import JobConfig
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.logs import LogsDest, LogsSpecs
    from elastic_run.multiprocessing.output.console import Console
    from elastic_run.multiprocessing.warm.worker_pool import WorkerPool
    from elastic_run.signals import SignalInfo
    from elastic_run.timer.timer_file import ScopeTimer, TimerFile


#: Descriptors of the launcher itself: the number that it needs, and the number that it usually reserves.
_DESCRIPTORS_LEAST = 24
_DESCRIPTORS = 64
#: For each worker: pidfd, and of two streams a pipe and a file that is written and read; usually more while it starts.
_LEAST_PER_WORKER = 7
_DESCRIPTORS_PER_WORKER = 10
#: Seconds beside --shutdown-timeout before the scheduler ends a job: for the launcher's own end.
_STOP_MARGIN = 5.0


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The user's settings as an agent uses them: the three configurations, and values made from torch's fields."""

    job_config: JobConfig  # On which all nodes of the job agree
    node_config: NodeConfig = NodeConfig()  # Of this node in a job of several nodes
    agent_config: AgentConfig = AgentConfig()  # The other settings of this node
    shutdown_timeout: float = contract.DEFAULT_SHUTDOWN_TIMEOUT  # The grace period in seconds, on every stop path
    signals: tuple[int, ...] = ()  # Signals that stop the job
    forwarded: tuple[int, ...] = ()  # Signals that are passed on to the workers
    unnamed_signals: tuple[int, ...] = ()  # Signals that stop it though the user didn't name them; workers get SIGTERM
    offered: tuple[int, ...] = ()  # Signals that are passed on to those workers that handle them
    prefix_template: str = contract.DEFAULT_PREFIX_TEMPLATE  # Of tee'd lines
    affinities: Mapping[int, frozenset[int]] = field(default_factory=dict)  # Logical CPUs by local rank
    is_whole_process: bool = False  # Whether the launcher is all that runs in this process
    #: Whether a program around the launcher, such as a profiler, handles signals in this process. Then no signals are
    #: blocked while the agent runs: a profiler's handler may ask for the blocked ones, at each tick.
    is_wrapped: bool = False
    #: Whether only workers' orphans can come to this process as a subreaper. As PID 1, and if it began with children
    #: (`helper & exec elastic-run`), it gets orphans of other programs too.
    adopts_orphans: bool = False
    start_method: str = "spawn"  # Of function workers: `spawn`, `fork` or `forkserver`
    stuck_timeout: float = 0.0  # Seconds that a worker may be in uninterruptible sleep; 0 for any time
    faults: tuple[Fault, ...] = ()  # Injected into the workers, the same on all nodes

    @property
    def worker_variables(self) -> dict[str, str]:
        """The variables that tell the workers about their end."""
        found = {}
        if self.scale_up_signal:
            found[contract.ENV_SCALE_UP_SIGNAL] = signal_name(self.scale_up_signal)
        if self.stop_time:
            found[contract.ENV_STOP_TIME] = str(int(self.stop_time))
        return found

    @property
    def stop_time(self) -> float:
        """Time at which the workers have to begin to save, in seconds since 1970; 0 if no scheduler ends the job."""
        end = self.node_config.end_time
        return max(0.0, end - self.shutdown_timeout - _STOP_MARGIN) if end else 0.0

    @property
    def scale_up_signal(self) -> int:
        """The signal that workers get before they are stopped for new nodes, or 0."""
        return next(iter(parse_signals(self.node_config.scale_up_signal)), 0)


class AgentContext:
    """What the parts of one agent share; what has no value here comes with the supervisor."""

    loop: Loop
    console: Console
    agent: Agent
    started: float
    #: Takes the machine's events.
    feed: Callable[[Event], None]
    #: Gets each step of a round by torch's name, and its milliseconds; and torch's events of the workers' timers.
    on_step: Callable[[str, float], None]
    on_timer: Callable[[str, ScopeTimer | None], None]

    def __init__(self, group: WorkerGroup, logs_specs: LogsSpecs, options: AgentOptions) -> None:
        self.group = group
        self.logs_specs = logs_specs
        self.options = options
        self.senders = Senders()
        self.hostname = os.uname().nodename
        self.run_id = group.spec.rdzv_handler.get_run_id()
        # With torch in it (under compat), or a profiler around it, this is another program's process: too large to be
        # copied, or with a fork of its own.
        is_own = options.is_whole_process and not options.is_wrapped and "torch" not in sys.modules
        self.guardian = Guardian(is_exec=not is_own)
        #: The pipe of the workers' timers, and the directory that was made for it, or "".
        self.timer_file: TimerFile | None = None
        self._timer_directory = ""
        self.worker_pool: WorkerPool | None = None
        self.health_port: HttpPort | None = None
        self.metrics_port: MetricsPort | None = None
        self.flight_recorder: FlightRecorder | None = None
        self.kept: KeptMemories | None = None
        #: Path of the file for each worker's heartbeats, by local rank; only with --hang-timeout.
        self.heartbeats: dict[int, str] = {}
        self.adopts_orphans = False
        #: Makes calls of plug-ins, once there is a loop that waits for them.
        self.plugin_calls: PluginCalls | None = None
        #: The workers' soft limit of descriptors if this process has raised its own; otherwise None.
        self.worker_limit: int | None = None
        #: The signals that were blocked when this process began, so that a worker begins with the same; None if this
        #: process has blocked no others since.
        self.mask: frozenset[int] | None = None
        self._announced = ""
        #: Asks the GPUs' driver, which may hang.
        self.gpu_thread: Thread | None = None

    def say(self, text: str) -> None:
        """Write one line for the user."""
        self.console.say(text)

    def is_running(self, number: int | None) -> bool:
        """Whether this round runs, and is not being stopped."""
        from elastic_run.core.agent.machine import RUNNING

        return self.agent.state == RUNNING and self.agent.round == number

    def block_signals(self, numbers: Iterable[int]) -> None:
        """Block signals in this thread, but not in the workers."""
        before = block_signals(numbers)
        if self.mask is None:
            self.mask = before

    def adopt_orphans(self) -> bool:
        """Let orphans of the workers' descendants come to this process, the launcher's own; return whether they do."""
        if not self.adopts_orphans and self.options.adopts_orphans:
            from elastic_run.multiprocessing.process_table import set_subreaper

            self.adopts_orphans = set_subreaper(is_on=True)
        return self.adopts_orphans

    @property
    def _usual_descriptors(self) -> int:
        return self.group.spec.local_world_size * _DESCRIPTORS_PER_WORKER + _DESCRIPTORS

    def make_room(self) -> None:
        """Allow this process as many descriptors as it needs; workers keep their limit. OSError: fewer are allowed."""
        workers = self.group.spec.local_world_size
        least = workers * _LEAST_PER_WORKER + _DESCRIPTORS_LEAST
        is_raisable = self.options.is_whole_process and self.worker_limit is None
        if is_raisable and allowed_descriptors() < max(least, self._usual_descriptors):
            self.worker_limit = raise_descriptor_limit()
        allowed = allowed_descriptors()
        if allowed < least:
            who = f"{workers} workers need" if workers != 1 else "1 worker needs"
            message = f"{who} {least} file descriptors here, but only {allowed} are allowed (ulimit -n)"
            raise OSError(errno.EMFILE, message)

    def kept_label(self) -> str | None:
        """Return the step of the newest state that this node's workers have kept, or None."""
        label: str | None = None if self.kept is None else self.kept.read_status()["label"]
        return label

    @property
    def has_room_for_stacks(self) -> bool:
        """Whether each worker gets a pipe for its stacks; its number has to be within the workers' own limit."""
        limit = allowed_descriptors() if self.worker_limit is None else self.worker_limit
        return can_ask_for_stacks() and limit >= self._usual_descriptors

    def limit_worker(self, pid: int) -> None:
        """Set the limit of descriptors of a worker that was started with this process's raised limit."""
        if self.worker_limit is None:
            return
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (self.worker_limit, hard))
        except (OSError, AttributeError):
            pass  # it has ended already, or this is not Linux

    # --- log files -------------------------------------------------------------------------------------------------
    @property
    def has_temporary_logs(self) -> bool:
        """Whether the log files go with the launcher; a plug-in's class does not say so, and keeps its files."""
        return bool(getattr(self.logs_specs, "is_temporary", False))

    @property
    def log_directory(self) -> str:
        """Where this run's log files are kept, or an empty string."""
        if self.has_temporary_logs:
            return ""
        # A plug-in's class that is derived from torch's has the private name only.
        return getattr(self.logs_specs, "run_log_dir", None) or getattr(self.logs_specs, "_run_log_dir", None) or ""

    def make_log_directory(self) -> str:
        """Return the log directory; make it if the user has asked for one and no worker was started yet."""
        make = getattr(self.logs_specs, "make_run_log_dir", None)
        if make is not None and not self.has_temporary_logs:
            try:
                make(self.run_id)
            except OSError:
                pass  # the report on the console has the same content
        return self.log_directory

    def announce_log_directory(self) -> None:
        """Tell the guardian of a directory that it has to remove when the launcher has ended."""
        directory = getattr(self.logs_specs, "run_log_dir", None) if self.has_temporary_logs else None
        if directory and directory != self._announced:
            self.guardian.remove_at_end(directory)
            self._announced = directory

    # --- what the workers are given --------------------------------------------------------------------------------
    def switch_on_recorders(self, envs: Mapping[int, dict[str, str]], logs: LogsDest) -> None:
        """Switch on torch's flight recorder in the workers of a round, if a flag asks for it; --hang-timeout does."""
        if self.options.agent_config.hang_timeout is not None:
            own = {rank: path for rank, path in logs.error_files.items() if rank in envs and path}
            self.heartbeats = {rank: os.path.join(os.path.dirname(path), "heartbeat") for rank, path in own.items()}
            for rank, path in self.heartbeats.items():
                envs[rank][contract.ENV_HEARTBEAT_FILE] = path
        elif not self.options.agent_config.flight_recorder:
            return
        if self.flight_recorder is None:
            from elastic_run.agent.driver.flight_recorder import FlightRecorder

            self.flight_recorder = FlightRecorder()
        self.flight_recorder.switch_on(envs, logs, os.environ)

    def serve_timers(self, envs: Mapping[int, dict[str, str]]) -> None:
        """If the user asks for it, make the pipe of the workers' timers and give its path to the workers."""
        if os.environ.get(contract.ENV_ENABLE_FILE_TIMER) != "1":
            return
        if self.timer_file is None:
            from elastic_run.agent.driver.timers import open_timer_file

            self.timer_file, self._timer_directory = open_timer_file(os.environ, self._announced)
            if self._timer_directory:
                self.guardian.remove_at_end(self._timer_directory)
        for env in envs.values():
            env[contract.ENV_TIMER_FILE] = self.timer_file.path

    def close_timers(self) -> None:
        """Remove the pipe of the workers' timers."""
        if self.timer_file is not None:
            self.timer_file.close()
        try:
            if self._timer_directory:
                os.rmdir(self._timer_directory)
        except OSError:
            pass  # another process has put a file there, or has removed it


def parse_signals(names: str) -> tuple[int, ...]:
    """Return the numbers of signals given by name; an unknown one is passed over, as by torch (the CLI refuses it)."""
    numbers = (signal_number(name.strip()) for name in names.split(","))
    return tuple(number for number in numbers if number is not None)


# --- who sent a signal ------------------------------------------------------------------------------------------------
#: Codes of sigaction(2): of signals that the kernel sends by itself, at least; and of a timer that the process has set
#: or inherited (alarm).
_SI_KERNEL, _SI_TIMER = 0x80, -2


class Senders:
    """The last sender of each signal to the launcher, in words for the user.

    `passed_on` are the signals that this launcher has passed on to workers, `warned_with` those with which it has
    warned workers of new nodes.
    """

    def __init__(self) -> None:
        self.passed_on: set[int] = set()
        self.warned_with: set[int] = set()
        self._senders: dict[int, str] = {}
        self._reasons: dict[int, str] = {}

    def add(self, number: int, found: SignalInfo | None) -> None:
        """Store the sender of a signal that came; at once, since it may be gone a moment later (`kill`, `scancel`)."""
        self._senders[number] = "" if found is None else _describe(found)
        self._reasons.pop(number, None)

    def name(self, number: int, sender: str) -> None:
        """Name the sender of a request that came in place of a signal."""
        self._senders[number] = sender

    def explain(self, number: int, reason: str) -> None:
        """Store why the launcher stops the job as if a signal had come, which nobody has sent."""
        self._senders[number] = self._reasons[number] = reason

    def find_reason(self, number: int) -> str:
        """Return why the launcher stops the job as if this signal had come; "" if it has come."""
        return self._reasons.get(number, "")

    def find(self, number: int) -> str:
        """Return the sender of the last signal of a number, such as `pid 12 (bash)`; "" if it isn't known."""
        return self._senders.get(number, "")


def _describe(found: SignalInfo) -> str:
    if found.code == _SI_TIMER:
        return "a timer"
    if found.code >= _SI_KERNEL:
        return "the terminal" if found.number in (SIGINT, SIGQUIT, SIGHUP) else "the kernel"
    if not found.pid:
        return f"a process outside of this container (uid {found.uid})"
    name = read_name(found.pid)  # psutil's import, 16 ms, would be too long
    return f"pid {found.pid} ({name})" if name else f"pid {found.pid}"
