"""Shared memory (/dev/shm): DataLoader workers pass batches through it, NCCL its buffers; both die if it is full."""

from __future__ import annotations

import psutil

from elastic_run.diagnosis.doctor.finding import problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.diagnosis.doctor.finding import Finding, Subject

_MIB = 1 << 20
#: Bytes: docker's default is 64 MiB, less than a few batches of images.
_LEAST_SIZE, _LEAST_FREE = 128 * _MIB, 64 * _MIB


def check(subject: Subject) -> list[Finding]:
    """Read the size of /dev/shm."""
    path = subject.path("dev/shm")
    try:
        place = psutil.disk_usage(path)
    except OSError as error:
        return [problem(f"{path} is missing", str(error), "mount -t tmpfs shm /dev/shm")]
    return judge(path, place.total, place.free)


def judge(path: str, size: int, free: int) -> list[Finding]:
    """Return the findings about shared memory of this size with so many bytes free."""
    evidence = f"{size // _MIB} MiB, {free // _MIB} MiB of it free"
    dies = "DataLoader workers die there of 'Bus error', and NCCL of 'No space left'"
    if size < _LEAST_SIZE:
        remedy = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
        return [problem(f"{path} is small: {dies}", evidence, remedy)]
    if free < _LEAST_FREE:
        return [problem(f"{path} is full: {dies}", evidence, f"remove what dead jobs left there: ls -la {path}")]
    return []
