"""Torch's own module, under the path that follows from torch's."""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.distributed.elastic.utils.distributed import *  # noqa: F403 - all of it

__getattr__ = lazy_names(__name__, {}, rest="torch.distributed.elastic.utils.distributed")
