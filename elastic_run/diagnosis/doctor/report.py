"""The doctor's report: for one screen, or as JSON."""

from __future__ import annotations

import textwrap

from elastic_run.diagnosis.doctor.finding import PROBLEM, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

__all__ = ["describe_findings", "read_findings", "render_report"]

_FIELDS = ("severity", "what", "evidence", "remedy")
_WIDTH = 100
#: Findings that are shown in full: each takes two lines or more, and the report is for one screen.
_SHOWN = 9


def render_report(hosts: Sequence[str], findings: Sequence[Finding], facts: Mapping[str, str]) -> str:
    """Return the report as text.

    Args:
        hosts: Names of the examined hosts.
        findings: The findings, problems first.
        facts: Measured or read values by name.
    """
    lines = [f"elastic-run doctor on {_shorten(', '.join(hosts))}"]
    lines += _fill("  ", "; ".join(f"{name} {value}" for name, value in facts.items()))
    for finding in findings[:_SHOWN]:
        evidence = f" ({finding.evidence})" if finding.evidence else ""
        lines += _fill(f"{finding.severity}: ", f"{finding.what}{evidence}")
        lines += _fill("    fix: ", finding.remedy)
    if len(findings) > _SHOWN:
        lines.append(f"and {len(findings) - _SHOWN} more (--json has all)")
    problems = sum(finding.severity == PROBLEM for finding in findings)
    warnings = len(findings) - problems
    lines.append(f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}")
    return "\n".join(lines) + "\n"


def describe_findings(hosts: Sequence[str], findings: Sequence[Finding], facts: Mapping[str, str]) -> dict[str, object]:
    """Return the report as a document for json."""
    return {
        "version": 1,
        "hosts": list(hosts),
        "facts": dict(facts),
        "findings": [{name: getattr(finding, name) for name in _FIELDS} for finding in findings],
    }


def read_findings(document: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of such a document."""
    return [Finding(*(row[name] for name in _FIELDS)) for row in document["findings"]]


def _fill(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=label,
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH // 2]} ..."


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"
