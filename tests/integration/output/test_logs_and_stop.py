"""`elastic-run logs` and `stop`, and log directories that several jobs share."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run.cli.commands.jobs import stop_job
from elastic_run.contract import ENV_CONTROL_DIR
from elastic_run.control.client import RunningAgent, RunningJob
from elastic_run.control.socket_directory import find_sockets
from elastic_run.files import open_own, replace_file
from tests.support.launch import ELASTIC_RUN
from tests.support.launch import launch as start
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Launched, Worker


WAITING = "say('rank', rank, 'waits')\nsignal.pause()\n"
#: Fails once, and ends well then.
RESTARTED = "say('rank', rank, 'attempt', attempt)\nos.write(2, b'warning\\n')\nif attempt == 0: sys.exit(3)\n"


@pytest.fixture(autouse=True)
def own_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the control sockets of other tests' jobs out, which a killed launcher leaves."""
    monkeypatch.setenv(ENV_CONTROL_DIR, str(tmp_path))


def run(*words: str | Path) -> Launched:
    """Run a command to its end."""
    with start(*words) as command:
        command.wait_exit()
    return command


def wait_found(count: int = 1) -> None:
    """Wait for the control sockets of jobs that were started."""
    wait_until(lambda: len(find_sockets(os.environ)[0]) == count, what=f"{count} control sockets")


@pytest.fixture
def ended(launch: Launch, worker: Worker, tmp_path: Path) -> Path:
    """Return the log directory of a job of two ranks that was restarted once and has ended."""
    logs = tmp_path / "logs"
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--redirects=3", f"--log-dir={logs}", worker(RESTARTED))
    assert job.wait_exit() == 0, job.stderr
    return logs


def test_the_logs_of_an_ended_job_are_shown_across_its_attempts(ended: Path) -> None:
    """Its directory, or the one above it, is RUN."""
    for directory in (ended, *ended.glob("*_*")):
        shown = run("logs", directory)
        assert (shown.process.returncode, shown.stderr) == (0, "")
        first, second = shown.stdout.split("--- attempt_1\n")
        assert second.splitlines() == [
            "[0] rank 0 attempt 1",
            "[0 stderr] warning",
            "[1] rank 1 attempt 1",
            "[1 stderr] warning",
        ]
        assert first.startswith("--- attempt_0\n")
        assert {"[0] rank 0 attempt 0", "[1] rank 1 attempt 0"} & set(first.splitlines())


def test_logs_are_chosen_by_rank_text_time_and_number(ended: Path) -> None:
    """Each of the flags narrows; if there is no line, a message says so, and the exit code is 1."""
    assert run("logs", ended, "--rank=1", "--grep=attempt 1$").stdout == "--- attempt_1\n[1] rank 1 attempt 1\n"
    assert run("logs", ended, "--rank=0-1", "--grep=rank", "-n", "1").stdout.count("attempt 1") == 2
    assert run("logs", ended, "--since=1h").stdout == run("logs", ended).stdout
    nothing = run("logs", ended, "--grep=nothing")
    assert (nothing.stdout, nothing.process.returncode) == ("", 1)
    assert nothing.stderr == "elastic-run: logs: no line to show\n"
    for path in ended.rglob("*.log"):
        os.utime(path, (0, 0))
    assert run("logs", ended, "--since=1h").stdout == ""


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--rank=x"], "--rank: 'x' is not a list of ranks"),
        (["--rank=5-3"], "--rank: '5-3' is not a list of ranks"),
        (["--rank=99999999999"], "--rank: '99999999999' is not a list of ranks"),
        (["-n", "-1"], "--lines: -1 must be 0 (all) or more"),
        (["--since=yesterday"], "--since: 'yesterday' is not a time"),
        (["--grep=("], "--grep: '(' is not a regular expression"),
        (["/nowhere/at/all"], "there is no directory '/nowhere/at/all'"),
        (["/nowhere/7-ab12.sock"], "no job of yours runs on this machine, so none is '/nowhere/7-ab12.sock'"),
        (["/proc/self/task"], "holds no log files of a run"),
        ([], "no job of yours runs on this machine; `elastic-run logs DIR` shows the log files of a job that has end"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(words: list[str], error: str) -> None:
    """Exit code 2."""
    refused = run("logs", *words)
    assert refused.process.returncode == 2
    assert error in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_the_directory_of_several_runs_names_them(ended: Path, launch: Launch, worker: Worker) -> None:
    """One has to be chosen."""
    assert launch("--redirects=3", f"--log-dir={ended}", worker("say('x')")).wait_exit() == 0
    refused = run("logs", ended)
    assert refused.process.returncode == 2
    assert refused.stderr.count(f"{ended}/") == 2
    assert f"name one, the newest first: {ended}/latest, {ended}/2" in refused.stderr


def test_a_rank_without_log_files_is_told(ended: Path) -> None:
    """Nothing at all would look like a rank that has written nothing; one of several ranks is enough."""
    refused = run("logs", ended, "--rank=2,7-9")
    assert (refused.process.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "elastic-run: error: logs: --rank: no such rank has log files: there are ranks 0-1\n"
    assert run("logs", ended, "--rank=1,7").process.returncode == 0


def test_another_job_of_the_same_id_is_not_shown(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Nodes that share a log directory are shown together, from any directory; a former job of this id is not."""
    for text in ("former", "current"):
        place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
        body = f"say({text!r}, rank)\n" + ("" if text == "former" else "signal.pause()\n")
        words = (*place, "--tee=1", "--log-dir=logs", worker(body))
        nodes = [launch(*words, cwd=tmp_path) for _ in range(2)]
        for node in nodes:
            node.wait_line(text)
        if text == "former":
            assert [node.wait_exit() for node in nodes] == [0, 0]
    wait_found(2)
    shown = ["--- attempt_0", "[0] current 0", "[1] current 1"]
    assert sorted(run("logs", "j").stdout.splitlines()) == shown
    Path(find_sockets(os.environ)[0][0]).rename(tmp_path / "hidden")
    assert sorted(run("logs", "j").stdout.splitlines()) == shown


def test_logs_of_a_running_job_are_followed_through_a_restart_to_its_end(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Lines come as they are written, a line without an end at last, and the command ends with the job."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    body = (
        f"say('attempt', attempt)\nopen({str(gate)!r}).read()\nif attempt == 0: sys.exit(1)\nos.write(1, b'the end')\n"
    )
    job = launch("--max-restarts=1", "--tee=1", f"--log-dir={tmp_path / 'logs'}", worker(body))
    job.wait_line("attempt 0")
    wait_found()
    follower = launch("logs", "-f", str(job.pid))
    follower.wait_line(r"\[0\] attempt 0")
    gate.write_text("", encoding="utf-8")
    follower.wait_line(r"\[0\] attempt 1")
    gate.write_text("", encoding="utf-8")
    assert (job.wait_exit(), follower.wait_exit()) == (0, 0)
    assert follower.stdout.splitlines()[-1] == "[0] the end"


def test_a_job_without_log_files_says_which_flags_keep_them(launch: Launch, worker: Worker) -> None:
    """One line, exit 2; the job is named by its control socket here."""
    launch(worker(WAITING))
    wait_found()
    refused = run("logs", *find_sockets(os.environ)[0])
    assert refused.process.returncode == 2
    assert "keeps no log files; --log-dir=DIR keeps them" in refused.stderr


def test_a_closed_reader_is_no_error(ended: Path) -> None:
    """As with `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with start("logs", ended, env={"PYTHONUNBUFFERED": "1"}) as command:
        command.wait_exit()
    os.close(writing)
    assert "Traceback" not in command.stderr


def test_ranks_come_from_the_event_log(ended: Path) -> None:
    """On a node whose workers begin at rank 8, the directories 0 and 1 are ranks 8 and 9."""
    (path,) = ended.rglob("events.jsonl")
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for event in events:
        if event["event"] == "worker_started":
            event["rank"] += 8
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    assert run("logs", ended, "--rank=9", "--grep=attempt 1").stdout == "--- attempt_1\n[9] rank 1 attempt 1\n"


def test_a_job_is_stopped_as_by_sigterm_and_its_end_is_awaited(launch: Launch, worker: Worker) -> None:
    """Workers get their grace period, the launcher ends with 143 and names the command."""
    body = "def end(*_):\n    say('bye')\n    sys.exit(0)\nsignal.signal(signal.SIGTERM, end)\n" + WAITING
    job = launch("--nproc-per-node=2", worker(body))
    job.wait_lines("waits", count=2)
    wait_found()
    stopped = run("stop")
    assert (stopped.process.returncode, stopped.stderr) == (0, f"elastic-run: job {job.pid} has ended\n")
    assert job.wait_exit() == 143
    assert job.stdout.count("bye") == 2
    assert "(elastic-run stop)" in job.stderr


def test_a_job_that_does_not_end_in_time_is_told(launch: Launch, worker: Worker) -> None:
    """Exit code 1; the job gets its grace period all the same."""
    job = launch(
        "--shutdown-timeout=600",
        worker("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('waits')\nwhile True: signal.pause()"),
    )
    job.wait_line("waits")
    wait_found()
    stopped = run("stop", "--timeout=0.2", *find_sockets(os.environ)[0])
    assert stopped.process.returncode == 1
    assert "still runs" in stopped.stderr
    job.send(signal.SIGTERM)
    job.send(signal.SIGTERM)


def test_a_stopped_launcher_is_not_waited_for(launch: Launch, worker: Worker) -> None:
    """It takes no request, so it would never end; one line, and exit code 1 or 2."""
    job = launch("--nproc-per-node=1", worker(WAITING))
    job.wait_line("waits")
    wait_found()
    (path,) = find_sockets(os.environ)[0]
    agent = RunningAgent(path, job.pid)
    job.send(signal.SIGSTOP)
    assert stop_job(RunningJob((agent,)), None, wait_limit=0.2) == 1
    job.send(signal.SIGCONT)


def test_stop_without_a_job_is_an_error(tmp_path: Path) -> None:
    """One line, exit 2."""
    with start("stop", env={ENV_CONTROL_DIR: str(tmp_path)}) as command:
        assert command.wait_exit() == 2
    assert "no job of yours runs on this machine" in command.stderr


# --- a log directory that several jobs share --------------------------------------------------------------------------
#: A user who is neither root nor this one.
_STRANGER = 54321


def _permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        pytest.param(0o755, 0o755, id="readable"),
        pytest.param(0o750, 0o750, id="readable for a group"),
        pytest.param(0o775, 0o700, id="writable for a group"),
        pytest.param(0o1777, 0o700, id="writable for all"),
        pytest.param(0o2775, 0o750, id="a group's, on purpose"),
    ],
)
def test_a_run_is_as_open_as_the_log_directory_and_never_writable_for_others(
    launch: Launch, worker: Worker, tmp_path: Path, above: int, expected: int
) -> None:
    """The umask does not matter: other users could put links there, through which this user's files are overwritten."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(above)
    for place in (shared, shared / "logs"):
        flags = (f"--log-dir={place}", "--flight-recorder", worker("pass"))
        assert launch(*flags, program=["sh", "-c", 'umask 0; exec "$@"', "sh", *ELASTIC_RUN]).wait_exit() == 0
    directories = [path for path in shared.rglob("*") if path.is_dir() and not path.is_symlink()]
    assert len(directories) == 7  # two runs with an attempt and a rank each, and the directory of the second run
    assert {_permissions(path) for path in directories} == {expected}


def test_a_link_in_the_place_of_the_page_is_replaced(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """`elastic-run report LOGDIR` does not write through a link that another user has put into the log directory."""
    logs, victim = tmp_path / "logs", tmp_path / "victim"
    victim.write_text("precious")
    assert launch(f"--log-dir={logs}", worker("pass")).wait_exit() == 0
    (logs / "report.html").symlink_to(victim)
    assert launch("report", logs).wait_exit() == 0
    assert victim.read_text() == "precious"
    assert "</html>" in (logs / "report.html").read_text(encoding="utf-8")
    assert not (logs / "report.html").is_symlink()


def test_a_file_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    """Dumps and reports take the place of what has their name; nothing else is left behind."""
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    for content in (b"first", b"second"):
        replace_file(str(link), content)
        assert link.read_bytes() == content
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "victim"]
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(str(tmp_path / "directory"), b"")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.system  # for another owner of the link
def test_what_another_user_has_put_there_is_not_written_to(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A stranger's link is not followed, this user's is; `latest` of another user stays, and a line says so."""
    victim, link = tmp_path / "victim", tmp_path / "latest"
    victim.write_text("precious")
    link.symlink_to(victim)
    os.close(open_own(str(link), os.O_WRONLY))
    os.chown(link, _STRANGER, _STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"it belongs to another user .uid {_STRANGER}."):
        open_own(str(link), os.O_WRONLY | os.O_TRUNC)
    job = launch(f"--log-dir={tmp_path}", worker("pass"))
    assert job.wait_exit() == 0
    assert f"the link {link} belongs to another user (uid {_STRANGER}), and does not lead to this run: 2" in job.stderr
    assert stat.S_ISLNK(link.lstat().st_mode)
    assert link.readlink() == victim
    assert victim.read_text() == "precious"
