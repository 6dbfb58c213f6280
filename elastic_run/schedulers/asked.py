"""What the command line says of the nodes of a job, for a scheduler, and what follows from the scheduler."""

from __future__ import annotations

from elastic_run import contract
from elastic_run.errors import UsageError
from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user said of the nodes.

    Attributes:
        nnodes: The value of --nnodes as it was written.
        least: Fewest nodes.
        most: Most nodes.
        given: Names of the values that the user gave, such as ``node_rank``.
        names_place: Whether the user said where the nodes meet.
        backend: The rendezvous backend.
        place_flag: The flag that says where the nodes meet, if one of them serves there; else "".
        hosts: The hosts that it names.
        port: The last port that it names, or "".
    """

    nnodes: str
    least: int
    most: int
    given: frozenset[str]
    names_place: bool
    backend: str
    place_flag: str = ""
    hosts: tuple[str, ...] = ()
    port: str = ""


@dataclass(frozen=True, slots=True)
class Derivation:
    """What follows from the cluster's scheduler for this launcher.

    Attributes:
        source: Where the values come from, as in "from the Slurm step".
        kind: The scheduler.
        values: Values of flags, by their names.
        variables: The variables from which each value follows, if they are set.
        is_per_gpu: Whether this node gets a worker for each of its GPUs.
        is_first: Whether this is the first of the job's launchers; it shows the values for all launchers.
        notices: Notices for the user, a sentence each.
        location: This node's place in the network; see `NodeConfig`.
        has_left_slurm: Whether Slurm's variables are left over from a step in which this launcher does not run. The
            answer is found at the start, since the parent of the launcher may end before the launcher.
    """

    source: str = ""
    kind: str = ""
    values: dict[str, object] = field(default_factory=dict)
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_per_gpu: bool = False
    is_first: bool = False
    notices: list[str] = field(default_factory=list)
    location: str = ""
    has_left_slurm: bool = False


def check_endpoint(asked: Asked, launchers: str, first: str) -> None:
    """Refuse an endpoint that leads each launcher to its own machine.

    srun and an indexed Job give all launchers one command line. If it names this machine (localhost), every launcher
    comes to a store of its own: an elastic job would silently become as many jobs as it has nodes, any other waits in
    vain.

    Args:
        asked: What the user said of the nodes.
        launchers: What each launcher runs on: ``node of the Slurm step``.
        first: Name of the first machine, "" if not known.

    Raises:
        UsageError: No launcher would find another one.
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
