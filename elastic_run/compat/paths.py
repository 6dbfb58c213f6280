"""Which of torch's paths mean which of ours, and which names of theirs come from elsewhere.

Everything in the table of paths is public in torch 2.13 and promised by us. `torch.distributed.elastic` itself and its
`agent` are empty packages; its `timer`, `utils` and `control_plane` run in workers and in programs: they stay torch's.
A test holds the tables against torch.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
    "torch.distributed.elastic.events": "elastic_run.events",
    "torch.distributed.elastic.events.api": "elastic_run.events.api",
    "torch.distributed.elastic.events.handlers": "elastic_run.events",
    "torch.distributed.elastic.metrics": "elastic_run.metrics",
    "torch.distributed.elastic.metrics.api": "elastic_run.metrics",
    "torch.distributed.elastic.multiprocessing": "elastic_run.multiprocessing",
    "torch.distributed.elastic.multiprocessing.api": "elastic_run.multiprocessing",
    "torch.distributed.elastic.multiprocessing.errors": "elastic_run.multiprocessing.errors",
    "torch.distributed.elastic.multiprocessing.errors.error_handler": (
        "elastic_run.multiprocessing.errors.error_handler"
    ),
    "torch.distributed.elastic.multiprocessing.errors.handlers": "elastic_run.multiprocessing.errors.error_handler",
    "torch.distributed.elastic.rendezvous": "elastic_run.rendezvous",
    "torch.distributed.elastic.rendezvous.api": "elastic_run.rendezvous.api",
    "torch.distributed.elastic.rendezvous.registry": "elastic_run.rendezvous.registry",
    "torch.distributed.elastic.rendezvous.utils": "elastic_run.rendezvous.utils",
}

_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server"

#: Public names that torch's modules import from torch's other modules, and that programs take from there: they are
#: torch's own, so an alias gives them out and our modules don't. Torch's path -> where to get them -> their names.
BORROWED_NAMES: dict[str, dict[str, str]] = {
    "torch.distributed.run": {"argparse": "REMAINDER", "torch.distributed.argparse_util": "check_env env"},
    "torch.distributed.launcher.api": {"torch._utils_internal": "get_default_numa_options justknobs_check"},
    f"{_AGENT}.local_elastic_agent": {"torch._utils_internal": "justknobs_check"},
    f"{_ELASTIC}.multiprocessing.api": {
        f"{_ELASTIC}.multiprocessing.redirects": "IS_MACOS IS_WINDOWS redirect_stderr redirect_stdout",
        f"{_ELASTIC}.multiprocessing.subprocess_handler": "SubprocessHandler get_subprocess_handler",
        f"{_ELASTIC}.multiprocessing.tail_log": "TailLog",
    },
    f"{_ELASTIC}.rendezvous.api": {"torch.distributed": "Store"},
    f"{_ELASTIC}.rendezvous.registry": {f"{_ELASTIC}.rendezvous.dynamic_rendezvous": "create_handler"},
}


def find_home(path: str, name: str) -> str | None:
    """Return the module from which a module of torch's has a name, or None if the name is its own."""
    homes = BORROWED_NAMES.get(path, {})
    return next((home for home, names in homes.items() if name in names.split()), None)


def get_fully_qualified_hostname() -> str:
    """Return this host's name with its domain, as the resolver knows it."""
    import socket

    return socket.getfqdn(socket.gethostname())


#: Private names that torch's own modules take from the modules in whose place ours stand. Workers import these modules
#: (torch.distributed.checkpoint of torch 2.5 to 2.13 is one), and must not load torch's launcher for them.
PRIVATE_NAMES: dict[tuple[str, str], Callable[..., object]] = {
    ("torch.distributed.elastic.agent.server.api", "_get_fq_hostname"): get_fully_qualified_hostname,
}
