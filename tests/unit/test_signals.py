"""Signals by number: a signal set as the C library has it."""

from __future__ import annotations

import ctypes
import signal

import pytest

from elastic_run import signals


@pytest.mark.parametrize("numbers", [(), (1,), (15,), (signal.SIGRTMAX,), (1, 2, 31, 32, 33, 60, 64)], ids=repr)
def test_a_signal_set_is_the_c_librarys(numbers: tuple[int, ...]) -> None:
    """It has the bytes that sigaddset(3) gives it."""
    library = ctypes.CDLL(None)
    expected = ctypes.create_string_buffer(128)
    library.sigemptyset(expected)
    for number in numbers:
        if number not in (32, 33):  # the C library keeps them to itself
            assert library.sigaddset(expected, int(number)) == 0
    assert signals._signal_set([number for number in numbers if number not in (32, 33)]) == expected.raw
