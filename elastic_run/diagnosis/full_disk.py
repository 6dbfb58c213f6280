"""Makes all disks look full to this process: the kernel answers ENOSPC where a file would need new space. In a worker.

Rules
- A filter of system calls (seccomp) gives the answer, for all threads and all children from then on. It needs no right,
  takes no space from others, and nothing lifts it.
- Calls that create or open a file with O_CREAT, make a directory, or reserve space fail; so do `pwrite` and copies from
  file to file. `write` goes on: the filter can't tell a file from a pipe or an event descriptor.
- A small RLIMIT_FSIZE was rejected: it gives EFBIG and SIGXFSZ, which no full disk does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from elastic_run.records import dataclass

# Numbers of linux/seccomp.h, linux/prctl.h, linux/bpf_common.h.
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.ENOSPC
_LOAD, _EQUALS, _HAS_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
#: Offsets in struct seccomp_data: the call's number, the architecture, and its second and third argument.
_NUMBER, _ARCHITECTURE, _SECOND, _THIRD = 0, 4, 24, 32
#: O_CREAT, and O_TMPFILE without O_DIRECTORY.
_CREATES = 0o100 | 0o20000000


@dataclass(frozen=True, slots=True)
class _Machine:
    """Numbers of system calls of one architecture; `open` is None where there is only `openat`."""

    architecture: int
    seccomp: int
    openat: int
    open: int | None
    failing: tuple[int, ...]


_MACHINES = {
    # creat, mkdir, mkdirat, truncate, ftruncate, fallocate, pwrite64, pwritev, pwritev2, copy_file_range
    "x86_64": _Machine(0xC000003E, 317, 257, 2, (85, 83, 258, 76, 77, 285, 18, 296, 328, 326)),
    # mkdirat, truncate, ftruncate, fallocate, pwrite64, pwritev, pwritev2, copy_file_range
    "aarch64": _Machine(0xC00000B7, 277, 56, None, (34, 45, 46, 47, 68, 70, 287, 285)),
}


def fill_disks() -> None:
    """Let each call that needs space on a disk fail with ENOSPC from now on.

    Raises:
        OSError: The kernel refuses the filter, or the machine is of another architecture.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    code = b"".join(_write_filter(machine))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    has_failed = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        ctypes.c_long(machine.seccomp), _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.c_char_p(program)
    )
    if has_failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write_filter(machine: _Machine) -> list[bytes]:
    """Return the instructions of struct sock_filter: each test jumps over so many of them if it holds, or if not."""
    opens = [(machine.openat, _THIRD), *([] if machine.open is None else [(machine.open, _SECOND)])]
    # From the end to the start, since jumps go forward: `code[0]` is always the next instruction.
    code = [_instruction(_RETURN, _ALLOW), _instruction(_RETURN, _FAIL)]
    for number, argument in opens:
        check = [_instruction(_LOAD, argument), _instruction(_HAS_BITS, _CREATES, len(code) - 1, len(code) - 2)]
        code = [_instruction(_EQUALS, number, 0, 2), *check, *code]
    for number in machine.failing:
        code = [_instruction(_EQUALS, number, len(code) - 1, 0), *code]
    code = [_instruction(_LOAD, _NUMBER), *code]
    return [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUALS, machine.architecture, 0, len(code) - 2),
        *code,
    ]


def _instruction(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
