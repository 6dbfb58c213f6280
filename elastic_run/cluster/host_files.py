"""Hosts of a job of PBS, LSF or Grid Engine, whose script runs on the first of them only.

Each of these schedulers names a file with a line for each host, or for each slot of a host; the name is the first word.
They start nothing on the other hosts: that is for the script.
"""

from __future__ import annotations

import os

from elastic_run.cluster.limits import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HOST_FILES", "find_job_hosts"]

#: The variable that names the file, and the scheduler.
HOST_FILES = {"PBS_NODEFILE": "PBS", "LSB_DJOB_HOSTFILE": "LSF", "PE_HOSTFILE": "Grid Engine"}


def find_job_hosts(environ: Mapping[str, str], hostname: str) -> tuple[str, tuple[str, ...]]:
    """Return the variable that names the file of this job's hosts, and the hosts, each once.

    Args:
        environ: The environment.
        hostname: This machine's name. A file that does not name it is left over from another job.

    Returns:
        "" and no hosts outside of such a job.
    """
    for variable in HOST_FILES:
        path = environ.get(variable, "")
        # A pipe that nobody writes would hold the launcher up.
        lines = read_text(path).splitlines() if os.path.isfile(path) else []
        hosts = tuple(dict.fromkeys(line.split()[0] for line in lines if line.strip() and line.isprintable()))
        if hostname.partition(".")[0] in {host.partition(".")[0] for host in hosts}:
            return variable, hosts
    return "", ()
