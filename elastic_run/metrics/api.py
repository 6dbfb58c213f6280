"""The package itself, under the path of torch's module that has its names."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.metrics import *  # noqa: F403 - all of it

sys.modules[__name__] = importlib.import_module("elastic_run.metrics")
