"""The event log of real jobs: folded, it gives their rounds, members, restarts and ending."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.support import system
from tests.support.job_results import read_job, read_whole
from tests.support.sessions import free_port
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from tests.support.launch import Launch, Launched, Worker


#: Each worker notes where it is, and waits for SIGUSR1, which ends it well.
NOTING = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # it may come right behind the note
keys = ("MASTER_PORT", "RANK", "GROUP_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
note = " ".join([os.environ[key] for key in keys] + [str(os.getpid()), str(os.getppid())])
with open({notes!r}, "a") as file:
    file.write(note + "\\n")
signal.sigwait([signal.SIGUSR1])
"""


class Notes:
    """What the workers of a job have noted: the truth beside its event log.

    Args:
        path: Their file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rounds(self) -> dict[tuple[int, int], dict[int, tuple[int, int, int]]]:
        """Return the rounds by restart and port: pid, launcher's pid and node rank of each rank's worker."""
        found: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = defaultdict(dict)
        if self.path.exists():
            for line in self.path.read_text(encoding="ascii").splitlines():
                port, rank, group_rank, _, restart, pid, agent = map(int, line.split())
                found[restart, port][rank] = pid, agent, group_rank
        return dict(found)

    def wait_round(self, workers: int, known: int) -> dict[int, tuple[int, int, int]]:
        """Wait for a whole round of that many workers behind the first so many rounds."""

        def newest() -> dict[int, tuple[int, int, int]] | None:
            rounds = list(self.rounds().values())[known:]
            return rounds[-1] if rounds and len(rounds[-1]) == workers else None

        found = wait_until(newest, what=f"a round of {workers} workers", deadline=60.0)
        assert found is not None
        return found


def test_the_log_of_one_node_tells_the_whole_job(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Rounds, exit codes, signals, causes, durations and the ending; the named file has the same lines."""
    script = worker("""
        say("hello")
        if rank == 1 and attempt == 0: raise ValueError("loss is nan")
        if attempt == 0: signal.pause()
        if rank == 0 and attempt == 1: os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1: signal.pause()
    """)
    named = tmp_path / "named.jsonl"
    flags = ["--nproc-per-node=2", "--max-restarts=3", "--log-dir=logs", "--tee=3", f"--events-file={named}"]
    assert launch(*flags, script, cwd=tmp_path).wait_exit() == 0
    job = read_job(tmp_path / "logs")
    assert (job.verdict, job.restarts, [each.formed["restart"] for each in job.rounds]) == ("success", 2, [0, 1, 2])
    members = [each.members[0] for each in job.rounds]
    stops, starts = ([member.events[name] for member in members] for name in ("workers_stopping", "workers_started"))
    assert [stop["reason"] for stop in stops] == ["failure", "failure", "success"]
    first, second, third = ({rank: each.events for rank, each in member.workers.items()} for member in members)
    own, other = first[1]["worker_exited"], first[0]["worker_exited"]
    assert (own["exit_code"], own["was_stopped"], other["was_stopped"]) == (1, False, True)
    assert first[1]["worker_failed"]["cause"] == "ValueError: loss is nan"
    assert "worker_failed" not in first[0]
    killed = second[0]["worker_exited"]
    assert (killed["exit_code"], killed["signal"]) == (None, "SIGKILL")
    assert {rank: each["worker_exited"]["exit_code"] for rank, each in third.items()} == {0: 0, 1: 0}
    assert all("first_output" in each and each["worker_started"]["is_output_seen"] for each in third.values())
    assert starts[0]["recovery_s"] is None
    assert all(0 < start["recovery_s"] < 30 for start in starts[1:])
    assert all(0 <= stop["detected_s"] < 30 for stop in stops[:2])
    assert stops[2]["detected_s"] is None
    (ended,) = [agent.ended for agent in job.agents]
    assert ended is not None
    assert 0 < ended["running_s"] < ended["wall_s"]
    assert read_whole(named) == read_whole(next((tmp_path / "logs").glob("*/events.jsonl")))


def test_a_failed_job_names_its_cause_in_the_last_line(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The verdict, the exit code, and the rank and the exception of the root cause."""
    script = worker("raise ValueError('loss is nan')")
    launcher = launch(f"--events-file={tmp_path / 'e'}", script)
    assert launcher.wait_exit() == 1
    last = read_whole(tmp_path / "e")[-1]
    expected = {"event": "agent_ended", "verdict": "worker_failed", "exit_code": 1, "cause_rank": 0}
    assert last.items() >= {**expected, "cause": "ValueError: loss is nan"}.items()


#: The launcher's wall clock, which the file CLOCK sets by days.
SET_CLOCK = """
import os, time
def shifted(true=time.time):
    with open(os.environ["CLOCK"]) as file:
        return true() + 86400 * int(file.read() or 0)
time.time = shifted
"""


def test_a_clock_that_is_set_changes_no_duration(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The lines, the report, failure.json and the page of the history have the seconds that have passed."""
    clock, logs = tmp_path / "clock", tmp_path / "logs"
    clock.write_text("0", encoding="ascii")
    (tmp_path / "sitecustomize.py").write_text(SET_CLOCK, encoding="utf-8")
    script = worker(
        "with open(os.environ['CLOCK'], 'r+') as file:\n    file.write(('1000', '-500')[attempt])\nsys.exit(3)"
    )
    env = {"CLOCK": str(clock), "PYTHONPATH": str(tmp_path)}
    job = launch("--max-restarts=1", f"--log-dir={logs}", script, env=env)
    assert job.wait_exit() == 3
    assert not re.search(r"\d (?:d|h) ", job.stderr)
    failure = json.loads(next(logs.glob("*/failure.json")).read_text(encoding="utf-8"))
    assert all(0 < each["uptime"] < stretched(60) for each in (failure["root_cause"], *failure["attempts"]))
    (agent,) = read_job(logs).agents
    assert agent.last_at - agent.first_at < stretched(120)


def _is_told(logs: Path, pids: set[int]) -> bool:
    """Whether the logs tell of the start of these workers."""
    lines = [
        line
        for path in logs.glob("*/events.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
    ]
    return pids <= {json.loads(line).get("pid") for line in lines if line.endswith("\n")}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_logs_of_a_chaos_run_give_exactly_the_job(
    seed: int, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Workers and agents are killed with -9; every round that the workers saw is in the logs, with the same members."""
    notes = Notes(tmp_path / "notes")
    script = worker(NOTING.format(notes=str(notes.path)))
    place = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    conf = "--rdzv-conf=keep_alive_interval=0.5,keep_alive_max_attempt=4,last_call_timeout=20,join_timeout=60"
    meeting = ["--rdzv-backend=c10d", place, "--rdzv-id=chaos", conf]
    flags = [*meeting, "--nnodes=2:3", "--nproc-per-node=2", "--max-restarts=100", "--max-backoff=0.1"]

    def start() -> Launched:
        return launch(*flags, f"--log-dir={tmp_path / 'logs'}", script)

    agents = [start() for _ in range(3)]
    chance, failures = Random(seed), 0  # noqa: S311 - repeatable
    present = notes.wait_round(6, 0)
    for _ in range(4):
        known = len(notes.rounds())
        # An agent opens its log shortly after the start of its workers, and is not killed before that.
        pids = {pid for pid, *_ in present.values()}
        wait_until(lambda pids=pids: _is_told(tmp_path / "logs", pids), what="a round in the logs")  # type: ignore[misc]
        if chance.random() < 0.5:
            failures += 1
            os.kill(chance.choice(sorted(present.values()))[0], signal.SIGKILL)
        else:
            # The first agent serves the store of the job; a job without successors ends with it.
            victim = chance.choice(agents[1:])
            victim.send(signal.SIGKILL)
            victim.wait_exit()
            agents.remove(victim)
            agents.append(start())
        present = notes.wait_round(6, known)
    for pid, *_ in present.values():
        os.kill(pid, signal.SIGUSR1)
    assert [agent.wait_exit() for agent in agents] == [0, 0, 0]

    job = read_job(tmp_path / "logs")
    assert job.verdict == "success"
    assert job.restarts == failures
    numbers = [each.number for each in job.rounds]
    assert numbers == sorted(set(numbers))
    of_agent = {agent.name: agent.started["agent_pid"] for agent in job.agents if agent.started is not None}
    told = [
        {
            rank: (found.events["worker_started"]["pid"], of_agent[member.formed["agent"]], member.formed["node_rank"])
            for member in each.members.values()
            for rank, found in member.workers.items()
        }
        for each in job.rounds
    ]
    assert [len(each.members) for each in job.rounds] == [each.formed["nodes"] for each in job.rounds]
    for (restart, _), ranks in notes.rounds().items():
        # Workers that were stopped at once had no time for their note, but those that had it are in one round.
        (found,) = [index for index, logged in enumerate(told) if logged.items() >= ranks.items()]
        assert job.rounds[found].formed["restart"] == restart
    whole = [ranks for ranks in notes.rounds().values() if len(ranks) == 6]
    assert [logged for logged in told if logged in whole] == whole


def test_an_agent_that_was_killed_leaves_whole_lines(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Nobody tells its end, and its last round is there."""
    launcher = launch("--log-dir=logs", worker("say('here')\nsignal.pause()"), cwd=tmp_path)
    launcher.wait_line("here")
    logs = (tmp_path / "logs").glob
    wait_until(
        lambda: any(b"workers_started" in path.read_bytes() for path in logs("*/events.jsonl")),
        what="the line of the workers' start",
    )
    launcher.send(signal.SIGKILL)
    launcher.wait_exit()
    job = read_job(tmp_path / "logs")
    assert (job.verdict, len(job.rounds), job.agents[0].ended) == ("", 1, None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 64 KiB."""
    with system.small_disk(tmp_path, 64) as disk:
        yield disk


def test_a_full_disk_costs_one_line_and_no_job(launch: Launch, worker: Worker, small_disk: Path) -> None:
    """The log ends in the middle of a line, is said to be incomplete once, and goes on when there is room."""
    ballast, gone = small_disk / "ballast", small_disk.parent / "gone"
    os.mkfifo(gone)
    log = small_disk / "events.jsonl"
    script = worker(f"""
        if attempt < 3: sys.exit(3)
        say("full")
        open({str(gone)!r}).read()
    """)
    ballast.write_bytes(bytes(60 * 1024))
    launcher = launch(f"--events-file={log}", "--max-restarts=3", "--max-backoff=0.01", script)
    launcher.wait_line("full")
    launcher.wait_line("is incomplete")
    ballast.unlink()
    gone.write_text("", encoding="ascii")
    assert launcher.wait_exit() == 0
    assert launcher.stderr.count("is incomplete: No space left on device; this does not affect the job") == 1
    lines = log.read_bytes().splitlines()
    assert json.loads(lines[-1])["event"] == "agent_ended"
    (gap,) = [json.loads(line) for line in lines if b'"lines_lost"' in line]
    assert gap["lines"] > 0
    torn = [line for line in lines if not line.endswith(b"}")]
    assert len(torn) <= 1


@pytest.mark.parametrize("place", ["no/such/e.jsonl", "", "plain/e.jsonl"], ids=["missing", "directory", "file"])
def test_an_events_file_that_cannot_be_written_is_refused(
    place: str, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """One line, exit 2, before anything starts."""
    (tmp_path / "plain").touch()
    launcher = launch(f"--events-file={tmp_path / place}", worker("say('ran')"))
    assert launcher.wait_exit() == 2
    (line,) = [line for line in launcher.stderr.splitlines() if "error" in line]
    assert "--events-file: " in line
    assert "can't be written: " in line
    assert "ran" not in launcher.stdout


def test_a_pipe_that_nobody_reads_holds_nobody_up(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A named pipe without a reader takes what it can."""
    os.mkfifo(tmp_path / "pipe")
    launcher = launch(f"--events-file={tmp_path / 'pipe'}", worker("say('ran')"))
    assert launcher.wait_exit() == 0
    assert "ran" in launcher.stdout


def test_the_workers_resources_are_read(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A second after the start the log has the processor time and the memory of each worker."""
    path = tmp_path / "events.jsonl"
    job = launch("--nproc-per-node=2", f"--events-file={path}", str(worker("sys.stdin.read(0)\nsignal.pause()")))

    def readings() -> list[dict[str, Any]]:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["event"] == "resources"]

    reading, *_ = wait_until(readings, what="a reading")
    assert reading["ranks"] == [0, 1]
    assert all(0 <= seconds < 30 for seconds in reading["cpu_s"])
    assert all(1 <= size < 1000 for size in reading["memory_mib"])
    job.send(signal.SIGTERM)
    job.wait_exit()
