"""Launchers that other programs start side by side, and hosts on which nothing starts one.

Nothing is derived from the variables of mpirun and others, and a line tells that each launcher trains alone. Under
mpirun this holds for a Slurm job as well: Slurm's variables are those of mpirun's daemons, which are on all nodes but
the first, while there may be several launchers on each.
"""

from __future__ import annotations

import os

from elastic_run import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

#: Programs that start launchers side by side, and the variable that holds their number.
STARTERS = {
    "mpirun": "OMPI_COMM_WORLD_SIZE",  # of Open MPI
    "mpirun_rsh": "MV2_COMM_WORLD_SIZE",  # of MVAPICH2
    "jsrun": "JSM_NAMESPACE_SIZE",
    "flux": "FLUX_JOB_SIZE",
    "SkyPilot": "SKYPILOT_NUM_NODES",
}
#: Schedulers that run a job's script on the first of its hosts only, and the variable with the file of these hosts: a
#: line for each host, or for each slot of a host, with the name as the first word.
HOST_FILES = {"PBS_NODEFILE": "PBS", "LSB_DJOB_HOSTFILE": "LSF", "PE_HOSTFILE": "Grid Engine"}


def describe_starter(environ: Mapping[str, str]) -> str:
    """Return a notice on the program that has started this launcher and others side by side, or ""."""
    if environ.get("SLURM_TASK_PID") == str(os.getpid()):
        return ""  # srun has started this process itself
    counts = {starter: environ.get(name, "") for starter, name in STARTERS.items()}
    if "MPI_LOCALNRANKS" in environ:  # of MPICH and Intel MPI; srun sets PMI_SIZE as well
        counts["mpiexec"] = environ.get("PMI_SIZE", "")
    if environ.get("SM_HOSTS"):
        counts["SageMaker"] = str(environ["SM_HOSTS"].count(",") + 1)
    found = {starter: int(count) for starter, count in counts.items() if count.isdecimal()}
    starter = max(found, key=lambda name: found[name], default="")
    if found.get(starter, 1) <= 1:
        return ""
    by_srun = "; by srun --ntasks-per-node=1 they need no flag" if "SLURM_JOB_ID" in environ else ""
    return (
        f"{starter} has started {found[starter]} launchers, and each runs a job of its own; for one job, start one "
        "launcher on each node, and give all of them --nnodes, --rdzv-backend=c10d, --rdzv-endpoint=HOST:PORT and "
        f"--rdzv-id{by_srun}"
    )


def describe_idle_hosts(environ: Mapping[str, str], hostname: str) -> str:
    """Return a notice that the other hosts of this job of PBS, LSF or Grid Engine do nothing, or "".

    A file that does not name this host, `hostname`, is left over from another job.
    """
    for variable, scheduler in HOST_FILES.items():
        path = environ.get(variable, "")
        if not os.path.isfile(path):  # a pipe to which nothing is written would hold the launcher up
            continue
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except OSError:
            continue
        hosts = tuple(dict.fromkeys(line.split()[0] for line in lines if line.strip() and line.isprintable()))
        if hostname.partition(".")[0] not in {host.partition(".")[0] for host in hosts}:
            continue
        if len(hosts) == 1:
            return ""
        return (
            f"{scheduler} has given this job {len(hosts)} hosts ({variable}), and elastic-run uses only this "
            f"host; for one job on all hosts, run on each host: elastic-run --nnodes={len(hosts)} --rdzv-backend=c10d "
            f"--rdzv-endpoint={hosts[0]}:{contract.DEFAULT_C10D_PORT} --rdzv-id=ID …"
        )
    return ""
