"""Slots of the log that were trimmed: no coordinator decides them a second time, on any kind of store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from elastic_run.core import job_keys
from elastic_run.core.log_start import find_start
from elastic_run.core.member_messages import EntryRead, EntryTrimmed
from elastic_run.core.messages import LogStart, Warn, to_json
from elastic_run.rendezvous.elastic import log
from elastic_run.store.file import FileJobStore
from elastic_run.store.memory_job_store import JobSpace, MemoryJobStore
from elastic_run.store.sealed import SealedStore
from tests.support.job_stores import STORES
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", list(STORES))
def test_a_trimmed_slot_is_never_decided_again(kind: str) -> None:
    """A coordinator that slept through a trim is told so, its entry goes, and no reader takes it for a decision."""
    with STORES[kind]() as opener, opener("job") as store, opener("job") as sleeper:
        first, second = Warn(1, 1), Warn(2, 2)
        assert log.create_entry(store, 3, first) == EntryRead(3, to_json(first))
        assert log.wait_entry(sleeper, 3, DEADLINE) == EntryRead(3, to_json(first))
        log.raise_start(store, LogStart(4, 2))
        store.delete([job_keys.decision_key(3)])
        assert log.create_entry(sleeper, 3, second) == EntryTrimmed(3)
        assert store.get([job_keys.decision_key(3)]) == [None]
        sleeper.create(job_keys.decision_key(3), to_json(second))  # it was stopped before it could look
        assert log.wait_entry(store, 3, 0.0) == EntryTrimmed(3)
        assert log.wait_entry(sleeper, 3, DEADLINE) == EntryTrimmed(3)
        assert log.create_entry(sleeper, 4, second) == EntryRead(4, to_json(second))
        log.raise_start(sleeper, LogStart(2, 1))
        assert find_start(store.get([job_keys.LOG_START])[0]) == LogStart(4, 2)


def test_the_start_is_written_again_where_a_stranger_has_hidden_it() -> None:
    """With a token, a start that no member has written is no start, and the next trim writes it anew."""
    space = JobSpace()
    plain, store = MemoryJobStore(space), SealedStore(MemoryJobStore(space), b"secret")
    plain.write({job_keys.LOG_START: to_json(LogStart(9, 9)), job_keys.HEAD: b"forged too"})
    head = log.read_head(store)
    assert (head.head, head.log_start) == (log.FORGED, log.FORGED)
    log.raise_start(store, LogStart(4, 2))
    assert find_start(log.read_head(store).log_start) == LogStart(4, 2)


def test_a_writer_that_was_stopped_lowers_no_start_of_a_stream(tmp_path: Path) -> None:
    """In a directory, whoever trims less than another does so before the other or not at all."""
    slow, fast = FileJobStore(f"{tmp_path}/", "job"), FileJobStore(f"{tmp_path}/", "job")
    for number in range(5):
        slow.append("facts", b"%d" % number)
    other = threading.Thread(target=fast.trim, args=("facts", 5))
    rename = slow._rename

    def rename_late(new: str, place: str) -> None:
        other.start()
        other.join(0.5)  # seconds; it is over by then, unless it has to wait for us
        rename(new, place)

    slow._rename = rename_late  # type: ignore[method-assign]
    slow.trim("facts", 2)
    other.join(DEADLINE)
    slow.append("facts", b"5")
    assert slow.read("facts", 0, 0.0)[0] == [b"5"]
