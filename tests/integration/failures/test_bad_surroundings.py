"""Bad surroundings: directories that vanish or deny access, streams that nobody reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import elastic_run
from elastic_run import contract
from elastic_run.cli.commands import COMMANDS
from tests.support.launch import ELASTIC_RUN
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Worker


#: The locale of a system from before UTF-8, which Python would change by itself.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("flag", ["--tee=0", "--log-dir=logs"])
def test_a_script_with_a_name_that_the_locale_does_not_know(
    launch: Launch, worker: Worker, tmp_path: Path, flag: str
) -> None:
    """The name goes into the directory of the log files as it is."""
    path = worker("say('runs')").rename(tmp_path / "\xe9\u2603.py")
    job = launch(flag, path, env=ASCII, cwd=tmp_path)
    assert job.wait_exit() == 0, job.stderr
    assert (job.stdout, job.stderr) == ("runs\n", "")
    if flag == "--log-dir=logs":
        assert any("_\xe9\u2603_" in path.name for path in (tmp_path / "logs").iterdir())


@pytest.mark.parametrize("limit", [6, 8])
def test_too_few_descriptors_for_a_launcher_are_no_defect(launch: Launch, worker: Worker, limit: int) -> None:
    """One line names the limit; the exit code is that of a refused start."""
    shell = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *ELASTIC_RUN)
    job = launch(worker("say('runs')"), program=shell)
    assert job.wait_exit() == contract.EXIT_CANNOT_START
    assert job.stderr.count("\n") == 1
    assert "error: no job was started: [Errno 24] Too many open files" in job.stderr
    assert "ulimit -n" in job.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [("--help", ""), ("--version", ""), *((f"{name} --help", f"{name}: ") for name in COMMANDS)],
)
def test_a_text_for_a_full_disk_is_one_line(words: str, named: str) -> None:
    """As for every other command, and not the traceback of a defect."""
    command = [*ELASTIC_RUN, *words.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == contract.EXIT_USAGE
    assert done.stderr == f"elastic-run: error: {named}standard output can't be written: No space left on device\n"


@pytest.mark.parametrize("size", [1, 100_000])
def test_log_files_for_a_full_disk_are_one_line(tmp_path: Path, size: int) -> None:
    """Also where they are longer than what is written at once."""
    place = tmp_path / "attempt_0" / "0"
    place.mkdir(parents=True)
    (place / "stdout.log").write_text("x\n" * size, encoding="ascii")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*ELASTIC_RUN, "logs", str(tmp_path)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == contract.EXIT_USAGE
    assert done.stderr == "elastic-run: error: logs: standard output can't be written: No space left on device\n"


def test_a_reader_of_log_files_that_has_gone_is_no_error(tmp_path: Path) -> None:
    """Also within the first line, which may be long: `elastic-run logs | head -c 10`."""
    place = tmp_path / "attempt_0" / "0"
    place.mkdir(parents=True)
    (place / "stdout.log").write_text("x" * 1_000_000 + "\n", encoding="ascii")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [*ELASTIC_RUN, "logs", str(tmp_path)], stdout=gone, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flag", ["--role={}", "--rdzv-id={}", "--rdzv-conf=keep_alive_max_attempt=1{}"])
def test_a_value_that_the_nodes_cannot_tell_each_other_is_refused(launch: Launch, worker: Worker, flag: str) -> None:
    """Else the first node would wait for a round for ever, or end by a defect."""
    job = launch("--nnodes=1:2", flag.format("0" * 4999), worker("say('runs')"))
    assert job.wait_exit() == contract.EXIT_USAGE
    assert job.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "stacks", "logs"])
def test_a_command_whose_output_nobody_reads_ends(launch: Launch, worker: Worker, tmp_path: Path, command: str) -> None:
    """A closed stdout is no defect."""
    job = launch(f"--log-dir={tmp_path}", worker("import time; say('runs'); time.sleep(60)"))
    job.wait_line("runs")
    shell = ["sh", "-c", '"$@" >&-', "sh", *ELASTIC_RUN, command, str(job.pid)]

    def ask() -> bool:
        done = subprocess.run(shell, capture_output=True, text=True, check=False)
        is_there = "no job of yours" not in done.stderr
        assert not is_there or (done.returncode, done.stderr) == (0, "")
        return is_there

    wait_until(ask, what="a job")


@pytest.fixture
def in_deleted(tmp_path: Path) -> tuple[str, ...]:
    """The command, started in a directory that was deleted."""
    (tmp_path / "gone").mkdir()
    return ("sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path / "gone"), *ELASTIC_RUN)


@pytest.mark.parametrize("flags", [("--nnodes=1:2", "--rdzv-conf=last_call_timeout=0"), ("--tee=3",)], ids=str)
@pytest.mark.parametrize("words", [("-m", "this", "gone"), ("--no-python", "echo", "runs")], ids=str)
def test_a_job_runs_in_a_deleted_directory(
    launch: Launch, in_deleted: tuple[str, ...], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Modules, programs and scripts of another directory need no working directory."""
    job = launch(*flags, *words, program=in_deleted, env={"TMPDIR": "."})
    assert job.wait_exit() == 0, job.stderr
    assert "runs" in job.stdout or "Namespaces" in job.stdout


def test_a_log_directory_in_a_deleted_directory_is_refused(
    launch: Launch, in_deleted: tuple[str, ...], worker: Worker
) -> None:
    """One line names the flag and the reason."""
    job = launch("--log-dir=logs", worker("say('runs')"), program=in_deleted)
    assert job.wait_exit() == contract.EXIT_USAGE
    told = "'logs' is not a writable directory: this process's working directory was deleted"
    assert job.stderr == f"elastic-run: error: --log-dir: {told}\n"


#: As a cleaner of temporary files (systemd-tmpfiles) does, this worker removes the directories; then it fails.
REMOVED = """
import os, shutil
if attempt == 0:
    for name in os.listdir("cleaned"):
        shutil.rmtree(os.path.join("cleaned", name))
    raise SystemExit(3)
say("runs")
raise RuntimeError("the second attempt")
"""


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--tee=3",), marks=pytest.mark.long),
        ("--redirects=3", "--log-dir=cleaned/logs"),
        pytest.param(("--log-dir=cleaned",), marks=pytest.mark.long),
    ],
)
def test_a_restart_makes_removed_directories_again(
    launch: Launch, worker: Worker, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """A job survives the removal of its directories, as under torchrun, and removes the new temporary directory."""
    cleaned = tmp_path / "cleaned"
    cleaned.mkdir()
    job = launch("--max-restarts=1", *flags, worker(REMOVED), cwd=tmp_path, env={"TMPDIR": str(cleaned)})
    assert job.wait_exit() == 1, job.stderr
    assert "RuntimeError: the second attempt" in job.stderr
    if not flags:
        assert (job.stdout, list(cleaned.iterdir())) == ("runs\n", [])
        return
    (run,) = {path.parent for path in cleaned.rglob("failure.json") if not path.parent.is_symlink()}
    assert (run / "attempt_1/0/stdout.log").read_text() == "runs\n"
    assert (run.parent / "latest").exists() == any("log-dir" in flag for flag in flags)


def has_imported_all(control_dir: Path) -> bool:
    """Whether an agent's round is so old that it has imported what its end may need, a second after the start."""
    env = {**os.environ, contract.ENV_CONTROL_DIR: str(control_dir)}
    answer = subprocess.run([*ELASTIC_RUN, "status", "--json"], env=env, capture_output=True, text=True, check=False)
    return answer.returncode == 0 and (json.loads(answer.stdout)["nodes"][0]["round_uptime"] or 0) > 2


@pytest.mark.parametrize("fails", [(), (0,), (0, 1)], ids=["success", "restart", "failure"])
def test_a_job_ends_well_after_its_package_was_removed(
    launch: Launch, worker: Worker, tmp_path: Path, fails: tuple[int, ...]
) -> None:
    """`pip install` may replace files while a job runs: exit code, restart and report stay as they are."""
    site, gate = tmp_path / "site", tmp_path / "gate"
    shutil.copytree(Path(elastic_run.__file__).parent, site / "elastic_run")
    script = worker(f"""
        say("attempt", attempt)
        if attempt == 0: open({str(gate)!r}).read()
        if attempt in {fails}: raise RuntimeError("attempt failed")
    """)
    os.mkfifo(gate)
    env = {"PYTHONPATH": str(site), contract.ENV_CONTROL_DIR: str(tmp_path)}
    job = launch("--max-restarts=1", "--log-dir=logs", script, env=env, cwd=tmp_path)
    wait_until(lambda: has_imported_all(tmp_path), what="the agent's last imports")
    shutil.rmtree(site)
    gate.write_text("", encoding="utf-8")
    assert job.wait_exit() == (1 if 1 in fails else 0), job.stderr
    assert job.stdout.count("attempt") == 1 + len(fails[:1])
    assert ("RuntimeError: attempt failed" in job.stderr.partition("-- elastic-run: ")[2]) == (1 in fails)
    assert "files of elastic-run" not in job.stderr


# --- paths that the user may not read ---------------------------------------------------------------------------------
