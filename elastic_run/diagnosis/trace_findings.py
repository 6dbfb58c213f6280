"""The records of the analysis of dumps: process groups, findings and their kinds."""

from __future__ import annotations

from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.collectives import Collective
    from elastic_run.diagnosis.operation_match import Calls

#: Kinds of findings, the likelier cause first.
DIFFERENT_CALLS = "different_calls"
OTHER_SIZE = "other_size"
NOT_JOINED = "not_joined"
NO_PARTNER = "no_partner"
DIFFERENT_ORDER = "different_order"
NOT_STARTED = "not_started"
NO_SENDER = "no_sender"
NO_DUMP = "no_dump"
ALONE = "alone"
UNFINISHED = "unfinished"
BEHIND = "behind"
KINDS = (
    *(DIFFERENT_CALLS, OTHER_SIZE, DIFFERENT_ORDER, NOT_JOINED, NO_PARTNER, NOT_STARTED, NO_SENDER),
    *(NO_DUMP, ALONE, BEHIND, UNFINISHED),
)
#: Kinds without ranks at which the cause lies.
WITHOUT_RANKS = (NO_SENDER, ALONE, UNFINISHED)


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why the ranks of a group do not go on.

    Args:
        kind: One of the kinds above.
        group: Name of the process group.
        description: Description of the process group, or "".
        members: Ranks of the group that are known.
        operation: The operation, or "" where it is unknown.
        sequence: Its number in the group.
        ranks: The ranks at which the cause lies.
        waiting: The ranks that wait for them.
        where: Where the waiting ranks are in the user's code, or "".
        difference: For different calls: the operation, the sizes or the types.
        calls: For different calls, and for a different order: ranks, and the collective that these ranks call.
        last: The last collective of each of `ranks`, if it has one.
        behind: For each of `ranks`, how many collectives its peers are ahead.
    """

    kind: str
    group: str
    description: str
    members: tuple[int, ...]
    operation: str
    sequence: int
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    where: str = ""
    difference: str = ""
    calls: tuple[tuple[tuple[int, ...], Collective], ...] = ()
    last: tuple[tuple[int, Collective], ...] = ()
    behind: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Analysis:
    """The findings from the dumps of a job.

    Args:
        findings: The cause first, then the findings that do not follow from it.
        consequences: Findings that follow from those.
        ranks: Ranks that have a dump.
        absent: Ranks of a group that have none.
    """

    findings: tuple[Finding, ...]
    consequences: tuple[Finding, ...]
    ranks: tuple[int, ...]
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The calls of a process group that one backend performs, as the dumps show them.

    Args:
        name: Its name.
        description: Its description, or "".
        members: Its ranks, as far as they are known.
        calls: The collectives of each rank that has a dump, by their number in the group.
        is_listed: Whether a dump lists the members.
        library: Name of the backend: a group may have one for each kind of device.
    """

    name: str
    description: str
    members: tuple[int, ...]
    calls: dict[int, dict[int, Calls]]
    is_listed: bool
    library: str = ""

    def has(self, call: Collective) -> bool:
        """Whether a call is one of this group's."""
        return (call.group, call.library) == (self.name, self.library)
