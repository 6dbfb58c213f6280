"""What the rounds of one agent share: what the user asked for, the loop, the console, the guardian, the token."""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.multiprocessing.guardian import Guardian
from elastic_run.multiprocessing.output import Console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.agent.api import WorkerGroup
    from elastic_run.core.policy import RestartPolicy
    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.logs import LogsSpecs


class AgentOptions:
    """What the user asked of the agent beyond torch's fields.

    Args:
        policy: Restart policy.
        shutdown_timeout: The grace period in seconds, on every stop path.
        signals: Signals that stop the job.
        forwarded: Signals that are passed on to the workers.
        worker_store: `auto`, `agent`, `torch` or `rank0`.
        capture: Whether the workers' stderr passes through the agent for the report.
        prefix_template: Prefix of tee'd lines.
        affinities: Logical CPUs by local rank.
        is_whole_process: Whether the launcher is all that runs in this process.
        stuck_timeout: Seconds that a worker may be in uninterruptible sleep; 0 for any time.
    """

    __slots__ = (
        "affinities",
        "capture",
        "forwarded",
        "is_whole_process",
        "policy",
        "prefix_template",
        "shutdown_timeout",
        "signals",
        "stuck_timeout",
        "worker_store",
    )

    def __init__(  # noqa: PLR0913 - a record
        self,
        *,
        policy: RestartPolicy,
        shutdown_timeout: float = contract.DEFAULT_SHUTDOWN_TIMEOUT,
        signals: tuple[int, ...] = (),
        forwarded: tuple[int, ...] = (),
        worker_store: str = "auto",
        capture: bool = True,
        prefix_template: str = contract.DEFAULT_PREFIX_TEMPLATE,
        affinities: Mapping[int, frozenset[int]] | None = None,
        is_whole_process: bool = False,
        stuck_timeout: float = 0.0,
    ) -> None:
        self.policy = policy
        self.shutdown_timeout = shutdown_timeout
        self.signals = signals
        self.forwarded = forwarded
        self.worker_store = worker_store
        self.capture = capture
        self.prefix_template = prefix_template
        self.affinities = affinities or {}
        self.is_whole_process = is_whole_process
        self.stuck_timeout = stuck_timeout


class Surroundings:
    """What the rounds of one agent share."""

    __slots__ = (
        "_announced",
        "console",
        "group",
        "guardian",
        "hostname",
        "inherited_token",
        "logs_specs",
        "loop",
        "options",
        "run_id",
    )

    def __init__(self, group: WorkerGroup, logs_specs: LogsSpecs, options: AgentOptions, loop: Loop) -> None:
        self.group = group
        self.logs_specs = logs_specs
        self.options = options
        self.loop = loop
        self.console = Console(loop)
        self.hostname = os.uname().nodename
        self.run_id = group.spec.rdzv_handler.get_run_id()
        token = f"{os.getpid():x}-{os.urandom(8).hex()}"
        outer = os.environ.get(contract.ENV_TOKEN)
        self.inherited_token = f"{outer}:{token}" if outer else token
        self.guardian = Guardian(token, is_exec=not options.is_whole_process)
        self._announced = False

    @property
    def log_directory(self) -> str:
        """Where this run's log files are kept, or an empty string."""
        directory = getattr(self.logs_specs, "run_log_dir", None) or ""
        return "" if getattr(self.logs_specs, "is_temporary", False) else directory

    def announce_log_directory(self) -> None:
        """Tell the guardian, once, of a directory that has to go with the launcher."""
        if not self._announced and getattr(self.logs_specs, "is_temporary", False):
            self.guardian.remove_at_end(getattr(self.logs_specs, "run_log_dir", None) or "")
            self._announced = True
