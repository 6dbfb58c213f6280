"""The agent of one node, under torch's names; each is loaded when it is first used.

| module | what it holds |
|---|---|
| `api`, `state` | specification, worker, worker group, result and the abstract agent, with torch's fields |
| `simple_elastic_agent` | `SimpleElasticAgent`: torch's template for agents with hooks of their own |
| `local_elastic_agent` | `LocalElasticAgent`: runs the workers of one node as processes, by the parts in `driver` |
| `steps`, `failures` | torch's events and metrics of an agent's steps; torch's exceptions and `ProcessFailure` |
| `health_check_server` | torch's hook for a site's own health checks; it serves nothing by itself |
| `history` | how each round ended: the lines while the job runs, and the result for the report |
| `background` | processes that workers left running in the background: they end or live on with the job |
| `senders` | which process sent a signal to the launcher |
| `script_name` | names of the workers' program: one that is the same on all nodes, and one for reports |
| `plugin_calls` | calls of code that is not ours, which change nothing of how the job ends |
| `http_server` | the one HTTP server, in the agent's loop |
| `http_ports` | `--health-port` and `--metrics-port` |
| `control_server`, `control_requests` | the control socket, and what commands may ask there |
"""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.api import (
        DEFAULT_ROLE as DEFAULT_ROLE,
    )
    from elastic_run.agent.api import (
        ElasticAgent as ElasticAgent,
    )
    from elastic_run.agent.api import (
        RunResult as RunResult,
    )
    from elastic_run.agent.api import (
        Worker as Worker,
    )
    from elastic_run.agent.api import (
        WorkerGroup as WorkerGroup,
    )
    from elastic_run.agent.api import (
        WorkerSpec as WorkerSpec,
    )
    from elastic_run.agent.local_elastic_agent import LocalElasticAgent as LocalElasticAgent
    from elastic_run.agent.simple_elastic_agent import SimpleElasticAgent as SimpleElasticAgent
    from elastic_run.agent.state import WorkerState as WorkerState

_HOMES = {
    "DEFAULT_ROLE": "api",
    "ElasticAgent": "api",
    "LocalElasticAgent": "local_elastic_agent",
    "RunResult": "api",
    "SimpleElasticAgent": "simple_elastic_agent",
    "Worker": "api",
    "WorkerGroup": "api",
    "WorkerSpec": "api",
    "WorkerState": "state",
}

__all__ = [  # noqa: PLE0604 - the keys are the names
    *_HOMES,
]

#: Names that torch's modules have from others, and that programs take from there.
_BORROWED = {
    "Event": "elastic_run.events",
    "EventSource": "elastic_run.events",
    "NumaOptions": "elastic_run.cluster.numa",
    "ProcessFailure": "elastic_run.multiprocessing.errors",
    "RendezvousGracefulExitError": "elastic_run.rendezvous.api",
    "SignalException": "elastic_run.multiprocessing",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "local_elastic_agent",
    "TORCHELASTIC_TIMER_FILE": "local_elastic_agent",
    "get_logger": "elastic_run.utils",
    "prof": "elastic_run.metrics",
    "put_metric": "elastic_run.metrics",
    "rdzv": "elastic_run.rendezvous:",
    "record": "elastic_run.events",
    "store_util": "torch.distributed.elastic.utils.store:",
}

__getattr__ = lazy_names(__name__, _HOMES | _BORROWED, logger="logger")
