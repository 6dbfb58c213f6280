"""How a worker lets its process groups go at its end, so that neither gloo nor Python has to wait for the other.

gloo's destructor waits for its threads, and such a thread may need Python's lock to let tensors go. Python destroys a
group without that lock; the reducer of a model in DDP, which holds the group as well, destroys it with the lock held:
both wait for ever. When Python is on its way out by then, the thread is ended instead, and the process aborts (torch
issue 190489; seen with 2.13). So models let go first, then the group, while Python is all there. A group that the
script still holds then is never destroyed: the process's end takes it.

Before torch 2.8, Python holds the lock as well when it destroys a group. With these releases no group is destroyed at
the end. The tensors of our own small reductions are held, since a thread of gloo needs the lock only for a tensor that
nobody else holds. A thread that needs the lock when Python has ended still aborts the process there.

After a failure there may be collectives that never end, since the others wait for this worker. The
destructor would wait for their timeout, and the whole job with it. So no group is destroyed then.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    import torch.distributed as dist

__all__ = ["destroy_groups", "has_failed", "keep_groups", "keep_tensor"]

#: First release of torch that gives up Python's lock to destroy a group.
_GIVES_UP_LOCK = "2.8"
_last_reduced: deque[torch.Tensor] = deque(maxlen=1)


def keep_tensor(reduced: torch.Tensor) -> None:
    """Hold a tensor until the next one comes, so that `destroy_process_group` need not wait for its end.

    Args:
        reduced: A small tensor that a collective has reduced, before its last other reference goes.
    """
    _last_reduced.append(reduced)


def has_failed() -> bool:
    """Tell whether an exception ends this process."""
    return getattr(sys, "last_value", None) is not None


def destroy_groups() -> None:
    """Destroy all process groups except those that the program still holds."""
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
    """Let all process groups be there until the process is gone, also when Python clears its modules."""
    _keep(_groups())


def _keep(groups: Iterable[dist.ProcessGroup]) -> None:
    import ctypes

    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _groups() -> list[dist.ProcessGroup]:
    import torch.distributed as dist

    # Private, but the one place that knows the groups of a DeviceMesh too; torch has had it since 2.0.
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001


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
