"""Public names that torch's modules import from torch's other modules, and that programs take from there.

They are torch's own, so an alias gives them out and our modules don't. A test holds the table against torch 2.13.
"""

from __future__ import annotations

_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server"

#: Torch's path -> where to get them -> their names.
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
    """Find from where a module of torch's borrows a name.

    Args:
        path: Torch's module.
        name: What is asked for there.

    Returns:
        The module to import it from, or None if the name isn't borrowed.
    """
    homes = BORROWED_NAMES.get(path, {})
    return next((home for home, names in homes.items() if name in names.split()), None)
