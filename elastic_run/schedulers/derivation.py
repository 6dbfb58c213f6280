"""What the command line says of the nodes of a job, for a scheduler, and what follows from the scheduler.

Nothing is derived from the variables of mpirun and of other programs that start launchers side by side: a line tells
that each launcher trains alone. Under mpirun this holds for a Slurm job as well: Slurm's variables are those of
mpirun's daemons, which are on all nodes but the first, while there may be several launchers on each.
"""

from __future__ import annotations

import os

from elastic_run import contract
from elastic_run.notices import UsageError
from elastic_run.records import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said of the nodes."""

    nnodes: str  # As it was written
    least: int
    most: int
    given: frozenset[str]  # Names of the values that the user gave, such as `node_rank`
    names_place: bool
    backend: str
    place_flag: str = ""  # The flag that says where the nodes meet, if one of them serves there
    hosts: tuple[str, ...] = ()  # What it says, with the last one's port
    port: str = ""


@dataclass(frozen=True, slots=True)
class Derivation:
    """What follows from the cluster's scheduler for this launcher."""

    source: str = ""  # Where the values come from, as in "from the Slurm step"
    kind: str = ""
    values: dict[str, object] = field(default_factory=dict)  # Values of flags, by their names
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # From which each value follows, if set
    is_per_gpu: bool = False  # Whether this node gets a worker for each of its GPUs
    is_first: bool = False  # Whether this is the first of the job's launchers, which shows the values for all
    notices: list[str] = field(default_factory=list)  # For the user, a sentence each
    location: str = ""  # This node's place in the network; see `NodeConfig`
    #: Whether Slurm's variables are left over from a step in which this launcher does not run; found at the start, as
    #: the parent of the launcher may end before the launcher
    has_left_slurm: bool = False


def check_endpoint(asked: Asked, launchers: str, first: str) -> None:
    """Refuse an endpoint that leads each launcher to its own machine; `first` names the first machine, if known.

    srun and an indexed Job give all launchers one command line. If it names this machine (localhost), every launcher
    comes to a store of its own: an elastic job would silently become as many jobs as it has nodes, any other waits in
    vain.
    """
    from elastic_run.rendezvous.addresses import names_loopback

    if not asked.hosts or not all(map(names_loopback, asked.hosts)):
        return
    if asked.place_flag == "--master-addr":
        remedy = f"give --master-addr={first or 'HOST, the name of the first one'}"
    else:
        port = asked.port if asked.port.isdecimal() else contract.DEFAULT_C10D_PORT
        remedy = "leave --rdzv-endpoint out" + (f", or give --rdzv-endpoint={first}:{port}" if first else "")
    message = (
        f"{asked.place_flag}: {asked.hosts[0]} leads each {launchers} to itself, so that they never meet: {remedy}"
    )
    raise UsageError(message)


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
