"""The failure in a node's report, which may be incomplete, garbage or too long."""

from __future__ import annotations

from typing import Any

from elastic_run.core.failure.root_cause import BARE_END
from elastic_run.core.job.codec import encode
from elastic_run.core.job.documents import RoundEnd
from elastic_run.core.job.round_policy import REMEMBERED_BYTES, read_report, remember
from elastic_run.core.job.state import REMEMBERED


def _read(**report: Any) -> Any:
    return read_report("n", RoundEnd("failed", report), 3)


def test_values_that_are_garbage_have_their_defaults() -> None:
    """Another node's report can't break the coordinator."""
    root = _read(exit_code="x", severity=True, signature=None, uptime="long", decision=7, rule=8, is_deterministic=1)
    assert (root.failure.exit_code, root.severity, root.order) == (1, BARE_END, 3)
    assert (root.failure.uptime, root.failure.signature, root.failure.is_deterministic) == (0.0, None, False)
    assert (root.failure.decision, root.failure.rule) == ("", "")


def test_a_report_that_is_too_long_goes_without_its_long_values() -> None:
    """Each node gets it; a report of very many values goes altogether."""
    assert _read(summary="short", stack="x" * 70_000).report == {"summary": "short"}
    assert _read(**{f"value {number}": "x" * 900 for number in range(100)}).report == {}


def test_the_causes_of_attempts_are_bounded() -> None:
    """The newest are kept, by number and by size."""
    kept: tuple[dict[str, Any], ...] = ()
    for number in range(2 * REMEMBERED):
        kept = remember(kept, {"number": number})
    assert [one["number"] for one in kept] == [*range(REMEMBERED, 2 * REMEMBERED)]
    kept = remember(kept, {"summary": "x" * (REMEMBERED_BYTES - 100)})
    assert sum(len(encode(one)) for one in kept) <= REMEMBERED_BYTES
    assert "summary" in kept[-1]
    assert remember(kept, None) == kept
