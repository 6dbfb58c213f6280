"""How the workers of a job connect and part: the store first, then the process group, then one all-reduce as proof.

Each rank writes its host's name into the store, and later that it has made its process group: torch alone leaves a
worker that waits for a missing rank without its name. Every wait is the store's own, and each rank does the same few
operations, however many ranks there are. At its end a worker lets its process groups go, see `destroy_groups`.
"""

from __future__ import annotations

import atexit
import datetime as dt
import gc
import os
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_run.worker.place import JoinError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

    from elastic_run.worker.place import Choice, Place

__all__ = ["RankBarrier", "destroy_groups", "has_failed", "join", "keep_groups", "keep_tensor"]

#: Ranks that a message names one by one.
_NAMED = 8
#: What to look at when ranks reach the store, but not each other.
_NETWORK = "look at firewalls between the nodes, and where they have several interfaces at GLOO_ or NCCL_SOCKET_IFNAME"
#: How long the store's worker lets the others leave before it takes the store with it; and how long after a failure,
#: which gloo tells some ranks several times later than others.
_LEAVE_LIMIT, _LEAVE_LIMIT_AFTER_FAILURE = dt.timedelta(seconds=10), dt.timedelta(seconds=60)
#: The store keeps the ranks that are there under this key; with a number, for a group that is destroyed and made again.
_PREFIX = "elastic_run/worker"
#: First release of torch that gives up Python's lock to destroy a group.
_GIVES_UP_LOCK = "2.8"
_last_reduced: deque[torch.Tensor] = deque(maxlen=1)


@dataclass(frozen=True, slots=True)
class RankBarrier:
    """The waits of all ranks for each other in the workers' store: before the process group is made, and at the end."""

    place: Place
    #: The workers' store, under a prefix of this barrier's own.
    store: Store
    #: How long each wait may take.
    timeout: dt.timedelta

    def wait_all_ranks(self) -> None:
        """Wait until all ranks are here: the last one says so to all."""
        self.store.set(f"host/{self.place.rank}", os.uname().nodename)
        try:
            if self.store.add("arrived", 1) >= self.place.world_size:
                self.store.set("arrived/all", "1")
            self.store.wait(["arrived/all"], self.timeout)
        except RuntimeError as error:
            problem = "not all ranks have arrived"
            raise self.failure(problem, error, recorded="host") from error

    def record_connected(self) -> None:
        """Note that this rank has made its process group."""
        self.store.set(f"connected/{self.place.rank}", "1")

    def wait_leaving(self, wait_limit: dt.timedelta = _LEAVE_LIMIT) -> None:
        """Let the worker that serves the store end last: the others ask it for the missing ranks, or just end.

        It waits no longer than a limit: a rank that has crashed does not sign off.
        """
        if self.place.is_store_served or self.place.world_size == 1:
            return
        try:
            if self.store.add("arrived", 0) <= 1:
                return  # no other rank came
            if self.store.add("left", 1) >= self.place.world_size:
                self.store.set("left/all", "1")
            if self.place.serves_store:
                self.store.wait(["left/all"], wait_limit)
        except RuntimeError:
            pass  # another rank has failed, or the store is gone: nothing is left to be said

    def failure(self, problem: str, error: Exception, *, recorded: str) -> JoinError:
        """Return the error that names the missing ranks, as far as the store can tell."""
        where = f"rank {self.place.rank} on {os.uname().nodename}"
        try:
            others = (rank for rank in range(self.place.world_size) if rank != self.place.rank)
            missing = [rank for rank in others if not self.store.check([f"{recorded}/{rank}"])]
            who = self._describe(missing, recorded)
        except RuntimeError as lost:
            who = f"the store at {self.place.master_addr}:{self.place.master_port} is gone ({_first_line(lost)})"
        seconds = self.timeout.total_seconds()
        return JoinError(f"{where}: {problem} (timeout {seconds:g} s): {who}. torch says: {_first_line(error)}")

    def _describe(self, missing: list[int], recorded: str) -> str:
        if not missing:
            return f"every other rank is there, so connections between them fail: {_NETWORK}"
        named = ", ".join(self._name(rank) for rank in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        count = f"{len(missing)} of {self.place.world_size} missing"
        has_come = recorded != "host"
        advice = f"did they fail? if not: {_NETWORK}" if has_come else "did they fail earlier, or never start?"
        return f"{count}: rank {named}{more} ({advice})"

    def _name(self, rank: int) -> str:
        key = f"host/{rank}"
        return f"{rank} on {self.store.get(key).decode()}" if self.store.check([key]) else str(rank)


def join(place: Place, choice: Choice, *, timeout: dt.timedelta, generation: int) -> RankBarrier:
    """Make the process group and prove that it works; this process has made `generation` groups before."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = PrefixStore(f"{_PREFIX}/{generation}", _open_store(place, timeout))
    barrier = RankBarrier(place, store, timeout)
    try:
        barrier.wait_all_ranks()
        _connect(barrier, choice)
    except JoinError:
        atexit.register(barrier.wait_leaving, _LEAVE_LIMIT_AFTER_FAILURE)  # then the error has been printed
        raise
    return barrier


def _connect(barrier: RankBarrier, choice: Choice) -> None:
    import torch.distributed as dist

    problem = "the process group could not be made"
    try:
        _make_group(barrier, choice)
        problem = "the first all-reduce failed"
        _prove(barrier, choice)
    except RuntimeError as error:
        failure = barrier.failure(problem, error, recorded="connected")
        # There a group with an unfinished collective may never be destroyed.
        if dist.is_initialized() and "nccl" not in choice.backend:
            dist.destroy_process_group()
        raise failure from error


def _open_store(place: Place, timeout: dt.timedelta) -> Store:
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if place.launcher == "none":
        return HashStore()
    try:
        return TCPStore(
            place.master_addr,
            place.master_port,
            place.world_size,
            place.serves_store,
            timeout,
            # Else the store's worker waits here for all ranks, and a missing rank looks like a port that is taken.
            wait_for_workers=False,
            multi_tenant=True,  # for a group that is made again
        )
    except (RuntimeError, ValueError) as error:
        raise _store_failure(place, timeout, error) from error


def _store_failure(place: Place, timeout: dt.timedelta, error: Exception) -> JoinError:
    address = f"{place.master_addr}:{place.master_port} (MASTER_ADDR, MASTER_PORT)"
    if place.serves_store:
        problem = f"could not serve the workers' store at {address}"
        advice = "is the port taken? set MASTER_PORT, the same for all ranks, to a free one"
    else:
        problem = f"could not reach the workers' store at {address} within {timeout.total_seconds():g} s"
        advice = "does the worker run that serves it, does the name resolve here, does a firewall let the port through?"
    where = f"rank {place.rank} on {os.uname().nodename}"
    return JoinError(f"{where} {problem} ({advice}). torch says: {_first_line(error)}")


def _make_group(barrier: RankBarrier, choice: Choice) -> None:
    import torch
    import torch.distributed as dist

    # Its functions take the group as the default of an argument when it is imported: by DDP, when there is one, which
    # nobody could destroy any more (torch 2.13). Now there is none.
    import torch.distributed.nn

    bound = None if choice.index is None or "nccl" not in choice.backend else torch.device(choice.device)
    dist.init_process_group(
        choice.backend,
        store=barrier.store,
        rank=barrier.place.rank,
        world_size=barrier.place.world_size,
        timeout=barrier.timeout,
        device_id=bound,
    )
    barrier.record_connected()


def _prove(barrier: RankBarrier, choice: Choice) -> None:
    import torch
    import torch.distributed as dist

    one = torch.ones(1, device=choice.device)
    keep_tensor(one)
    work = dist.all_reduce(one, async_op=True)
    work.wait(barrier.timeout)
    if one.item() != barrier.place.world_size:
        message = (
            f"the sum over {barrier.place.world_size} ranks is {one.item():g} instead of {barrier.place.world_size}"
        )
        raise RuntimeError(message)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# --- leaving ---------------------------------------------------------------------------------------------------------
def keep_tensor(reduced: torch.Tensor) -> None:
    """Hold a small tensor that a collective has reduced until the next one comes, for torch before 2.8."""
    _last_reduced.append(reduced)


def has_failed() -> bool:
    """Tell whether an exception ends this process."""
    return getattr(sys, "last_value", None) is not None


def destroy_groups() -> None:
    """Destroy all process groups except those that the program still holds.

    gloo's destructor waits for its threads, and such a thread may need Python's lock to let tensors go. Python destroys
    a group without that lock; the reducer of a model in DDP, which holds the group as well, destroys it with the lock
    held: both wait for ever. When Python is on its way out by then, the thread is ended instead, and the process aborts
    (torch issue 190489; seen with 2.13). So models let go first, then the group, while Python is all there. A group
    that the script still holds is never destroyed: the process's end takes it. Before torch 2.8, Python holds the lock
    in both cases: no group is destroyed, and `keep_tensor` holds those that a thread of gloo would let go.
    """
    import torch
    import torch.distributed as dist

    groups = _groups()
    if torch.__version__ < _GIVES_UP_LOCK:
        _keep(groups)
    remains = [weakref.ref(group) for group in groups]
    _release_models()
    dist.destroy_process_group()
    del groups  # the last to hold them
    _keep(group for remain in remains if (group := remain()) is not None)


def keep_groups() -> None:
    """Let all process groups be there until the process is gone, also when Python clears its modules.

    After a failure there may be collectives that never end, since the others wait for this worker: to destroy a group
    would make the whole job wait for their timeout.
    """
    _keep(_groups())


def _keep(groups: Iterable[dist.ProcessGroup]) -> None:
    import ctypes

    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _groups() -> list[dist.ProcessGroup]:
    # Private, but the one place that knows the groups of a DeviceMesh too; torch has had it since 2.0.
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def _release_models() -> None:
    """Take the group from all models in DDP; they can't be trained after it is gone anyway."""
    from torch.nn.parallel import DistributedDataParallel

    # Each object refers to its class: a search in C, 20 ms; in Python it takes 100.
    for each in gc.get_referrers(*_with_subclasses(DistributedDataParallel)):
        if isinstance(each, DistributedDataParallel):
            for name in ("logger", "reducer", "process_group"):
                vars(each).pop(name, None)


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        yield from _with_subclasses(child)
