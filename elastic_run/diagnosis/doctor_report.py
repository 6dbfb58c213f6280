"""The finding of a check, the subject of all checks, and the report of findings: for one screen, or as JSON."""

from __future__ import annotations

import os
import textwrap

from elastic_run.records import dataclass, field
from elastic_run.report.text import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

#: A job fails because of a problem. A warning may be what the user wants.
PROBLEM, WARNING = "problem", "warning"
_FIELDS = ("severity", "what", "evidence", "remedy")
_WIDTH = 100
#: Findings that are shown in full: each takes two lines or more, and the report is for one screen.
_SHOWN = 9


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason on this machine, or between the nodes, why a job fails."""

    severity: str  # PROBLEM or WARNING
    what: str  # The finding in one sentence
    evidence: str  # The values or the attempt that show it, or ""
    remedy: str  # A command if there is one


@dataclass(frozen=True, slots=True)
class Subject:
    """The machine and the job to check."""

    environ: Mapping[str, str]  # The environment in which the job would be started
    hostname: str
    endpoints: tuple[tuple[str, int], ...] = ()  # Where the nodes meet; port -1 if the user named none
    most_nodes: int = 1
    directories: tuple[str, ...] = ()  # Directories that the job writes to
    kept_bytes: int = 0  # Memory that --keep-state will take
    known_variables: frozenset[str] = field(default_factory=frozenset)  # Those with the prefix PET_ that we read
    root: str = "/"  # Root of the file system
    timeout: float = 3.0  # Seconds for each name, connection or program

    def path(self, name: str) -> str:
        """Return a path below the root."""
        return os.path.join(self.root, name)


def problem(what: str, evidence: str, remedy: str) -> Finding:
    """Return a finding of which jobs fail."""
    return Finding(PROBLEM, what, evidence, remedy)


def warning(what: str, evidence: str, remedy: str) -> Finding:
    """Return a finding that may be meant so."""
    return Finding(WARNING, what, evidence, remedy)


def render_report(hosts: Sequence[str], findings: Sequence[Finding], facts: Mapping[str, str]) -> str:
    """Return the report as text; findings are given with problems first."""
    named = ", ".join(hosts)
    lines = [f"elastic-run doctor on {named if len(named) <= _WIDTH else f'{named[: _WIDTH // 2]} ...'}"]
    lines += _fill("  ", "; ".join(f"{name} {value}" for name, value in facts.items()))
    for finding in findings[:_SHOWN]:
        evidence = f" ({finding.evidence})" if finding.evidence else ""
        lines += _fill(f"{finding.severity}: ", f"{finding.what}{evidence}")
        lines += _fill("    fix: ", finding.remedy)
    if len(findings) > _SHOWN:
        lines.append(f"and {len(findings) - _SHOWN} more (--json has all)")
    problems = sum(finding.severity == PROBLEM for finding in findings)
    numbers = (count(problems, "problem"), count(len(findings) - problems, "warning"))
    lines.append(", ".join(f"no{text[1:]}" if text.startswith("0 ") else text for text in numbers))
    return "\n".join(lines) + "\n"


def describe_findings(hosts: Sequence[str], findings: Sequence[Finding], facts: Mapping[str, str]) -> dict[str, object]:
    """Return the report as a document for JSON."""
    rows = [{name: getattr(finding, name) for name in _FIELDS} for finding in findings]
    return {"version": 1, "hosts": list(hosts), "facts": dict(facts), "findings": rows}


def read_findings(document: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of such a document."""
    return [Finding(*(row[name] for name in _FIELDS)) for row in document["findings"]]


def _fill(label: str, text: str) -> list[str]:
    indent = " " * 9
    return textwrap.wrap(
        text, _WIDTH, initial_indent=label, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
