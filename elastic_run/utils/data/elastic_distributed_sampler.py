"""Torch's own module, under the path that follows from torch's."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch.distributed.elastic.utils.data.elastic_distributed_sampler import *  # noqa: F403 - all of it

sys.modules[__name__] = importlib.import_module("torch.distributed.elastic.utils.data.elastic_distributed_sampler")
