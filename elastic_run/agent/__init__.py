"""The agent of one node, under torch's names; each is loaded when it is first used.

`api` and `results` have torch's records, states and exceptions, `simple_elastic_agent` torch's template of an agent,
`local_elastic_agent` the agent that every launch runs, by the parts in `driver`.
"""

from __future__ import annotations

from elastic_run import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.agent.api import DEFAULT_ROLE, ElasticAgent, RunResult, Worker, WorkerGroup, WorkerSpec
    from elastic_run.agent.local_elastic_agent import LocalElasticAgent
    from elastic_run.agent.results import WorkerState
    from elastic_run.agent.simple_elastic_agent import SimpleElasticAgent

__all__ = [
    "DEFAULT_ROLE",
    "ElasticAgent",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

_HOMES = dict.fromkeys(__all__, "api") | {
    "LocalElasticAgent": "local_elastic_agent",
    "SimpleElasticAgent": "simple_elastic_agent",
    "WorkerState": "results",
}
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
