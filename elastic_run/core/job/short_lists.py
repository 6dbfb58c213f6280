"""Short lists of host names and ranks in lines for the user, in Slurm's notation: `node[01-03,7], login`. Pure.

A line of a job of 64 nodes has no room for 64 names, and the first eight names don't show which node is missing. Up to
eight names are listed one by one, in the given order. More names are folded: names that differ only in their last
number become one name with ranges, so `node1` to `node3` become `node[1-3]`. Numbers behind the first dot don't count.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Names that are listed one by one, and folded names.
_NAMED = 8
#: Ranges of numbers in all folded names, and in a list of ranks.
_MOST_RANGES = 24
_MOST_RUNS = 6
_REST = "…"
_NUMBERED = re.compile(r"([^.]*?)([0-9]{1,9})([^0-9.]*(?:\..*)?)", re.DOTALL)


def list_ranks(ordered: Sequence[int]) -> str:
    """Return ascending ranks with consecutive ranks as ranges, such as `0-2, 4` or `0, 2, 4, ... (50 in all)`."""
    parts = _find_ranges(map(str, ordered))
    if len(parts) > _MOST_RUNS:
        parts[_MOST_RUNS - 1 :] = [f"... ({len(ordered)} in all)"]
    return ", ".join(parts)


def list_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return up to eight names as they are, and more names folded."""
    return tuple(hosts) if len(hosts) <= _NAMED else fold_hosts(hosts)


def fold_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, with ranges of numbers; the last text is `…` if there are more than a line shows."""
    groups: dict[tuple[str, str | None], set[str]] = {}
    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        prefix, number, suffix = (host, "", None) if match is None else match.groups()
        groups.setdefault((prefix, suffix), set()).add(number)
    shown: list[str] = []
    left = _MOST_RANGES
    for (prefix, suffix), numbers in groups.items():
        ranges = _find_ranges(numbers)
        if len(shown) == _NAMED or left < len(ranges):
            return (*shown, *([_name(prefix, ranges[:left], suffix)] if len(shown) < _NAMED and left else ()), _REST)
        left -= len(ranges)
        shown.append(_name(prefix, ranges, suffix))
    return tuple(shown)


def fold_clauses(reasons: Sequence[tuple[str, str]], most: int) -> tuple[str, ...]:
    """Return a clause for each pair of host and reason, such as `node7 (its agent died)`.

    If there are more than `most`, the hosts of each reason are folded into one clause.
    """
    if len(reasons) <= most:
        return tuple(f"{host} ({reason})" for host, reason in reasons)
    hosts: dict[str, list[str]] = {}
    for host, reason in reasons:
        hosts.setdefault(reason, []).append(host)
    clauses = [f"{', '.join(fold_hosts(names))} ({reason})" for reason, names in hosts.items()]
    return tuple(clauses if len(clauses) <= most else [*clauses[: most - 1], _REST])


def _find_ranges(numbers: Iterable[str]) -> list[str]:
    """Return numbers as ranges; those of a range have as many digits as its first number, or no leading zero."""
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (len(text), text)):
        if runs and number and number == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])):
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [first if first == last else f"{first}-{last}" for first, last in runs]


def _name(prefix: str, ranges: Sequence[str], suffix: str | None) -> str:
    text = ",".join(ranges)
    is_one = len(ranges) == 1 and "-" not in text
    return f"{prefix}{text if is_one else f'[{text}]'}{suffix or ''}"
