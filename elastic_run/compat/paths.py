"""Which of torch's paths mean which of ours.

Everything in this table is public in torch 2.13 and promised by us. `torch.distributed.elastic` itself and its
`agent` are empty packages: they stay torch's.
"""

from __future__ import annotations

#: Below these lie all of torch's modules that have to do with launching.
ROOTS = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher", "torch.distributed.elastic")

PATHS: dict[str, str] = {
    "torch.distributed.run": "elastic_run.run",
    "torch.distributed.launch": "elastic_run.launch",
    "torch.distributed.launcher": "elastic_run.launcher",
    "torch.distributed.launcher.api": "elastic_run.launcher",
    "torch.distributed.elastic.agent.server": "elastic_run.agent",
    "torch.distributed.elastic.agent.server.api": "elastic_run.agent",
    "torch.distributed.elastic.agent.server.local_elastic_agent": "elastic_run.agent.local_elastic_agent",
    "torch.distributed.elastic.agent.server.health_check_server": "elastic_run.agent.health_check_server",
    "torch.distributed.elastic.control_plane": "elastic_run.control_plane",
    "torch.distributed.elastic.events": "elastic_run.events",
    "torch.distributed.elastic.events.api": "elastic_run.events.api",
    "torch.distributed.elastic.events.handlers": "elastic_run.events.handlers",
    "torch.distributed.elastic.metrics": "elastic_run.metrics",
    "torch.distributed.elastic.metrics.api": "elastic_run.metrics.api",
    "torch.distributed.elastic.multiprocessing": "elastic_run.multiprocessing",
    "torch.distributed.elastic.multiprocessing.api": "elastic_run.multiprocessing",
    "torch.distributed.elastic.multiprocessing.errors": "elastic_run.multiprocessing.errors",
    "torch.distributed.elastic.multiprocessing.errors.error_handler": (
        "elastic_run.multiprocessing.errors.error_handler"
    ),
    "torch.distributed.elastic.multiprocessing.errors.handlers": "elastic_run.multiprocessing.errors.handlers",
    "torch.distributed.elastic.rendezvous": "elastic_run.rendezvous",
    "torch.distributed.elastic.rendezvous.api": "elastic_run.rendezvous.api",
    "torch.distributed.elastic.rendezvous.etcd_server": "elastic_run.rendezvous.etcd_server",
    "torch.distributed.elastic.rendezvous.registry": "elastic_run.rendezvous.registry",
    "torch.distributed.elastic.rendezvous.utils": "elastic_run.rendezvous.utils",
    "torch.distributed.elastic.timer": "elastic_run.timer",
    "torch.distributed.elastic.timer.api": "elastic_run.timer.api",
    "torch.distributed.elastic.timer.debug_info_logging": "elastic_run.timer.debug_info_logging",
    "torch.distributed.elastic.timer.file_based_local_timer": "elastic_run.timer.file_based_local_timer",
    "torch.distributed.elastic.timer.local_timer": "elastic_run.timer.local_timer",
    "torch.distributed.elastic.utils": "elastic_run.utils",
    "torch.distributed.elastic.utils.api": "elastic_run.utils.api",
    "torch.distributed.elastic.utils.data": "elastic_run.utils.data",
    "torch.distributed.elastic.utils.data.cycling_iterator": "elastic_run.utils.data.cycling_iterator",
    "torch.distributed.elastic.utils.data.elastic_distributed_sampler": (
        "elastic_run.utils.data.elastic_distributed_sampler"
    ),
    "torch.distributed.elastic.utils.distributed": "elastic_run.utils.distributed",
    "torch.distributed.elastic.utils.log_level": "elastic_run.utils.log_level",
    "torch.distributed.elastic.utils.logging": "elastic_run.utils.logging",
    "torch.distributed.elastic.utils.process_state": "elastic_run.utils.process_state",
    "torch.distributed.elastic.utils.store": "elastic_run.utils.store",
}
