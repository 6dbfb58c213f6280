"""Which worker this process is, and which device it computes on, read from its environment by pure functions.

RANK counts before the variables of Slurm: a launcher inside a Slurm job sets RANK for each of its workers, of which
Slurm knows nothing. But if srun itself has started this process, RANK may be left over from another shell. Without RANK
the variables of a Slurm step count; a batch script is no step, though Slurm sets SLURM_PROCID=0 and SLURM_NTASKS for it
too: a python that is started there directly is one process. A process without a launcher is rank 0 of 1.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from elastic_run.schedulers.slurm_variables import (
    BATCH_STEP_ID,
    STEP_VARIABLES,
    count_tasks,
    find_port,
    parse_nodelist,
    read_running_step,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Choice", "JoinError", "Place", "PlaceError", "WorkerError", "choose_device", "find_place", "place_from"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NEEDED_OF_SLURM = (
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_NODEID"),
    "SLURM_STEP_ID",
)
_HIGHEST_PORT = 65535
_CUDA = "cuda"


class WorkerError(Exception):
    """The root of this package's own errors."""


class PlaceError(WorkerError, ValueError):
    """The environment doesn't say which worker this is, or contradicts itself."""


class JoinError(WorkerError, RuntimeError):
    """The workers didn't come together: one is missing, or can't be reached."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker a process is, and where the workers meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    #: The source: "elastic-run", "torchrun", "environment" (another program that set RANK), "slurm", "none".
    launcher: str
    #: Where the workers' store is; empty for a single process.
    master_addr: str = ""
    master_port: int = 0
    node_rank: int = 0
    nodes: int = 1
    #: Whether the launcher serves the store; otherwise one of the workers does. Whether this worker does.
    is_store_served: bool = False
    serves_store: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            message = f"rank {self.rank} is not below the world size, {self.world_size}"
            raise PlaceError(message)
        if not 0 <= self.local_rank < self.local_world_size:
            message = f"local rank {self.local_rank} is not below the number of local workers, {self.local_world_size}"
            raise PlaceError(message)

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which a launcher would say the same."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def find_place() -> Place:
    """Find out which worker this process is; see `place_from`."""
    # It reads /proc, and RANK counts before the variables of Slurm.
    running_step = read_running_step() if os.environ.get("SLURM_STEP_ID") and not os.environ.get("RANK") else None
    return place_from(os.environ, pid=os.getpid(), running_step=running_step)


def place_from(environment: Mapping[str, str], *, pid: int = 0, running_step: str | None = None) -> Place:
    """Find out which worker a process is; `running_step` is the step of Slurm in which it is seen to run."""
    if environment.get("RANK"):
        place = _launched_place(environment)
        _check_task(environment, place, pid)
        return place
    # A batch script that a task has submitted has the variables of the task's step.
    if _is_task(environment) and not (running_step or "").endswith(".batch"):
        try:
            return _slurm_place(environment)
        except ValueError as error:
            raise PlaceError(str(error)) from None
    if environment.get("WORLD_SIZE", "1") not in {"", "1"}:
        _require(environment, _NEEDED)
    return Place(0, 1, 0, 1, "none")


def _launched_place(environment: Mapping[str, str]) -> Place:
    _require(environment, _NEEDED)
    rank = _number(environment, "RANK")
    is_store_served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        rank=rank,
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        # Virtual local ranks: LOCAL_RANK is 0 in every worker, with the number of workers as it is.
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", _number(environment, "LOCAL_RANK", 0) + 1),
        launcher=_launcher_name(environment),
        master_addr=environment["MASTER_ADDR"],
        master_port=_port(environment),
        node_rank=_number(environment, "GROUP_RANK", 0),
        nodes=_number(environment, "GROUP_WORLD_SIZE", 1),
        is_store_served=is_store_served,
        serves_store=rank == 0 and not is_store_served,
    )


def _check_task(environment: Mapping[str, str], place: Place, pid: int) -> None:
    """Refuse fewer ranks than tasks in a task that srun itself has started: several tasks have the same rank.

    The variables come from the shell of srun then. A launcher in a task may start such workers; they are no tasks.
    """
    count = environment.get("SLURM_STEP_NUM_TASKS", "")
    is_task = environment.get("SLURM_TASK_PID") == str(pid)
    if is_task and count.isdecimal() and place.world_size < int(count):
        message = (
            f"RANK={place.rank} and WORLD_SIZE={place.world_size} are set, but this process is task "
            f"{environment.get('SLURM_PROCID')} of the {count} tasks of a Slurm step: unset RANK and WORLD_SIZE before "
            "srun for one job of all tasks, or unset SLURM_TASK_PID for separate jobs"
        )
        raise PlaceError(message)


def _launcher_name(environment: Mapping[str, str]) -> str:
    if not environment.get("TORCHELASTIC_RUN_ID"):
        return "environment"
    return "elastic-run" if environment.get("ELASTIC_RUN_TOKEN") else "torchrun"


def _is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task of a Slurm step, also where the variables are not complete.

    Each of several tasks would train alone if it lacked a variable. A single task may.
    """
    if environment.get("SLURM_STEP_ID") == BATCH_STEP_ID:
        return False
    if environment.get("SLURM_STEP_ID") and environment.get("SLURM_PROCID"):
        return True
    has_step = any(environment.get(name) for name in STEP_VARIABLES)
    is_of_step = has_step or (environment.get("SLURM_PROCID") or "0") != "0"
    return is_of_step and environment.get("SLURM_STEP_NUM_TASKS") != "1"


def _slurm_place(environment: Mapping[str, str]) -> Place:
    # The step's own number: SLURM_NTASKS is the job's, in an interactive step.
    is_of_step = environment.get("SLURM_STEP_NUM_TASKS") or not environment.get("SLURM_NTASKS")
    tasks = "SLURM_STEP_NUM_TASKS" if is_of_step else "SLURM_NTASKS"
    listed = environment.get("SLURM_STEP_NODELIST")
    nodes = parse_nodelist(listed) if listed else []
    unneeded = "SLURM_NODEID" if len(nodes) == 1 else ""
    needed = tuple(name for name in (*_NEEDED_OF_SLURM, tasks) if name != unneeded)
    _require(environment, needed, setter="srun")
    node_rank = _number(environment, "SLURM_NODEID", 0)
    local_rank = _number(environment, "SLURM_LOCALID")
    rank = _number(environment, "SLURM_PROCID")
    return Place(
        rank=rank,
        world_size=_number(environment, tasks),
        local_rank=local_rank,
        local_world_size=_local_tasks(environment, node_rank),
        launcher="slurm",
        # No name has to be looked up on a single node.
        master_addr=environment.get("MASTER_ADDR") or ("127.0.0.1" if len(nodes) == 1 else nodes[0]),
        master_port=_slurm_port(environment),
        node_rank=node_rank,
        nodes=len(nodes),
        # With --distribution=arbitrary rank 0 may be on any node, and no other task knows on which.
        serves_store=rank == 0 if environment.get("MASTER_ADDR") else node_rank == local_rank == 0,
    )


def _local_tasks(environment: Mapping[str, str], node: int) -> int:
    text = environment.get("SLURM_STEP_TASKS_PER_NODE")
    return count_tasks(text, node) if text else _number(environment, "SLURM_LOCALID") + 1


def _slurm_port(environment: Mapping[str, str]) -> int:
    if environment.get("MASTER_PORT"):
        return _port(environment)
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        _number(environment, name)
    return find_port(environment)


def _port(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT")
    if not 0 < port <= _HIGHEST_PORT:
        message = f"MASTER_PORT={port} is not a port from 1 to {_HIGHEST_PORT}"
        raise PlaceError(message)
    return port


def _require(
    environment: Mapping[str, str], names: tuple[str, ...], setter: str = "a launcher such as elastic-run"
) -> None:
    missing = [name for name in names if not environment.get(name)]
    if not missing:
        return
    present = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name)) or "none of them"
    message = (
        f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but {present}: set all of "
        f"{', '.join(names)} or none; {setter} sets them"
    )
    raise PlaceError(message)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        message = f"{name}={text!r} is not a whole number"
        raise PlaceError(message) from None


# --- the device ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Choice:
    """A backend and the device that goes with it, as torch names them."""

    backend: str
    device: str

    @property
    def index(self) -> int | None:
        """The CUDA device's number, or None for any other device."""
        kind, _, number = self.device.partition(":")
        return int(number) if kind == _CUDA and number else None


def choose_device(
    backend: str | None,
    device: str | None,
    *,
    local_rank: int,
    local_world_size: int,
    device_count: int,
    is_each_its_own: bool,
) -> Choice:
    """Choose backend and device for what a script asked for; a CUDA device may be asked for without its number.

    The process sees `device_count` CUDA devices. With `is_each_its_own`, something limits what each worker sees
    (Slurm's --gpus-per-task, --virtual-local-rank): one device in sight is the worker's own then, number 0. A worker
    that would share another's device is refused: NCCL can't do that, and says so late and unclearly.
    """
    wants_nccl = backend is not None and "nccl" in backend
    if device is None:
        device = _CUDA if wants_nccl or (backend is None and device_count > 0) else "cpu"
    kind = device.partition(":")[0]
    if wants_nccl and kind != _CUDA:
        message = f"backend={backend} works on CUDA devices only, not on device={device}"
        raise ValueError(message)
    if kind == _CUDA and not device_count:
        asked = f"device={device}" if backend is None else f"backend={backend}, device={device}"
        message = f"{asked}: this process sees no CUDA device (CUDA_VISIBLE_DEVICES, the driver, torch built for CUDA?)"
        raise PlaceError(message)
    if device == _CUDA:
        index = 0 if is_each_its_own and device_count == 1 else local_rank
        if index >= device_count:
            message = (
                f"local rank {local_rank} of {local_world_size} has no CUDA device of its own, {device_count} seen "
                "from here: start fewer workers on each node (--nproc-per-node=gpu), or ask for device='cpu'"
            )
            raise PlaceError(message)
        device = f"{_CUDA}:{index}"
    return Choice(backend or ("nccl" if kind == _CUDA else "gloo"), device)
