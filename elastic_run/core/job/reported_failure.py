"""The failure in a node's report, which may be incomplete or garbage."""

from __future__ import annotations

from elastic_run.contract import EXIT_CODES, EXIT_RENDEZVOUS
from elastic_run.core.failure.root_cause import BARE_END, LOST_RANK
from elastic_run.core.job.restart_policy import RULE_DECISIONS, Failure
from elastic_run.core.job.state import Root
from elastic_run.core.protocol.codec import encode
from elastic_run.core.protocol.outcomes import CANNOT_START, UNREACHABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeGuard

    from elastic_run.core.job.documents import RoundEnd
    from elastic_run.core.protocol.codec import Document

#: Bytes of a report that are kept, and of one of its values where it is longer.
_REPORT_BYTES = 64 * 1024
_VALUE_BYTES = 1024
_SIGNATURE_LENGTH = 1024
_RULE_LENGTH = 80
_EXIT_CODES = {name: code for code, name, _ in EXIT_CODES if isinstance(code, int)}


def verdict_exit_code(verdict: str) -> int:
    """Return the exit code of a verdict that has one of its own, else 1."""
    return _EXIT_CODES.get(verdict, 1)


def read_report(node: str, end: RoundEnd, order: int) -> Root:
    """Return the failure that a node reports.

    Args:
        node: The node.
        end: How the round has ended on it.
        order: The failure's place in the order in which the failures of the round were heard.

    Returns:
        The failure; values that are missing or garbage have their defaults.
    """
    report = end.report or {}
    decision, rule = report.get("decision"), report.get("rule")
    code, uptime, severity = report.get("exit_code"), report.get("uptime"), report.get("severity")
    signature = report.get("signature")
    own = {UNREACHABLE: "rendezvous", CANNOT_START: end.verdict or "cannot_start"}.get(end.outcome, "")
    fallback = EXIT_RENDEZVOUS if end.outcome == UNREACHABLE else verdict_exit_code(own)
    return Root(
        node=node,
        # Who could not reach the master's node may see no more than that it died.
        severity=LOST_RANK if end.outcome == UNREACHABLE else severity if _is_integer(severity) else BARE_END,
        order=order,
        failure=Failure(
            exit_code=code if _is_integer(code) and code != 0 else fallback,
            signature=None if signature is None else encode({"": signature}).decode("ascii")[:_SIGNATURE_LENGTH],
            is_deterministic=report.get("is_deterministic") is True,
            uptime=float(uptime) if isinstance(uptime, int | float) else 0.0,
            decision=decision if isinstance(decision, str) and decision in RULE_DECISIONS else "",
            rule=rule[:_RULE_LENGTH] if isinstance(rule, str) else "",
        ),
        verdict=own,
        detail=end.detail,
        report=_cut(end.report),
    )


def _cut(report: Document | None) -> Document | None:
    """Return a report without its long values where it is too long to be carried to every node."""
    if report is None or len(encode(report)) <= _REPORT_BYTES:
        return report
    short = {name: value for name, value in report.items() if len(encode({name: value})) <= _VALUE_BYTES}
    return short if len(encode(short)) <= _REPORT_BYTES else {}


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
