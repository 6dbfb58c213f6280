"""Values that follow from the cluster's scheduler, unless a flag gives them.

Schedulers start a launcher on each node: srun in a step of Slurm, Kubernetes in each pod of an indexed Job. Together
these launchers are one job. Without the derived values each of them would train a model of its own.

Other programs, such as mpirun, also start launchers side by side. Nothing is derived from their variables, and a line
tells that each launcher trains alone. Under mpirun this holds for a Slurm job as well: Slurm's variables are those of
mpirun's daemons, which are on all nodes but the first, while there may be several launchers on each.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.cli.config import names_rendezvous
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.origins import Origin, derive
from elastic_run.cli.values import node_range
from elastic_run.rendezvous.backend_table import BACKENDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Container, Mapping

    from elastic_run.cli.origins import Origins

_DEFAULTS = {flag.dest: flag.default for flag in FLAGS}
#: Programs that start launchers side by side, and the variable that holds their number.
STARTERS = {
    "mpirun": "OMPI_COMM_WORLD_SIZE",  # of Open MPI
    "mpirun_rsh": "MV2_COMM_WORLD_SIZE",  # of MVAPICH2
    "jsrun": "JSM_NAMESPACE_SIZE",
    "flux": "FLUX_JOB_SIZE",
    "SkyPilot": "SKYPILOT_NUM_NODES",
}


def complete_from_cluster(args: Namespace, environ: Mapping[str, str], origins: Origins | None = None) -> list[str]:
    """Fill in values that follow from this launcher's Slurm step or indexed Job, unless a flag gives them.

    Args:
        args: The command line; it is changed.
        environ: The environment.
        origins: Origins of the values that the user gave; the origins of the derived values are added. None if a
            program made the namespace: then values that differ from the defaults count as given, and the number of
            workers always.

    Returns:
        Notices for the user, a sentence each.

    Raises:
        UsageError: The launchers would not become one job.
    """
    _look_for_step(args, environ)
    # The scheduler's variables do not describe a launcher inside a worker. A plug-in may count nodes in its own way.
    if contract.ENV_RUN_ID in environ or args.standalone or args.rdzv_backend not in BACKENDS:
        return []
    given = set(origins) if origins is not None else _find_changed(args)
    names_place = _names_place(args, given)
    starter, count = _find_starter(environ)
    if count > 1 and not names_place:
        return [_describe_starter(starter, count, environ)] if node_range(args.nnodes)[1] == 1 else []
    # Imported here: most launchers run outside of both.
    if "SLURM_JOB_ID" in environ or "SLURM_STEP_ID" in environ:
        from elastic_run.cli.slurm_step import derive_from_step as find
    elif "JOB_COMPLETION_INDEX" in environ:
        from elastic_run.cli.indexed_job import derive_from_indexed_job as find
    else:
        return [] if names_place or node_range(args.nnodes)[1] > 1 else _describe_idle_hosts(environ)
    found = find(args, environ, given, names_place=names_place)
    if found.location:
        args.location = found.location
    if found.launch_step is not None:
        args.launch_step = found.launch_step
    values = {dest: value for dest, value in found.values.items() if value != getattr(args, dest)}
    for dest, value in values.items():
        variables = ", ".join(name for name in found.variables[dest] if environ.get(name))
        source = variables or ("GPUs of this node" if dest == "nproc_per_node" else "")
        derive(args, {} if origins is None else origins, Origin(found.kind, source, str(value)), **{dest: value})
    if not (values and found.is_first):
        return found.notices
    told = " ".join(f"--{dest.replace('_', '-')}={value}" for dest, value in values.items())
    return [f"from {found.source}: {told}", *found.notices]


def _look_for_step(args: Namespace, environ: Mapping[str, str]) -> None:
    """Note that variables of a Slurm step are left over; see `has_left_slurm`."""
    if "SLURM_STEP_ID" in environ:
        from elastic_run.cluster.slurm import is_left_over

        if is_left_over(environ):
            args.has_left_slurm = True


def _find_changed(args: Namespace) -> set[str]:
    """Return the names of the values that count as given in a namespace that a program has made."""
    return {dest for dest, value in vars(args).items() if value != _DEFAULTS.get(dest, value)} | {"nproc_per_node"}


def _find_starter(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the program that has started this launcher and others side by side, and their number, or 1."""
    if environ.get("SLURM_TASK_PID") == str(os.getpid()):
        return "", 1  # srun has started this process itself
    counts = {starter: environ.get(name, "") for starter, name in STARTERS.items()}
    if "MPI_LOCALNRANKS" in environ:  # of MPICH and Intel MPI; srun sets PMI_SIZE as well
        counts["mpiexec"] = environ.get("PMI_SIZE", "")
    if environ.get("SM_HOSTS"):
        counts["SageMaker"] = str(environ["SM_HOSTS"].count(",") + 1)
    return max(
        ((starter, int(count)) for starter, count in counts.items() if count.isdecimal()),
        key=lambda found: found[1],
        default=("", 1),
    )


def _describe_idle_hosts(environ: Mapping[str, str]) -> list[str]:
    """Say that the other hosts of this job of PBS, LSF or Grid Engine do nothing."""
    if not any(environ.get(variable) for variable in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")):
        return []
    from elastic_run.cluster.host_files import HOST_FILES, find_job_hosts

    variable, hosts = find_job_hosts(environ, os.uname().nodename)
    if len(hosts) < 2:  # noqa: PLR2004 - this one
        return []
    notice = (
        f"{HOST_FILES[variable]} has given this job {len(hosts)} hosts ({variable}), and elastic-run uses only this "
        f"host; for one job on all hosts, run on each host: elastic-run --nnodes={len(hosts)} --rdzv-backend=c10d "
        f"--rdzv-endpoint={hosts[0]}:{contract.DEFAULT_C10D_PORT} --rdzv-id=ID …"
    )
    return [notice]


def _describe_starter(starter: str, count: int, environ: Mapping[str, str]) -> str:
    by_srun = "; by srun --ntasks-per-node=1 they need no flag" if "SLURM_JOB_ID" in environ else ""
    return (
        f"{starter} has started {count} launchers, and each runs a job of its own; for one job, start one launcher on "
        "each node, and give all of them --nnodes, --rdzv-backend=c10d, --rdzv-endpoint=HOST:PORT and "
        f"--rdzv-id{by_srun}"
    )


def _names_place(args: Namespace, given_flags: Container[str]) -> bool:
    """Whether the command line says where the nodes meet."""
    if args.rdzv_backend == "c10d":
        return bool(args.rdzv_endpoint)
    return names_rendezvous(args) or "master_addr" in given_flags
