"""Numbers as torch's server reads them from a value."""

from __future__ import annotations

_INT64_MAX = (1 << 63) - 1
_INT64_MIN = -(1 << 63)
_INT64_DIGITS = 19
_C_SPACE = b" \t\n\v\f\r"


def parse_integer(text: bytes | bytearray) -> int:
    """Read a number as C's `strtoll` does, to which torch leaves it: leading space, a sign, and any rest is ignored.

    Args:
        text: What a client has set.

    Returns:
        The number.

    Raises:
        ValueError: There is no digit, or the number doesn't fit 64 bits.
    """
    if text.isdigit() and len(text) < _INT64_DIGITS:
        return int(text)
    signed = bytes(text).lstrip(_C_SPACE)
    unsigned = signed[1:] if signed[:1] in (b"-", b"+") else signed
    digits = unsigned[: len(unsigned) - len(unsigned.lstrip(b"0123456789"))]
    if not digits:
        message = f"{bytes(text[:40])!r} is not a number"
        raise ValueError(message)
    significant = digits.lstrip(b"0") or b"0"
    # Python refuses, or takes quadratic time for, a number of a million digits: look at the length first.
    number = int(significant) if len(significant) <= _INT64_DIGITS else _INT64_MAX + 2
    number = -number if signed[:1] == b"-" else number
    if not _INT64_MIN <= number <= _INT64_MAX:
        message = f"{bytes(text[:40])!r} does not fit 64 bits"
        raise ValueError(message)
    return number
