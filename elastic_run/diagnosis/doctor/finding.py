"""What a check finds, and what it is told."""

from __future__ import annotations

import os

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PROBLEM", "WARNING", "Finding", "Subject", "problem", "warning"]

#: A job fails of a problem, or will; a warning may be meant so.
PROBLEM, WARNING = "problem", "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something on this machine, or between the nodes, of which a job fails.

    Attributes:
        severity: PROBLEM or WARNING.
        what: What is wrong, in one sentence.
        evidence: What was read or tried, for a reader who doubts it; may be empty.
        remedy: What to do, as a command where there is one.
    """

    severity: str
    what: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined.

    Attributes:
        environ: The environment in which the job would be started.
        hostname: This machine's name.
        endpoints: Hosts and ports where the nodes are to meet; a host may have none of its own, -1.
        most_nodes: Most nodes of the job.
        directories: Directories that the job writes to.
        known_variables: Names of variables with the prefix PET_ that elastic-run reads.
        root: Root of the file system.
        timeout: Seconds for each name, connection or program.
    """

    environ: Mapping[str, str]
    hostname: str
    endpoints: tuple[tuple[str, int], ...] = ()
    most_nodes: int = 1
    directories: tuple[str, ...] = ()
    known_variables: frozenset[str] = field(default_factory=frozenset)
    root: str = "/"
    timeout: float = 3.0

    def path(self, name: str) -> str:
        """Return a path below the root."""
        return os.path.join(self.root, name)


def problem(what: str, evidence: str, remedy: str) -> Finding:
    """Return a finding of which jobs fail."""
    return Finding(PROBLEM, what, evidence, remedy)


def warning(what: str, evidence: str, remedy: str) -> Finding:
    """Return a finding that may be meant so."""
    return Finding(WARNING, what, evidence, remedy)
