"""Rules on what helps against a failure, as data: the signs of the failure, and the hint.

The rules of elastic-run stand in `failure_hints.toml`; --failure-rules adds a file of the same form, which is checked
as a whole before anything starts.
"""

from __future__ import annotations

import os
import re

from elastic_run.core.failure.job_result import Rule
from elastic_run.core.job.restart_policy import RULE_DECISIONS
from elastic_run.files import read_toml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_KEYS, _OPTIONAL = ("match", "help"), ("decision",)
_BUILT_IN = os.path.join(os.path.dirname(__file__), "failure_hints.toml")


def built_in_rules() -> tuple[Rule, ...]:
    """Return the rules of elastic-run; none if an installation has removed them since the start of the job."""
    try:
        return read_rules(_BUILT_IN, keys=(*_OPTIONAL, "cause"))
    except ValueError:
        return ()


def read_rules(path: str, *, keys: Sequence[str] = _OPTIONAL) -> tuple[Rule, ...]:
    """Read a file of rules.

    Raises:
        ValueError: The file can't be read, or a rule is wrong; the message names the file and the rule.
    """
    document = read_toml(path)
    if unknown := sorted(set(document) - {"rule"}):
        message = f"{path}: {unknown[0]!r} is not a key outside of rules; each rule begins with [[rule]]"
        raise ValueError(message)
    entries = document.get("rule")
    if not isinstance(entries, list) or not entries:
        message = f"{path}: there is no [[rule]], a table with match and help"
        raise ValueError(message)
    return tuple(_rule(entry, f"{path}, rule {number}", keys) for number, entry in enumerate(entries, 1))


def _rule(entry: Any, place: str, keys: Sequence[str]) -> Rule:
    entry = entry if isinstance(entry, dict) else {}
    if unknown := sorted(set(entry) - {*_KEYS, *keys}):
        message = f"{place}: {unknown[0]!r} is not a key of a rule, which has {', '.join((*_KEYS, *keys))}"
        raise ValueError(message)
    for key in sorted({*_KEYS, *entry}):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            message = f"{place}: the rule's {key} is missing, empty or not a text"
            raise ValueError(message)
    try:
        re.compile(entry["match"])
    except (re.error, OverflowError, RecursionError) as error:
        message = f"{place}: match is not a regular expression: {error}"
        raise ValueError(message) from None
    decision = entry.get("decision", "")
    if decision and decision not in RULE_DECISIONS:
        message = f"{place}: the rule's decision is {decision!r}, which is none of {', '.join(RULE_DECISIONS)}"
        raise ValueError(message)
    return Rule(entry["match"], entry["help"], decision, entry.get("cause", ""))
