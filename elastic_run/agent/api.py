"""The records of an agent, under torch's names and with torch's fields: spec, worker, group, result.

Source of the names, fields and defaults: torch 2.13, torch.distributed.elastic.agent.server.api.
"""

from __future__ import annotations

import abc
import os

from elastic_run import lazy_names
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.agent.results import WorkerState
    from elastic_run.cluster.numa import NumaOptions
    from elastic_run.multiprocessing.errors import ProcessFailure
    from elastic_run.rendezvous.api import RendezvousHandler
DEFAULT_ROLE = "default"

# `enum` is not needed to start workers.
__getattr__ = lazy_names(__name__, {"WorkerState": "elastic_run.agent.results"})


@dataclass
class WorkerSpec:
    """The description of one role's workers.

    Args:
        role: Name of the role.
        local_world_size: Workers on this node.
        rdzv_handler: Brings the nodes together.
        fn: Former name of `entrypoint`.
        entrypoint: A command, or a function.
        args: Its arguments.
        max_restarts: Restarts of the job before it fails.
        monitor_interval: Seconds between two looks at the workers, where an agent has to look.
        master_port: Fixed port of the workers' store, or None.
        master_addr: Fixed address of the workers' store, or None.
        local_addr: Address of this node, or None.
        event_log_handler: Name of the handler of events.
        numa_options: How workers are bound to CPUs, or None.
        duplicate_stdout_filters: Copy tee'd stdout lines that hold one of these into one file.
        duplicate_stderr_filters: The same for stderr.
        virtual_local_rank: Every worker sees its device as device 0, and itself as local rank 0.

    Raises:
        AssertionError: A size or interval is not positive, or there is no entrypoint (torch's exception).
    """

    role: str
    local_world_size: int
    rdzv_handler: RendezvousHandler
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: NumaOptions | None = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            message = f"local_world_size must be at least 1, got {self.local_world_size}"
            raise AssertionError(message)
        if not self.monitor_interval > 0:  # nor nan
            message = f"monitor_interval must be above 0, got {self.monitor_interval}"
            raise AssertionError(message)
        if self.fn:
            import warnings

            warnings.warn("WorkerSpec.fn is deprecated: use entrypoint", DeprecationWarning, stacklevel=2)
            self.entrypoint = self.fn
        if not self.entrypoint:
            message = "WorkerSpec needs an entrypoint"
            raise AssertionError(message)

    def get_entrypoint_name(self) -> str:
        """Return the command's file name, or the function's qualified name."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        return getattr(self.entrypoint, "__qualname__", repr(self.entrypoint))


class Worker:
    """One worker process, by its numbers on this node, in the job and among the workers of its role."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)

    __repr__ = __str__


class WorkerGroup:
    """The workers of one spec on this node, and their place in the current round."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self._state: WorkerState | None = None

    @property
    def state(self) -> WorkerState:
        """The workers' state."""
        if self._state is None:
            from elastic_run.agent.results import WorkerState

            self._state = WorkerState.INIT
        return self._state

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._state = state


@dataclass
class RunResult:
    """How the workers of this node ended.

    Args:
        state: Final state of the group.
        return_values: Return values of functions by global rank.
        failures: Failures by global rank. Workers that the agent stopped are in neither map.
    """

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Whether a worker failed."""
        return self.state == "FAILED"


class ElasticAgent(abc.ABC):
    """Manages the worker processes of one node."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end, restarting them as the spec allows; return how they ended."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the group of a role; it changes while the agent runs."""
