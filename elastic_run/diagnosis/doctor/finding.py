"""The finding of a check, and the subject of all checks."""

from __future__ import annotations

import os

from elastic_run.records import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PROBLEM", "WARNING", "Finding", "Subject", "problem", "warning"]

#: A job fails because of a problem. A warning may be what the user wants.
PROBLEM, WARNING = "problem", "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason on this machine, or between the nodes, why a job fails.

    Attributes:
        severity: PROBLEM or WARNING.
        what: The finding in one sentence.
        evidence: The values or the attempt that show it, or "".
        remedy: The remedy, as a command if there is one.
    """

    severity: str
    what: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Subject:
    """The machine and the job to check.

    Attributes:
        environ: The environment in which the job would be started.
        hostname: This machine's name.
        endpoints: Hosts and ports at which the nodes meet; port -1 if the user named none.
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
