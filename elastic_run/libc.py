"""Calls functions of the C library that Python has no name for, without ctypes, whose import takes 5 to 9 ms."""

from __future__ import annotations


def call(name: str, *arguments: int | bytes) -> int:
    """Call a function that takes C ints and pointers to bytes, and returns a C int.

    Args:
        name: The function's name.
        arguments: An int is passed as a C int, and bytes as a pointer to them, which the function must only read.

    Returns:
        What the function returns.

    Raises:
        ImportError: This Python was built without ctypes.
        AttributeError: The C library has no such function.
        OSError: Ditto.
    """
    import _ctypes

    function = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # type: ignore[arg-type]  # None as in CDLL(None)
    return int(_ctypes.call_function(function, arguments))
