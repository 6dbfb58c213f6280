"""The values of --redirects and --tee as plain numbers, which the way to the first worker reads without `enum`."""

from __future__ import annotations


def parse_streams(text: str) -> int | dict[int, int]:
    """Read the value of --redirects or --tee.

    Args:
        text: ``0`` to ``3`` for all workers, or a map of local ranks to those: ``0:3,12:1``.

    Returns:
        One value of `Std` as a number, or one by local rank.

    Raises:
        ValueError: It is neither.
    """
    if _is_std(text):
        return int(text)
    found = {}
    for item in text.split(","):
        rank, _, value = item.partition(":")
        if not (rank.isascii() and rank.isdigit() and _is_std(value)):
            message = f"{text!r} is neither 0, 1, 2 or 3 nor a map of local ranks to these, such as 0:3,1:2"
            raise ValueError(message)
        found[int(rank)] = int(value)
    return found


def _is_std(text: str) -> bool:
    return text in ("0", "1", "2", "3")
