"""The newest lines of the kernel's log, where this process may read it.

Sources: the kernel's Documentation/ABI/testing/dev-kmsg, and include/linux/proc_ns.h for the number of the first
namespace of pids.
"""

from __future__ import annotations

import os
import time

_LOG = "/dev/kmsg"
#: Bytes of the longest record, and records that are read at most: some 0.1 s.
_RECORD = 8192
_MOST_RECORDS = 100_000
_FIRST_NAMESPACE = "pid:[4026531836]"
#: Seconds that the log's clock and ours may differ by.
_SLACK = 5.0


def read_kernel_log(seconds: float, path: str = _LOG) -> tuple[str, ...]:
    """Return the messages of the last seconds, the oldest first; none where the log may not be read.

    Args:
        seconds: How far back.
        path: The log.
    """
    # Most kernels stamp records with the clock that is not adjusted, some with the adjusted one.
    now = min(time.clock_gettime(time.CLOCK_MONOTONIC_RAW), time.monotonic())
    since = max(0.0, now - seconds - _SLACK) * 1e6
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        text = b"".join(_read_records(descriptor))
    finally:
        os.close(descriptor)
    return tuple(message for at, message in map(_parse, text.splitlines()) if at >= since)


def has_first_pids() -> bool:
    """Whether this process's pids are those that the kernel writes: not so in most containers."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def _read_records(descriptor: int) -> list[bytes]:
    records: list[bytes] = []
    while len(records) < _MOST_RECORDS:
        try:
            record = os.read(descriptor, _RECORD)
        except BrokenPipeError:
            continue  # records were overwritten meanwhile; the next one is the oldest that is left
        except OSError:
            break
        if not record:
            break
        records.append(record)
    return records


def _parse(line: bytes) -> tuple[float, str]:
    """Return the microseconds since boot and the message of `6,242,340620,-;message`; of a dictionary's line -1."""
    head, _, message = line.partition(b";")
    fields = head.split(b",")
    if len(fields) < 4 or not fields[2].isdigit():  # noqa: PLR2004 - priority, number, time, flags
        return -1.0, ""
    return float(fields[2]), message.decode(errors="replace")
