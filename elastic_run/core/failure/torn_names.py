"""The name of an exception in a line that other output tears.

Pure. Up to Python 3.12 an interpreter whose stderr is unbuffered (`python -u`) writes the name, `: `, the message and
the line's end one by one, and what other threads write comes between them: `ValueErrorstep 151`, `step 3ValueError: x`.
Only a name that touches other text counts: `ValueError` between spaces is a word of some sentence. What is found
is a guess, good only where no whole line names the exception.
"""

from __future__ import annotations

import re

#: Stands for a message that can't be told from other output.
TORN_MESSAGE = "(other output tears its message)"

_ENDS = r"(?:Error|Exception|Exit|Failure|Interrupt|StopIteration|Timeout|TimeoutExpired|Warning)"
_HAS_NAME = re.compile(_ENDS)
_WORD = re.compile(r"[A-Za-z_](?:[\w.]|<locals>)*")
_LONGEST_NAME = re.compile(rf".*{_ENDS}")
_NAME_LIMIT = 200
#: A statement that says which exception its line raises; one letter may be a variable.
_RAISE = re.compile(r"^\s+raise (?:\w+\.)*(?P<type>[A-Z]\w{2,})(?:\(| from |$)")
#: Ends and beginnings of other output, besides letters and digits, that a name may touch.
_BEFORE = "]%.)|!}"
_AFTER = "[{|#*+"


def find_torn_name(row: str, code: str) -> tuple[str, str] | None:
    """Find the name of an exception in a line that isn't whole.

    Args:
        row: The line.
        code: The line of code before it, which may raise the exception.

    Returns:
        The name, and the message or `TORN_MESSAGE`; or None.
    """
    raised = _RAISE.match(code)
    if raised is not None and raised["type"] in row:
        start = row.index(raised["type"])
        found = _read_name(row, start, start + len(raised["type"]))
        if found is not None:
            return found
    if not _HAS_NAME.search(row):
        return None
    for word in _WORD.finditer(row):
        name = _LONGEST_NAME.match(word[0][:_NAME_LIMIT])
        found = _read_name(row, word.start(), word.start() + name.end()) if name is not None else None
        if found is not None:
            return found
    return None


def _read_name(row: str, start: int, end: int) -> tuple[str, str] | None:
    """Return the name at a place in a line and its message, or None where it stands there as a word among others."""
    before, after = row[:start][-1:], row[end:]
    if before and not (before.isalnum() or before in _BEFORE):
        return None
    if not after or after.startswith(": "):
        return row[start:end], after[2:] or TORN_MESSAGE
    is_torn = after[0].isalnum() or after[0] in _AFTER
    return (row[start:end], TORN_MESSAGE) if is_torn else None
