"""The filter that makes all disks look full: which system calls it lets fail, on both architectures."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from elastic_run.diagnosis.full_disk import _MACHINES, _write_filter

_FAILS, _GOES_ON = 0x00050000 | errno.ENOSPC, 0x7FFF0000
#: Numbers of linux/audit.h, asm/unistd_64.h and asm-generic/unistd.h.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_OPENAT = {"x86_64": 257, "aarch64": 56}
_FAILING = {
    "x86_64": {
        "creat": 85,
        "mkdir": 83,
        "mkdirat": 258,
        "truncate": 76,
        "ftruncate": 77,
        "fallocate": 285,
        "pwrite64": 18,
        "pwritev": 296,
        "pwritev2": 328,
        "copy_file_range": 326,
    },
    "aarch64": {
        "mkdirat": 34,
        "truncate": 45,
        "ftruncate": 46,
        "fallocate": 47,
        "pwrite64": 68,
        "pwritev": 70,
        "pwritev2": 287,
        "copy_file_range": 285,
    },
}
_PASSING = {
    "x86_64": {"read": 0, "write": 1, "unlink": 87, "exit_group": 231},
    "aarch64": {"read": 63, "write": 64, "unlinkat": 35, "exit_group": 94},
}


def answer(name: str, number: int, *arguments: int, architecture: int = 0) -> int:
    """Return the kernel's answer to a system call: the instructions of struct sock_filter, one after another."""
    call = struct.pack(
        "=IIQ6Q", number, architecture or _ARCHITECTURES[name], 0, *arguments, *[0] * (6 - len(arguments))
    )
    program = _write_filter(_MACHINES[name])
    code: list[tuple[int, int, int, int]] = [struct.unpack("=HBBI", each) for each in program]
    at = loaded = 0
    while True:
        operation, if_true, if_false, value = code[at]
        if operation == 0x06:  # return
            return value
        if operation == 0x20:  # load a word of struct seccomp_data
            (loaded,) = struct.unpack_from("=I", call, value)
            at += 1
        else:
            holds = {0x15: loaded == value, 0x45: bool(loaded & value)}[operation]
            at += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_calls_that_need_space_fail(name: str) -> None:
    """Whatever makes or extends a file or a directory gets ENOSPC; reads, `write` and removals go on."""
    assert _MACHINES[name].seccomp == _SECCOMP[name]
    assert {call: answer(name, number) for call, number in _FAILING[name].items()} == dict.fromkeys(
        _FAILING[name], _FAILS
    )
    assert {call: answer(name, number) for call, number in _PASSING[name].items()} == dict.fromkeys(
        _PASSING[name], _GOES_ON
    )


@pytest.mark.parametrize("name", _ARCHITECTURES)
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (os.O_RDONLY, _GOES_ON),
        (os.O_WRONLY | os.O_TRUNC | os.O_DIRECTORY, _GOES_ON),
        (os.O_WRONLY | os.O_CREAT, _FAILS),
        (os.O_WRONLY | os.O_TMPFILE, _FAILS),
    ],
)
def test_only_an_open_that_may_make_a_file_fails(name: str, flags: int, expected: int) -> None:
    """The flags are the second argument of `open`, and the third of `openat`."""
    assert answer(name, _OPENAT[name], 3, 0, flags) == expected
    assert answer(name, _OPENAT[name], flags, flags, 0) == _GOES_ON
    if name == "x86_64":
        assert answer(name, 2, 0, flags) == expected
        assert answer(name, 2, flags, 0, flags) == _GOES_ON


def test_calls_of_another_architecture_go_on() -> None:
    """Their numbers mean other calls: 77 of a 32-bit program on x86_64 is `getrusage`."""
    numbers = [*_FAILING["x86_64"].values(), 2, 257]
    answers = {answer("x86_64", number, 0, os.O_CREAT, os.O_CREAT, architecture=0x40000003) for number in numbers}
    assert answers == {_GOES_ON}
