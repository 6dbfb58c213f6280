"""The values and notices that follow from the cluster's scheduler."""

from __future__ import annotations

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from elastic_run.core.job.node_config import LaunchStep


@dataclass(frozen=True, slots=True)
class Derivation:
    """Values for a command line, and notices for its user.

    Attributes:
        source: Their source, as in "from the Slurm step".
        kind: The scheduler: `origins.SLURM` or `origins.KUBERNETES`.
        values: The values, by the flags' names in the namespace.
        variables: The variables from which each value follows, if they are set.
        is_first: Whether this is the first of the job's launchers; it shows the values for all launchers.
        notices: Notices for the user, a sentence each.
        location: This node's place in the network; see `NodeConfig`.
        launch_step: See `NodeConfig`.
    """

    source: str = ""
    kind: str = ""
    values: dict[str, object] = field(default_factory=dict)
    variables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_first: bool = False
    notices: list[str] = field(default_factory=list)
    location: str = ""
    launch_step: LaunchStep | None = None
