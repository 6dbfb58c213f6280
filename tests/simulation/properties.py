"""What must hold in every run: the names of the properties, and the error that a broken one raises."""

from __future__ import annotations

__all__ = [
    "ASSIGNMENTS",
    "BUDGET",
    "DELETED",
    "ENDS",
    "KNOWN_BROKEN",
    "ONE_DECIDER",
    "ONE_HISTORY",
    "ONE_ROUND",
    "PROGRESS",
    "REFUSALS",
    "RESTARTS_USED",
    "SIZE",
    "SUCCESS",
    "VERDICT",
    "WORKERS_STORE",
    "BrokenPropertyError",
    "require",
]

ONE_DECIDER = "one decider per slot"
ONE_ROUND = "no two rounds at once"
WORKERS_STORE = "one round per workers' store"
ASSIGNMENTS = "assignments that fit together"
BUDGET = "restarts within the budget"
RESTARTS_USED = "a failure ends a job only when its restarts are used"
DELETED = "only what is out of use is deleted"
ONE_HISTORY = "each round follows the last one that all members were told"
VERDICT = "one verdict per incarnation"
SUCCESS = "success only for a round that all its members ran"
PROGRESS = "a job that can form forms"
ENDS = "every live node learns the end"
REFUSALS = "refused only for a reason"
SIZE = "bounded memory"

#: What the core is known to break: not judged until it is mended.
KNOWN_BROKEN: frozenset[str] = frozenset(())


class BrokenPropertyError(AssertionError):
    """A property does not hold in a run.

    Args:
        name: Its name.
        detail: What was seen.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


def require(holds: object, name: str, detail: str) -> None:
    """Raise `BrokenPropertyError` unless something holds, or is known not to."""
    if not holds and name not in KNOWN_BROKEN:
        raise BrokenPropertyError(name, detail)
