"""Configurations of jobs for tests: without the waits that a user's job has by default."""

from __future__ import annotations

import os
import socket
from typing import Any

from elastic_run.core.job.config import JobConfig, NodeConfig
from elastic_run.core.protocol.facts import NodeInfo
from elastic_run.rendezvous.session import Setup


def plain_config(min_nodes: int = 1, max_nodes: int = 1, **changes: Any) -> JobConfig:
    """Return a configuration in which new nodes come at once, without a warning, as often as they like."""
    plain = {"scale_up_delay": 0.0, "scale_up_grace": 0.0, "membership_window": None}
    return JobConfig(min_nodes, max_nodes, **{**plain, **changes})


def plain_setup(
    workers: int = 1,
    *,
    node_config: NodeConfig | None = None,
    role: str = "default",
    **changes: Any,
) -> Setup:
    """Return what an agent tells its rendezvous."""
    return Setup(
        plain_config(**changes), node_config or NodeConfig(), NodeInfo(socket.gethostname(), os.getpid(), workers, role)
    )
