"""Describes this node for the rendezvous: its workers, their program, its machine, and the user's settings."""

from __future__ import annotations

import os
import socket
import sys

from elastic_run import __version__
from elastic_run.agent.script_name import find_script_file, name_script
from elastic_run.cluster.machine import find_machine_name
from elastic_run.cluster.torch_devices import find_torch_version
from elastic_run.core.protocol.facts import NodeInfo
from elastic_run.multiprocessing.process.interpreter import own_interpreter
from elastic_run.records import replace
from elastic_run.rendezvous import session as sessions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.api import WorkerSpec
    from elastic_run.agent.driver.context import AgentOptions


def make_setup(spec: WorkerSpec, options: AgentOptions, *, shows_waiting: bool) -> sessions.Setup:
    """Return the description of this node's workers and the user's settings for the rendezvous."""
    config, node_config = options.job_config, options.node_config
    if not node_config.scale_up_signal:
        config = replace(config, scale_up_grace=0.0)  # the workers are not warned, so they need no time
    node_info = NodeInfo(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_world_size=spec.local_world_size,
        role=spec.role,
        preferred_rank=node_config.preferred_rank,
        location=node_config.location,
        version=__version__,
        script=name_script(spec.entrypoint, spec.args),
        machine=find_machine_name(os.environ),
        torch=_find_torch(spec),
        script_file=find_script_file(spec.entrypoint, spec.args),
    )
    return sessions.Setup(config, node_config, node_info, shows_waiting=shows_waiting)


def _find_torch(spec: WorkerSpec) -> str:
    """Return the version of torch that workers import; "" for programs of another interpreter."""
    is_other = isinstance(spec.entrypoint, str) and spec.entrypoint not in (sys.executable, own_interpreter())
    return "" if is_other else find_torch_version(sys.path)
