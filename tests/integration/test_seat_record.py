"""The record of an agent's seat: real files, real locks, real processes; who may read it, and what it says."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.contract import ENV_RECORD_DIR
from elastic_run.core.protocol.facts import SEAT_CONFIRMED, SEAT_RUNNING, SEAT_UNTOLD
from elastic_run.core.protocol.messages import Assignment, Copy, Join, PreviousRound, Ready, StoreAddress
from elastic_run.multiprocessing.process.descendants import Session, find_survivors
from elastic_run.multiprocessing.process.guardian import Guardian
from elastic_run.records import replace
from elastic_run.rendezvous.backend_table import make_backend, read_settings
from elastic_run.rendezvous.elastic.node_death import record_directory
from elastic_run.rendezvous.elastic.node_death.notice import send_death_notice
from elastic_run.rendezvous.elastic.node_death.proofs import DeathProofs
from elastic_run.rendezvous.elastic.node_death.record_directory import RecordDirectory
from elastic_run.rendezvous.elastic.node_death.seat_record import Record, SeatRecord, make_prefix, read_record
from tests.support.processes import is_gone, kill_processes
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = "job of a test"
HOME, AWAY = b"store 1", b"store 2"
_STORE_ADDRESS = StoreAddress("127.0.0.1", 1)
_HEAD = b'{"format": "elastic-run seat record", "version": 1, "boot": "b", '

#: Makes a record, says so, and waits to be killed.
_AGENT = """
import sys
from elastic_run.rendezvous.elastic.node_death.proofs import DeathProofs
deaths = DeathProofs(sys.argv[1])
deaths.open("victim")
print(deaths.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RecordDirectory]:
    """Return a directory of records."""
    found = RecordDirectory.open({ENV_RECORD_DIR: str(tmp_path)})
    assert found is not None
    yield found
    found.close()


def make_assignment(number: int = 3) -> Assignment:
    """Return rank 1's place in a round."""
    return Assignment(number, 1, 3, 1, 3, 1, 3, _STORE_ADDRESS, 0, 3, incarnation="red", round_id=f"{number}/1/c")


def read(path: str, job: str = JOB) -> Record:
    """Return what a record says."""
    with Path(path).open("rb") as file:
        return read_record(file.fileno(), job)


def start_agent(job: str = JOB) -> tuple[subprocess.Popen[str], str]:
    """Start a process that has a record, in the directory that the environment names; returns it and the path."""
    agent = subprocess.Popen(
        [sys.executable, "-c", _AGENT, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    return agent, agent.stdout.readline().strip()


def end(agent: subprocess.Popen[str]) -> None:
    """Kill a process and close its streams."""
    agent.kill()
    agent.wait()
    for stream in (agent.stdin, agent.stdout):
        if stream is not None:
            stream.close()


def test_a_record_is_its_users_alone(directory: RecordDirectory) -> None:
    """The record and its directory can be read by their user only, also where the umask would allow others."""
    former = os.umask(0)
    try:
        record = SeatRecord(directory, JOB, "node")
    finally:
        os.umask(former)
    assert Path(record.path).stat().st_mode & 0o777 == 0o600
    assert Path(directory.path).stat().st_mode & 0o777 == 0o700
    record.close()


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Where the directory is a link, or open to others, there are no records, and nothing fails."""
    name = f"elastic-run-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / name).symlink_to(tmp_path / "elsewhere")
    assert RecordDirectory.open({ENV_RECORD_DIR: str(tmp_path / "links")}) is None
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / name).mkdir()
    (tmp_path / "open" / name).chmod(0o755)
    assert RecordDirectory.open({ENV_RECORD_DIR: str(tmp_path / "open")}) is None


def test_a_network_file_system_has_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where other machines may not see a lock a node goes on without a record, and says so in one line."""
    monkeypatch.setenv(ENV_RECORD_DIR, str(tmp_path))
    monkeypatch.setattr(record_directory, "_find_file_system", lambda _: "nfs4")
    deaths = DeathProofs(JOB)
    with caplog.at_level(logging.DEBUG, logger="elastic_run"):
        deaths.open("node")
    deaths.note_round(make_assignment())
    assert deaths.path == ""
    assert [record.levelno for record in caplog.records if "nfs4" in record.getMessage()] == [logging.DEBUG]
    deaths.close(is_over=True)


def test_an_unwritable_directory_is_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that is no directory costs the record, not the job."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(ENV_RECORD_DIR, str(tmp_path / "file"))
    deaths = DeathProofs(JOB)
    deaths.open("node")
    assert deaths.path == ""
    deaths.close(is_over=False)


def test_the_seat_follows_what_the_agent_is_told_and_says(directory: RecordDirectory) -> None:
    """A seat runs from its round's delivery until the node says, in whatever store, that it has read a `Prepare`."""
    record = SeatRecord(directory, JOB, "node")
    untold = read(record.path).seat
    assert untold is not None
    assert (untold.status, untold.store_id) == (SEAT_UNTOLD, "")
    record.note_round(make_assignment())
    seat = read(record.path).seat
    assert seat is not None
    assert (seat.incarnation, seat.round_index, seat.rank, seat.status, seat.store_id) == (
        "red",
        3,
        1,
        SEAT_RUNNING,
        "",
    )
    join = Join("node", 2, None, None, _STORE_ADDRESS, last=PreviousRound("3/1/c", 3, 1, 3, 0, "red"))  # type: ignore[arg-type]  # not read
    for fact in (join, Ready("node", 3, 3, "3/1/c", "stopped", _STORE_ADDRESS)):
        for store_id in (HOME, AWAY):
            record.note_fact(fact, store_id)
            assert read(record.path).seat == seat
    first, second = Copy("red", 3, 1, 7, 1), Copy("red", 3, 2, 2, 1)
    for prepared, said_in, store in ((first, HOME, "store 1"), (first, AWAY, "store 1"), (second, AWAY, "store 2")):
        record.note_fact(replace(join, prepared=prepared), said_in)
        confirmed = read(record.path).seat
        assert confirmed is not None
        assert (confirmed.round_index, confirmed.status, confirmed.store_id) == (3, SEAT_CONFIRMED, store)
    record.note_round(make_assignment(4))
    told = read(record.path).seat
    assert told is not None
    assert (told.round_index, told.status, told.store_id) == (4, SEAT_RUNNING, "")
    record.close()


def test_an_agent_that_was_told_of_no_round_may_have_confirmed_one(directory: RecordDirectory) -> None:
    """The log of that store may have formed a round on its word, and no other log can have."""
    record = SeatRecord(directory, JOB, "node")
    prepared = Copy("red", 3, 1, 7, 1)
    record.note_fact(Join("node", 2, None, None, _STORE_ADDRESS, prepared=prepared), AWAY)  # type: ignore[arg-type]  # not read
    seat = read(record.path).seat
    assert seat is not None
    assert (seat.status, seat.store_id) == (SEAT_UNTOLD, "store 2")
    record.close()


def test_an_agent_notes_what_it_confirms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it says so: its death may be all that the others learn."""
    monkeypatch.setenv(ENV_RECORD_DIR, str(tmp_path))
    deaths = DeathProofs(JOB)
    deaths.open("node")
    prepared = Copy("red", 3, 1, 7, 1)
    deaths.note_fact(Join("node", 2, None, None, _STORE_ADDRESS, prepared=prepared), AWAY)  # type: ignore[arg-type]  # not read
    seat = read(deaths.path).seat
    assert seat is not None
    assert seat.store_id == "store 2"
    deaths.close(is_over=True)


def test_a_record_that_cannot_be_written_is_emptied(
    directory: RecordDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk refuses leaves no older record that would prove something false."""
    record = SeatRecord(directory, JOB, "node")
    record.note_round(make_assignment())
    path = record.path
    held = os.open(path, os.O_RDONLY)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    record.note_round(make_assignment(4))
    assert os.read(held, 100) == b""
    assert not Path(path).exists()
    os.close(held)
    record.close()


def test_only_a_dead_agents_record_is_taken() -> None:
    """While an agent lives nobody speaks for it; once it was killed the next agent on its machine does."""
    agent, path = start_agent()
    try:
        deaths = DeathProofs(JOB)
        deaths.open("newcomer")
        assert not deaths.found
        agent.kill()
        agent.wait()
        deaths.look()
        assert [record.node for record in deaths.found] == ["victim"]
        assert Path(path).exists()
        deaths.note_round(make_assignment())
        assert not Path(path).exists()
        deaths.close(is_over=True)
    finally:
        end(agent)


def test_two_newcomers_do_not_share_a_record() -> None:
    """One of two agents that come at once speaks for the dead one; when it dies too, the other does for both."""
    agent, _ = start_agent()
    end(agent)
    first, second = DeathProofs(JOB), DeathProofs(JOB)
    first.open("first")
    second.open("second")
    assert [len(first.found), len(second.found)] == [1, 0]
    first.close(is_over=False)
    second.look()
    assert sorted(record.node for record in second.found) == ["first", "victim"]
    second.close(is_over=True)


def test_a_guardian_holds_the_record() -> None:
    """An agent's record stays locked until a guardian has killed what it left, and not while that tells the job."""
    agent, path = start_agent()
    guardian = Guardian(is_exec=True)
    former = guardian.start()
    guardian.hold(path)
    endpoints = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))  # nobody answers there
    backend = make_backend("c10d", endpoints, JOB, read_settings("c10d", {}), is_host=False)
    document = {**backend.describe(), "node": "victim", "job": JOB, "record": path, "seconds": 600.0}
    guardian.say_at_end(send_death_notice.__module__, json.dumps(document), 600.0)
    pid = guardian.start()
    os.waitpid(former, 0)
    try:
        deaths = DeathProofs(JOB)
        deaths.open("newcomer")
        wait_until(lambda: _is_open_in(pid, path), what="the guardian's descriptor")
        os.kill(pid, signal.SIGSTOP)
        end(agent)
        deaths.look()
        assert not deaths.found
        guardian.alarm()
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: _look(deaths), what="the lock")
        assert not is_gone(pid)
        deaths.close(is_over=True)
    finally:
        guardian.close()
        kill_processes([*find_survivors({pid: Session(0)}, "", since=0)])
        os.waitpid(pid, 0)


def _look(deaths: DeathProofs) -> list[Record]:
    deaths.look()
    return deaths.found


def _is_open_in(pid: int, path: str) -> bool:
    descriptors = Path(f"/proc/{pid}/fd")
    try:
        return any(os.path.realpath(fd) == path for fd in descriptors.iterdir())
    except FileNotFoundError:
        return False  # one was just closed


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\x00rubbish", "not JSON"),
        (b'{"format": "else"}', "format 'else'"),
        (b'{"format": "elastic-run seat record", "version": 2}', "version 2"),
        (_HEAD + b'"job": "other", "node": "n"}', "'other'"),
        (_HEAD + b'"job": "J", "node": "n"}', "last start"),
        (
            _HEAD + b'"job": "J", "node": "n", "seat": 7}',
            "Seat",
        ),
    ],
    ids=["empty", "rubbish", "format", "version", "job", "boot", "seat"],
)
def test_a_strange_record_is_named_and_proves_nothing(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that can't be used is named once, with its path and the reason; the node goes on."""
    monkeypatch.setenv(ENV_RECORD_DIR, str(tmp_path))
    directory = RecordDirectory.open(os.environ)
    assert directory is not None
    name = make_prefix(JOB) + "strange"
    os.close(directory.create(name, content.replace(b'"J"', json.dumps(JOB).encode())))
    deaths = DeathProofs(JOB)
    said: list[str] = []
    deaths.say = said.append
    deaths.open("newcomer")
    deaths.look()
    assert not deaths.found
    assert len(said) == 1
    assert f"{directory.path}/{name}" in said[0]
    assert reason in said[0]
    deaths.close(is_over=True)
    directory.close()


def test_links_and_strange_files_are_passed_over(directory: RecordDirectory) -> None:
    """A symbolic link or a pipe among the records is not opened."""
    here = Path(directory.path)
    (here / f"{make_prefix(JOB)}link").symlink_to("/etc/hostname")
    os.mkfifo(here / f"{make_prefix(JOB)}pipe")
    assert list(directory.take_dead(make_prefix(JOB))) == []


def test_old_records_are_removed(directory: RecordDirectory) -> None:
    """What no process has held for a day goes, whatever its job; what is held stays, however old."""
    old, held = (SeatRecord(directory, job, "node") for job in ("one", "other"))
    for record in (old, held):
        os.utime(record.path, (time.time() - 2 * 86400.0,) * 2)
    gone, stays = old.path, held.path
    old.close()
    directory.sweep()
    assert not Path(gone).exists()
    assert Path(stays).exists()
    held.close()


def test_old_records_are_looked_for_once_an_hour(directory: RecordDirectory) -> None:
    """A machine with thousands of records costs each agent that starts there no look at all of them."""
    directory.sweep()
    old = SeatRecord(directory, JOB, "old")
    os.utime(old.path, (time.time() - 2 * 86400.0,) * 2)
    path = Path(old.path)
    old.close()
    directory.sweep()
    assert path.exists()
    os.utime(path.with_name("swept"), (time.time() - 3601.0,) * 2)
    directory.sweep()
    assert not path.exists()
    assert path.with_name("swept").exists()
