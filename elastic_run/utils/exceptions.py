"""How an exception is told in one line."""

from __future__ import annotations


def describe_exception(error: BaseException) -> str:
    """Return the class and the message of an exception in one line; the class alone if it gives no message."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    except Exception:  # noqa: BLE001 - of its own __str__
        return type(error).__name__
