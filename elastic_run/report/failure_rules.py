"""Rules on failures, as data: the signs of a failure, and the hint for it.

The rules of elastic-run stand in `failure_rules.toml`; --failure-rules adds a file of the same form. A file of the user
is checked as a whole before anything starts.
"""

from __future__ import annotations

import os
import re

from elastic_run.core.failure.diagnose import Rule
from elastic_run.core.job.restart_policy import RULE_DECISIONS
from elastic_run.user_file import read_toml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_KEYS, _OPTIONAL = ("match", "help"), ("decision",)
_HEADER = re.compile(r"^\s*\[\[\s*rule\s*\]\]")
_BUILT_IN = os.path.join(os.path.dirname(__file__), "failure_rules.toml")


def built_in_rules() -> tuple[Rule, ...]:
    """Return the rules of elastic-run; none if this Python can't read TOML (3.10 without tomli)."""
    try:
        return read_rules(_BUILT_IN, keys=(*_OPTIONAL, "cause"))
    except ValueError:
        return ()


def read_rules(path: str, *, keys: Sequence[str] = _OPTIONAL) -> tuple[Rule, ...]:
    """Read a file of rules.

    Args:
        path: The file.
        keys: The keys that a rule may have beside those that it needs.

    Returns:
        The rules in their order.

    Raises:
        ValueError: The file can't be read, or a rule is wrong; the message names the file and the line.
    """
    document, text = read_toml(path)
    _check_keys(document, path, text)
    entries: list[Any] = document["rule"]
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    lines += [0] * (len(entries) - len(lines))
    places = [f"{path}:{line}" if line else path for line in lines]
    return tuple(_rule(entry, place, keys) for entry, place in zip(entries, places, strict=False))


def _check_keys(document: dict[str, Any], path: str, text: str) -> None:
    """Refuse a file without rules, or with other keys."""
    if unknown := sorted(set(document) - {"rule"}):
        key = re.compile(rf"^[\s\[\"']*{re.escape(unknown[0])}\b")
        line = next((f":{number}" for number, line in enumerate(text.splitlines(), 1) if key.match(line)), "")
        message = f"{path}{line}: {unknown[0]!r} is not a key outside of rules; each rule begins with [[rule]]"
        raise ValueError(message)
    if not isinstance(document.get("rule"), list) or not document["rule"]:
        message = f"{path}: there is no [[rule]], a table with match and help"
        raise ValueError(message)


def _rule(entry: Any, place: str, keys: Sequence[str]) -> Rule:
    if not isinstance(entry, dict):
        message = f"{place}: a rule is a table: [[rule]]"
        raise ValueError(message)  # noqa: TRY004 - as the other errors of a file
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
