"""Starting jobs of `tests.support.output_job`, and looking at them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The arguments of `WorkerOutput.open`, prefixes as text.
Streams: TypeAlias = "dict[str, Any]"

ROOT = Path(__file__).parents[2]
#: Both streams of a worker on the console.
CONSOLE: Streams = {"stdout": "", "stderr": ""}
#: Workers have this in front of their code: it writes all of `data` to a descriptor.
WRITE = """
def write(fd, data):
    data = memoryview(data)
    while data:
        data = data[os.write(fd, data):]
"""


def tee(path: Path | str = "", rank: int = 0, **others: object) -> Streams:
    """Return the arguments of `open` that tee stdout to a file, with the prefix ``[RANK]:``."""
    return {"stdout": str(path), "stderr": "", "tee_stdout": True, "prefix": f"[{rank}]:", **others}


def command(*workers: tuple[Streams, str], notes: Path, **spec: object) -> list[str]:
    """Return the command line of a job."""
    spec["workers"] = [{"streams": streams, "code": WRITE + code} for streams, code in workers]
    spec["notes"] = str(notes)
    return [sys.executable, "-m", "tests.support.output_job", json.dumps(spec)]


class Jobs:
    """Starts jobs, and kills what still runs of them at the end.

    Args:
        notes: Directory where they leave their notes.
    """

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        notes.mkdir()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._started:
            job.kill()
            for path in self.notes.glob("pid[0-9]*"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(path.read_bytes()), signal.SIGKILL)
            job.communicate()

    def start(
        self,
        *workers: tuple[Streams, str],
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
        program: Sequence[str] = (),
        **spec: object,
    ) -> subprocess.Popen[bytes]:
        """Start a job."""
        line = [*program, *command(*workers, notes=self.notes, **spec)]
        job = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=ROOT)
        self._started.append(job)
        return job

    def run(self, *workers: tuple[Streams, str], **options: Any) -> tuple[bytes, bytes]:
        """Run a job to its successful end; return both outputs."""
        return finish(self.start(*workers, **options))

    def has_note(self, name: str) -> bool:
        """Whether a note is there."""
        return (self.notes / name).exists()

    def note(self, name: str) -> bytes:
        """Return a note."""
        return (self.notes / name).read_bytes()

    def is_blocked_writing(self, rank: int = 0) -> bool:
        """Whether a worker runs, and sleeps in a write to something full."""
        if not self.has_note("pid"):
            return False
        return is_write(Path(f"/proc/{int(self.note(f'pid{rank}'))}/syscall").read_text(encoding="ascii"))


def is_write(call: str) -> bool:
    """Whether the text of /proc/PID/syscall says that the process sleeps in write, on x86-64 or a newer machine."""
    return call.partition(" ")[0] in {"1", "64"}


def finish(job: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Read to the end; return both outputs of a job that succeeded."""
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    return out, err


def peak_memory(status: Path) -> int:
    """Return the largest resident memory that a process had, in bytes, from its status file."""
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text(encoding="ascii"))
    assert found
    return int(found[1]) << 10
