"""Two of three nodes die in every order of events that matters for the proof of the first death.

    python -m tests.chaos.schedules                                  all of them: 100 jobs, 25 minutes
    python -m tests.chaos.schedules --only 0.5-after-halt-killed     one of them

The node that serves the store is killed; it is started again after {0, 0.5, 3, 10} s. The second node is killed {before
it goes elsewhere, after that, after the halt of the round, after its workers are gone, after it has confirmed the next
round}. The guardian of the first one {works, is killed too, is stopped for 4 s, is heard twice}; or nobody proves its
death, and a wrong proof is told first, which says that it confirmed a round in another store, and the right one at the
end. What must be true: no two jobs train at the same time, no agent ends that was not killed, all train together again,
no sample is lost. Needs root (virtual hosts).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend
from elastic_run.rendezvous.elastic.node_death.proofs import name_job
from tests.chaos.deaths import RECOVERY, assert_no_conflicts, open_job
from tests.chaos.job import PORT
from tests.support.guardians import wait_guardians
from tests.support.processes import kill_processes
from tests.support.system import starter
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.job import ManyNodeJob, Node

RESTARTS = (0.0, 0.5, 3.0, 10.0)
MOMENTS = ("before", "after-join", "after-halt", "after-ready", "after-confirm")
GUARDIANS = ("works", "killed", "late", "twice", "wrong")
#: Seconds for which a guardian is stopped that is late, and for which the second node stays dead.
_LATE = 4.0
_DEAD = 1.0
#: Seconds for a moment of the second node's life to come; it is killed then in any case.
_MOMENT = 12.0
#: Tells the job of a death, by a record at $1.
_TELL = """
import json, sys
from elastic_run.rendezvous.elastic.node_death.notice import send_death_notice
send_death_notice(json.loads(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One order of events.

    Attributes:
        restart: Seconds until the first node is started again.
        moment: When the second node is killed.
        guardian: What becomes of the proof of the first death.
    """

    restart: float
    moment: str
    guardian: str

    def __str__(self) -> str:
        return f"{self.restart:g}-{self.moment}-{self.guardian}"


ALL = tuple(itertools.starmap(Schedule, itertools.product(RESTARTS, MOMENTS, GUARDIANS)))


@starter
def run(schedule: Schedule, directory: Path, *, say: Callable[[str], None]) -> None:
    """Run a job through a schedule.

    Args:
        schedule: What happens.
        directory: For the job's checkpoint, books and logs.
        say: Told each event, a line.

    Raises:
        AssertionError: Something was not as it must be.
    """
    with open_job(directory) as job:
        first, second = job.nodes[:2]
        record = _read_record(first)
        written = len(second.output)
        stopped = _kill_first(first, schedule.guardian)
        restarting = threading.Timer(schedule.restart, job.start_again, (first,))
        restarting.start()
        _wait_moment(second, schedule.moment, written)
        second.agent.kill()
        second.agent.process.wait(30)
        if schedule.guardian in ("twice", "wrong"):
            _tell(job, record, directory, is_wrong=schedule.guardian == "wrong")
        time.sleep(_DEAD)  # the schedule is the subject
        job.start_again(second)
        restarting.join()
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if schedule.guardian == "wrong":
            _tell(job, record, directory, is_wrong=False)
        begin = time.monotonic()
        job.wait_progress(deadline=RECOVERY)
        say(f"{schedule}: together again after {time.monotonic() - begin:.1f} s")
        assert_no_conflicts(directory)


def _find_records(node: Node) -> list[Path]:
    return sorted(Path(f"/proc/{node.host.first_pid}/root/dev/shm").glob("elastic-run-*/seat-*"))


def _read_record(node: Node) -> bytes:
    """Return the record of a node's agent, as it is before its death."""
    (path,) = _find_records(node)
    return path.read_bytes()


def _kill_first(node: Node, guardian: str) -> list[int]:
    """Kill the first node's agent; returns its guardians where they are stopped."""
    guardians = wait_guardians(node.agent.pid, deadline=30) if guardian in ("killed", "late", "wrong") else []
    if guardian == "late":
        for pid in guardians:
            os.kill(pid, signal.SIGSTOP)
        threading.Timer(_LATE, _continue, (guardians,)).start()
    else:
        kill_processes(guardians)
    workers = node.workers()
    node.agent.kill()
    node.agent.process.wait(30)
    if guardian in ("killed", "late", "wrong"):
        kill_processes(workers)  # law 6 is not the subject
    if guardian == "wrong":
        for path in _find_records(node):
            path.unlink()
    return guardians if guardian == "late" else []


def _continue(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _wait_moment(node: Node, moment: str, written: int) -> None:
    """Wait until a moment of the second node's life; not for ever, since some orders of events have no such moment."""

    def has_come() -> bool:
        news = node.output[written:]
        if moment == "after-join":
            return "going on at" in news
        if moment == "after-confirm":
            return any(b'"confirmed"' in path.read_bytes() for path in _find_records(node))
        is_halted = "stopping the workers" in news
        return is_halted and (moment == "after-halt" or not node.workers())

    if moment != "before":
        with contextlib.suppress(DeadlinePassedError):
            wait_until(has_come, deadline=_MOMENT)


def _tell(job: ManyNodeJob, record: bytes, directory: Path, *, is_wrong: bool) -> None:
    """Tell the job of the first death by a copy of its record, wherever its store is."""
    document = json.loads(record)
    if is_wrong:
        document["seat"].update(status="confirmed", store_id="store elsewhere")
    copy = directory / "record"
    copy.write_text(json.dumps(document), encoding="ascii")
    places = [(node.host.name, PORT) for node in job.nodes]
    notice = {
        "backend": "c10d",
        "endpoint": ",".join(f"{host}:{port}" for host, port in places),
        "run_id": "chaos",
        "conf": {},
        "secret": None,
        "node": document["node"],
        "job": name_job(TcpBackend("c10d", "chaos", places, is_host=False)),
        "record": str(copy),
        "seconds": 5.0,
    }
    job.nodes[2].host.run(sys.executable, "-c", _TELL, json.dumps(notice))


def _say(line: str) -> None:
    print(f"schedules: {line}", flush=True)  # noqa: T201 - a command prints


def main() -> int:
    """Run the schedules that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.schedules")
    parser.add_argument("--only", default="", help="names with commas between them")
    only = tuple(filter(None, parser.parse_args().only.split(",")))
    failed = []
    for schedule in ALL:
        if only and str(schedule) not in only:
            continue
        with tempfile.TemporaryDirectory(prefix="schedules-") as directory:
            try:
                run(schedule, Path(directory), say=_say)
            except AssertionError as error:
                _say(f"{schedule}: {error}")
                failed.append(str(schedule))
    _say(f"FAILED; again: python -m tests.chaos.schedules --only {','.join(failed)}" if failed else "ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
