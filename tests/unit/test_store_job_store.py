"""The small pure parts of the job stores: where a job lies, compressed values, outages of the store in memory."""

from __future__ import annotations

import zlib

import pytest

from elastic_run.store.errors import SILENT, StoreConnectionError
from elastic_run.store.job_path import job_path
from elastic_run.store.jobstore import compression
from elastic_run.store.jobstore.compression import compress, decompress
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore


@pytest.mark.parametrize(
    ("run_id", "path"),
    [
        ("job-1_a.b", "elastic-run/job-1_a.b"),
        ("a/b", "elastic-run/a%2Fb"),
        ("a b%", "elastic-run/a%20b%25"),
        ("é", "elastic-run/%C3%A9"),
        ("..", "elastic-run/%2E%2E"),
        (".", "elastic-run/%2E"),
        ("a..", "elastic-run/a.."),
    ],
)
def test_a_job_has_a_directory_of_its_own(run_id: str, path: str) -> None:
    """Any run id gives one path segment, and different ones different segments."""
    assert job_path(run_id) == path


def test_a_job_needs_an_id() -> None:
    """An empty run id is refused: the job would be all jobs."""
    with pytest.raises(ValueError, match="needs a run id"):
        job_path("")


@pytest.mark.parametrize("value", [b"", b"x", b"+", b"z", b"x" * 4096, bytes(range(256)) * 100], ids=len)
def test_values_are_unpacked_as_they_were(value: bytes) -> None:
    """Small and large values come back as they went in, equal ones are stored alike, large ones take less room."""
    assert decompress(compress(value)) == value
    assert compress(value) == compress(bytes(value))
    assert len(compress(value)) <= len(value) + 1


@pytest.mark.parametrize(
    "stored", [b"", b"garbage", b"z", b"zgarbage", b"z" + zlib.compress(b"x" * 9999)[:-3]], ids=repr
)
def test_garbage_is_unpacked_as_it_is(stored: bytes) -> None:
    """What was not compressed comes out as it is."""
    assert decompress(stored) == stored


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small value that would decompress to more than any of ours stays as it is."""
    monkeypatch.setattr(compression, "_LIMIT", 1 << 16)
    bomb = b"z" + zlib.compress(bytes(1 << 20), 9)
    assert decompress(bomb) == bomb


def test_an_outage_of_the_store_in_memory() -> None:
    """In an outage operations raise `silent` and close the object; afterwards a clone works."""
    space = JobSpace()
    store = MemoryJobStore(space)
    store.create("d/0", b"x")
    space.set_reachable(is_reachable=False)
    with pytest.raises(StoreConnectionError) as caught:
        store.get(["d/0"])
    assert caught.value.reason == SILENT
    with pytest.raises(StoreConnectionError):
        store.clone()
    space.set_reachable(is_reachable=True)
    with pytest.raises(StoreConnectionError, match="closed"):
        store.get(["d/0"])
    assert store.clone().get(["d/0"]) == [b"x"]
