"""The agent of one node, under torch's names; each is loaded when it is first used.

| module | what it holds |
|---|---|
| `agent_view` | the parts of the agent that a request on the control socket may read |
| `api` | specification, worker, worker group, result and the abstract agent, with torch's fields |
| `background` | processes that workers left running in the background: they end or live on with the job |
| `control_requests` | the requests that commands may make of a running agent |
| `control_server` | the agent's control socket, on which commands ask |
| `control_connection` | a client of it: the request and the answer |
| `driver` | the parts that `LocalElasticAgent` runs a job with |
| `failures` | a failed job as torch's exceptions and `ProcessFailure`, for programs that launch |
| `gpu_question` | asks for the GPU use of processes in a thread |
| `health_check_server` | torch's hook for a site's own health checks; it serves nothing by itself |
| `health_port` | `--health-port`: answers whether the agent is alive, and whether its workers run |
| `history` | how each round ended: the lines while the job runs, and the result for the report |
| `http_listener` | a port at which an agent answers requests over HTTP |
| `http_requests` | one request over HTTP, read and answered |
| `job_metrics` | counts the events of this node, for `--metrics-port` |
| `job_questions` | `status`, `stacks` and `drain` of all nodes of a job, asked and answered through its store |
| `local_elastic_agent` | `LocalElasticAgent`: runs the workers of one node as processes |
| `metrics_port` | `--metrics-port`: the counts, for Prometheus |
| `plugin_calls` | calls of code that is not ours, which change nothing of how the job ends |
| `removal_watch` | tells that another program has removed a file of the agent |
| `script_name` | names of the workers' program: one that is the same on all nodes, and one for reports |
| `senders` | which process sent a signal to the launcher |
| `user_rules` | the search for the rules of --failure-rules in what a failed worker said |
| `simple_elastic_agent` | `SimpleElasticAgent`: torch's template for agents with hooks of their own |
| `state` | `WorkerState`, without which workers can be started |
| `steps` | torch's events and metrics of an agent's steps |
| `stop_requests` | requests to stop a job, from any thread, each passed on once |
| `worker_stacks` | this node's answer to `elastic-run stacks` |
| `worker_status` | this node's answer to `elastic-run status` |
"""

from __future__ import annotations

from elastic_run.lazy import lazy_names

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
    "RendezvousGracefulExitError": "elastic_run.rendezvous.errors",
    "SignalException": "elastic_run.multiprocessing",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "local_elastic_agent",
    "TORCHELASTIC_TIMER_FILE": "local_elastic_agent",
    "get_logger": "elastic_run.utils.logging",
    "prof": "elastic_run.metrics",
    "put_metric": "elastic_run.metrics",
    "rdzv": "elastic_run.rendezvous:",
    "record": "elastic_run.events",
    "store_util": "elastic_run.utils.store:",
}

__getattr__ = lazy_names(__name__, _HOMES | _BORROWED, logger="logger")
