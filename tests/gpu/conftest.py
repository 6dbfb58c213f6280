"""What the tests on a GPU get: a launcher, and a record of each job in the directory that $GPU_RECORDS names."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.observation import list_gpus
from tests.support import launch as launching

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.launch import Launch, Launched, Worker

PROGRAMS = Path(__file__).parent / "programs"
#: Where each test writes what its jobs have said; nothing is written without it.
RECORDS = "GPU_RECORDS"


class Record:
    """The observations of one test, as text. They are written to a file even if the test fails."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parts: list[str] = []
        self._started_at = time.monotonic()

    def add(self, title: str, text: object) -> None:
        """Add a text."""
        self._parts.append(f"=== {title} (at {time.monotonic() - self._started_at:.2f} s)\n{text}\n")

    def write(self) -> None:
        """Write all texts into a file."""
        directory = os.environ.get(RECORDS)
        if directory:
            Path(directory, f"{self._name}.txt").write_text("".join(self._parts), encoding="utf-8")


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    """Refuse a machine without a GPU."""
    if not list_gpus():
        pytest.fail("these tests need an NVIDIA GPU, its driver and nvidia-ml-py", pytrace=False)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """Keep what a test sees."""
    made = Record(request.node.name.replace("/", "-").replace(" ", "-"))
    yield made
    made.write()


@pytest.fixture
def launch(record: Record) -> Iterator[Launch]:
    """Start launchers as `tests.support.launch.launch` does, and record what they say."""
    started: list[tuple[str, Launched]] = []

    def start(*arguments: str | Path, **options: object) -> Launched:
        job = launching.launch(*arguments, **options)  # type: ignore[arg-type] # passed through as they are
        started.append((" ".join(map(str, arguments)), job))
        return job

    yield start
    for command, job in started:
        job.close()
        record.add(f"{command}: {job.process.returncode}", f"{job.stdout}--- stderr\n{job.stderr}")


@pytest.fixture
def program() -> Worker:
    """Return the path of a program."""
    return lambda name: PROGRAMS / f"{name}.py"
