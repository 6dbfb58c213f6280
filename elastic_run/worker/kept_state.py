"""The state of a training, kept in the launcher's memory: `restore` before a training loop, and `save` in it.

After a restart, the loop goes on with the step that was saved last, not with the last checkpoint on disk.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from elastic_run.worker.kept_memory import KeptStateError
from elastic_run.worker.memory_storage import MemoryReader, MemoryWriter, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from torch.distributed.checkpoint.stateful import Stateful


__all__ = ["KeptState"]

#: The part of a state that belongs to one rank, by rank. No object can have this name.
_OF_RANKS = "of_this_rank"
_RANDOM = "random numbers"


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """Let torch not warn of a single process without a group, which is as good as any."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


class KeptState:
    """Keeps the states of objects in memory that outlives the worker.

    Modules and optimizers are kept as `torch.distributed.checkpoint.state_dict` describes them, so that they can be
    sharded (FSDP2, DTensor) and come back on another number of ranks. Any other object is kept as one piece, which is
    the same on all ranks, such as a learning rate scheduler or an `ElasticSampler`. The random numbers of Python, numpy
    and torch (CPU and CUDA) are kept for each rank; they come back if the number of ranks is the same.

    Args:
        objects: Objects with `state_dict` and `load_state_dict`, in an order that each start of the script keeps.
        of_this_rank: Objects whose state is another one on each rank, such as a data loader; restored only if the
            number of ranks is the same.
        named: Objects like `objects`, each with a name.

    Raises:
        KeptStateError: An optimizer is given whose parameters are in none of the modules.
    """

    def __init__(
        self, *objects: Stateful, of_this_rank: Mapping[str, Stateful] | None = None, **named: Stateful
    ) -> None:
        self._objects = {**{f"{number}": each for number, each in enumerate(objects)}, **named}
        # Random numbers come last: to load an object may draw some.
        self._of_this_rank = {**(of_this_rank or {}), _RANDOM: _RandomNumbers()}
        self._models = {
            name: _find_model(name, each, self._objects.values())
            for name, each in self._objects.items()
            if isinstance(each, torch.optim.Optimizer)
        }
        self._writer = MemoryWriter()

    @_no_warning()
    def save(self, step: int) -> None:
        """Keep the state; all ranks call it with the same step. It returns when the state is copied on each rank.

        Args:
            step: The number of the step, which `restore` returns.

        Raises:
            KeptStateError: A rank's state is larger than its part of `--keep-state`; what was kept before stays.
        """
        if not self._writer.is_kept():
            return
        state, (rank, _) = self._collect(), _find_rank()
        state[_OF_RANKS] = {f"{rank}": ({name: each.state_dict() for name, each in self._of_this_rank.items()},)}
        try:
            save(state, checkpoint_id=f"{step}", storage_writer=self._writer)
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if isinstance(cause, KeptStateError):
                    raise cause from None
            raise

    @_no_warning()
    def restore(self, *, loaded_step: int | None = None) -> int | None:
        """Load the newest state that all ranks have; all ranks call it, after the process group is made.

        Args:
            loaded_step: The step of the checkpoint that the script has loaded from disk: an older state is not loaded.

        Returns:
            The step of the state, or None if nothing was loaded.

        Raises:
            KeptStateError: There are several workers and no process group.
        """
        reader = MemoryReader()
        found = "" if reader.label is None else f"step {reader.label}"
        for problem in reader.problems:
            say(f"kept state: {problem}; {found or 'nothing'} is used instead")
        if reader.label is None:
            return None
        step = int(reader.label)
        if loaded_step is not None and step < loaded_step:
            say(f"kept state: {found} is older than step {loaded_step}, which was loaded; it is not used")
            return None
        state = self._collect()
        self._leave_out_fresh(state, (reader.read_metadata().planner_data or {}).values())
        rank, world_size = _find_rank()
        if reader.world_size == world_size:
            state[_OF_RANKS] = {f"{rank}": ({},)}
        load(state, storage_reader=reader)
        self._distribute(state)
        (of_this_rank,) = state.get(_OF_RANKS, {}).get(f"{rank}", ({},))
        for name, each in self._of_this_rank.items():
            if name in of_this_rank:
                each.load_state_dict(of_this_rank[name])
        say(f"kept state: the training goes on from {found}")
        return step

    def _collect(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, each in self._objects.items():
            if isinstance(each, torch.nn.Module):
                state[name] = get_model_state_dict(each)
            elif isinstance(each, torch.optim.Optimizer):
                state[name] = get_optimizer_state_dict(self._models[name], each)
            else:
                state[name] = (each.state_dict(),)  # torch takes a dict apart, but no tuple
        return state

    def _leave_out_fresh(self, state: dict[str, Any], kept_paths: Iterable[tuple[str | int, ...]]) -> None:
        """Leave out what optimizers have for parameters that had no gradient, and so no state, until the save."""
        kept = {path[:3] for path in kept_paths}
        for name, each in self._objects.items():
            if isinstance(each, torch.optim.Optimizer):
                of_parameters = state[name]["state"].items()
                state[name]["state"] = {one: value for one, value in of_parameters if (name, "state", one) in kept}

    def _distribute(self, state: dict[str, Any]) -> None:
        for name, each in self._objects.items():
            if isinstance(each, torch.nn.Module):
                if not _is_loaded(each, state[name]):
                    set_model_state_dict(each, state[name])
            elif isinstance(each, torch.optim.Optimizer):
                # Not strict: see _leave_out_fresh.
                options = StateDictOptions(strict=False)
                set_optimizer_state_dict(self._models[name], each, state[name], options=options)
            else:
                each.load_state_dict(state[name][0])


class _RandomNumbers:
    """The random numbers of this process, as an object with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the generators are."""
        numpy = sys.modules.get("numpy")
        return {
            "python": random.getstate(),
            "numpy": None if numpy is None else numpy.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call] # torch's
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let them go on from there."""
        random.setstate(state["python"])
        if state["numpy"] is not None:
            importlib.import_module("numpy").random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def _find_model(name: str, optimizer: torch.optim.Optimizer, objects: Any) -> torch.nn.Module:
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for each in objects:
        if isinstance(each, torch.nn.Module) and wanted <= {id(parameter) for parameter in each.parameters()}:
            return each
    message = f"the parameters of optimizer {name!r} are in none of the modules: give its module to KeptState as well"
    raise KeptStateError(message)


def _is_loaded(module: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether a module's state dict is made of its own tensors, so that to load into it was to load into the module."""
    own = {_address(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return all(isinstance(value, torch.Tensor) and _address(value) in own for value in state.values())


def _address(tensor: torch.Tensor) -> int:
    return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr())


def _find_rank() -> tuple[int, int]:
    has_group = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
