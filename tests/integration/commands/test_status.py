"""Commands about running jobs: `status`, `top` and `drain`, what they show of real jobs, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.contract import ENV_CONTROL_DIR, ENV_RDZV_TOKEN
from elastic_run.control.client import ask_all
from elastic_run.control.socket_directory import find_sockets
from tests.support.launch import complete_in_bash
from tests.support.launch import launch as start
from tests.support.local_rendezvous import wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from tests.support.launch import Launch, Launched, Worker
    from tests.support.terminal import Terminal


# --- status -----------------------------------------------------------------------------------------------------------
WAITING = "say('rank', rank, 'waits')\nwhile True: signal.pause()\n"


def run(*words: str, env: dict[str, str] | None = None) -> Launched:
    """Run a command to its end."""
    with start(*words, env=env) as command:
        command.wait_exit()
    return command


def status(*words: str, env: dict[str, str] | None = None) -> Launched:
    """Run `elastic-run status` to its end."""
    return run("status", *words, env=env)


def read_status(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON document, once a job is found."""

    def ask() -> str:
        command = status("--json", *words, env=env)
        return command.stdout if command.process.returncode == 0 else ""

    document: dict[str, Any] = json.loads(wait_until(ask, what="a job"))
    return document


def test_a_job_is_shown_with_each_workers_state_and_last_line(launch: Launch, worker: Worker) -> None:
    """From the first line of a worker on; a worker that SIGSTOP holds stands there as stopped."""
    body = "say('rank', rank, 'begins')\nwhile rank == 1: pass\nsignal.pause()\n"
    launcher = launch("--nproc-per-node=3", "--max-restarts=2", worker(body), merge=True)
    launcher.wait_lines("begins", count=3)
    (node,) = json.loads(status("--json").stdout)["nodes"]
    assert [each["last_line"] for each in node["workers"]] == [f"rank {rank} begins" for rank in range(3)]
    assert all(each["silence"] < stretched(30) and each["memory"] > 1 << 20 for each in node["workers"])

    def has_computed() -> bool:
        workers = read_status()["nodes"][0]["workers"]
        return bool(workers[1]["cpu"] > workers[0]["cpu"])

    wait_until(has_computed, what="CPU time of rank 1, which others may take for a while")
    assert (node["pid"], node["max_restarts"], node["world_size"]) == (launcher.pid, 2, 3)
    os.kill(node["workers"][2]["pid"], signal.SIGSTOP)
    wait_until(lambda: read_status()["nodes"][0]["workers"][2]["state"] == "stopped", what="rank 2 stopped")
    table = status(str(launcher.pid)).stdout
    assert f"job {launcher.pid}: " in table
    assert "0 of 2 restarts used" in table
    assert "rank 0 begins" in table


def test_the_restart_count_and_the_new_workers_are_shown(launch: Launch, worker: Worker) -> None:
    """After a restart."""
    launcher = launch(
        "--nproc-per-node=2", "--max-restarts=3", worker("if attempt == 0: sys.exit(3)\n" + WAITING), merge=True
    )
    launcher.wait_lines("waits", count=2)
    (node,) = read_status()["nodes"]
    assert node["restart_count"] == 1
    assert [each["last_line"] for each in node["workers"]] == ["rank 0 waits", "rank 1 waits"]


def test_a_worker_that_has_ended_keeps_its_exit_code(launch: Launch, worker: Worker) -> None:
    """While the others run on."""
    launcher = launch("--nproc-per-node=2", worker("if rank == 0: sys.exit(0)\n" + WAITING), merge=True)
    launcher.wait_line("waits")
    wait_until(lambda: read_status()["nodes"][0]["workers"][0]["exit_code"] == 0, what="rank 0 ended")
    assert "done" in status().stdout


@pytest.mark.parametrize("flags", [["--redirects=3"], ["--tee=3"]], ids=" ".join)
def test_output_that_goes_to_files_is_seen(flags: list[str], launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The last line comes from the file where the worker writes it itself."""
    launch(*flags, f"--log-dir={tmp_path / 'logs'}", worker(WAITING))
    wait_until(lambda: read_status()["nodes"][0]["workers"][0]["last_line"] == "rank 0 waits", what="its last line")
    (found,) = read_status()["nodes"][0]["workers"]
    assert found["silence"] is not None


def test_stdout_that_goes_past_the_launcher_is_no_silence(launch: Launch, worker: Worker) -> None:
    """The silence is unknown then, and the table says why."""
    launcher = launch("--no-capture", worker(WAITING))
    launcher.wait_line("waits")
    (found,) = read_status()["nodes"][0]["workers"]
    assert found["silence"] is None
    assert "does not pass through elastic-run" in status().stdout


def test_several_jobs_have_to_be_named_and_an_unknown_one_is_refused(
    launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """One line, exit 2, with what may be typed, which bash completes; without a name, and with `ps`, all are listed."""
    assert (status().process.returncode, status("x").process.returncode) == (2, 2)
    none = run("ps")
    assert (none.process.returncode, none.stdout) == (0, "no job of yours runs on this machine\n")
    launchers = [launch(worker(WAITING)) for _ in range(2)]
    for launcher in launchers:
        launcher.wait_line("waits")
        read_status(str(launcher.pid))
    refused = status("--json")
    assert refused.process.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert all(f"{launcher.pid} (" in refused.stderr for launcher in launchers)
    pids = sorted(str(launcher.pid) for launcher in launchers)
    for listed in (status(), run("ps")):
        heading, *rows = listed.stdout.splitlines()
        assert (listed.process.returncode, heading.split()) == (0, ["RUN", "PID", "STATE", "STARTED", "PROGRAM"])
        assert sorted(row.split()[:3] for row in rows) == [[pid, pid, "running"] for pid in pids]
    script = run("--print-completion", "bash").stdout
    assert complete_in_bash(script, "status ", tmp_path) == complete_in_bash(script, "drain host ", tmp_path) == pids
    (tmp_path / "logs").mkdir()
    assert {"logs", *pids} <= {*complete_in_bash(script, "logs ", tmp_path)}
    assert "'x' is not a job of yours" in status("x").stderr


def test_a_stopped_launcher_is_told_as_such(launch: Launch, worker: Worker) -> None:
    """The command ends, in one line, when nobody answers."""
    launcher = launch(worker(WAITING))
    read_status()
    launcher.send(signal.SIGSTOP)
    refused = status()
    assert refused.process.returncode == 2
    assert f"the agent with pid {launcher.pid} does not answer" in refused.stderr
    launcher.send(signal.SIGCONT)


def test_64_ranks_are_shown_quickly(launch: Launch, worker: Worker) -> None:
    """The bar is 0.3 s on a quiet machine; the bound is for a busy one."""
    launcher = launch("--nproc-per-node=64", worker(WAITING), merge=True)
    launcher.wait_lines("waits", count=64)
    read_status()
    begin = time.monotonic()
    table = status().stdout
    took = time.monotonic() - begin
    assert "rank 63 waits" in table
    assert took < stretched(1.0), took


def test_a_job_that_nobody_asks_is_not_woken(launch: Launch, worker: Worker) -> None:
    """With the socket open the launcher sleeps; a look at the kernel's counter of its wake-ups tells."""
    launcher = launch(worker(WAITING))
    read_status()

    def count_wakes() -> int:
        lines = Path(f"/proc/{launcher.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    # Each window is as long as a poll of the slowest kind would take; one quiet window is the promise.
    def has_rested() -> bool:
        before, end = count_wakes(), time.monotonic() + 1.5
        wait_until(lambda: time.monotonic() > end)
        return count_wakes() == before

    wait_until(has_rested, what="a window without a wake-up")


@pytest.mark.parametrize("token", [None, "secret of this job"], ids=["no token", "token"])
def test_the_workers_of_all_nodes_are_shown_on_each(
    token: str | None, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Each node has a directory of sockets of its own, as another machine has, so the store is the only way."""
    place = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=2")
    directories = [tmp_path / "0", tmp_path / "1"]
    nodes, path = [], worker(WAITING)
    for rank, directory in enumerate(directories):
        directory.mkdir()
        env = {ENV_CONTROL_DIR: str(directory), ENV_RDZV_TOKEN: token}
        words = ("--nproc-per-node=2", f"--node-rank={rank}", *place, path)
        nodes.append(launch(*words, env=env, merge=True))
    for node in nodes:
        node.wait_lines("waits", count=2)
    for directory in directories:
        document = read_status("j", env={ENV_CONTROL_DIR: str(directory)})
        assert [node["node_rank"] for node in document["nodes"]] == [0, 1]
        shown = [each["last_line"] for node in document["nodes"] for each in node["workers"]]
        assert shown == [f"rank {rank} waits" for rank in range(4)]
        assert run("stacks", env={ENV_CONTROL_DIR: str(directory)}).stdout.startswith("ranks 0-3 are in <module> (")
    # A node that does not answer is missing, and is said to be. It is cut off before it is given up.
    nodes[1].send(signal.SIGSTOP)
    with start("stacks", env={ENV_CONTROL_DIR: str(directories[0])}) as stacks:
        refused = status("j", env={ENV_CONTROL_DIR: str(directories[0])})
        stacks.wait_exit()
    nodes[1].send(signal.SIGCONT)
    assert stacks.stderr == "elastic-run: 1 of 2 nodes have not answered\n"
    assert "1 of 2 nodes have not answered" in refused.stderr
    assert "rank 0 waits" in refused.stdout


# --- top --------------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def own_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the control sockets of other tests' jobs out, which a killed launcher leaves."""
    monkeypatch.setenv(ENV_CONTROL_DIR, str(tmp_path))


def test_where_it_can_not_be_shown_one_line_says_why(tmp_path: Path) -> None:
    """No terminal; no rich, where the line names the extra; an interval that would only load the agent."""
    missing = tmp_path / "rich"
    missing.mkdir()
    (missing / "__init__.py").write_text("raise ImportError\n", encoding="utf-8")
    for words, env, error in (
        ((), {}, "standard output is not a terminal"),
        ((), {"PYTHONPATH": str(tmp_path)}, "pip install 'elastic-run[live]'"),
        (("--interval=0",), {}, "--interval: 0.0 must be 0.2 or more seconds"),
    ):
        with start("top", *words, env=env) as command:
            assert command.wait_exit() == 2
        assert error in command.stderr
        assert len(command.stderr.splitlines()) == 1


def test_the_table_is_drawn_until_the_job_ends(
    launch: Launch, worker: Worker, terminal: Terminal, tmp_path: Path
) -> None:
    """It has the workers' last lines as they change, and leaves the terminal as it was."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    body = f"say('first line')\nopen({str(gate)!r}).read()\nsay('second line')\nopen({str(gate)!r}).read()\n"
    job = launch(worker(body), merge=True)
    wait_until(lambda: find_sockets(os.environ)[0], what="the control socket")
    top = terminal.start("top", "--interval=0.2", env={"TERM": "xterm"})
    terminal.wait_output("first line")
    gate.write_text("", encoding="utf-8")
    terminal.wait_output("second line")
    gate.write_text("", encoding="utf-8")
    assert job.wait_exit() == 0
    terminal.wait_output(f"job {job.pid} has ended")
    assert terminal.wait_exit() == 0
    assert top.returncode == 0
    assert bytes(terminal.output).count(b"\x1b[?1049l") == 1


def test_ctrl_c_ends_it_and_not_the_job(launch: Launch, worker: Worker, terminal: Terminal) -> None:
    """Exit code 0: a view was looked at long enough."""
    job = launch(worker(WAITING), merge=True)
    wait_until(lambda: find_sockets(os.environ)[0], what="the control socket")
    terminal.start("top", env={"TERM": "xterm"})
    terminal.wait_output("rank 0 waits")
    terminal.type("\x03")
    assert terminal.wait_exit() == 0
    assert job.process.poll() is None


# --- drain ------------------------------------------------------------------------------------------------------------
_WAITS = "say('rank', rank, 'of', os.environ['WORLD_SIZE'], 'restarts', attempt)\nsignal.pause()\n"


def drain(node: str, environment: dict[str, str]) -> Launched:
    """Run the command to its end."""
    with start("drain", node, env=environment) as command:
        command.wait_exit()
    return command


def has_socket(environment: dict[str, str]) -> bool:
    """Whether an agent has opened its control socket there."""
    return bool(find_sockets(environment)[0])


def shows_all_nodes(environment: dict[str, str]) -> bool:
    """Whether all nodes answer: a node that has just come takes no part in a drain that was asked for before."""
    with start("status", "--json", env=environment) as command:
        command.wait_exit()
    return command.stdout.count('"host"') == 3


@pytest.fixture
def nodes(launch: Launch, worker: Worker, tmp_path: Path) -> list[tuple[Launched, dict[str, str]]]:
    """Start a job of three nodes, each with a directory of sockets of its own, as other machines have."""
    port = free_port()
    place = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=j", "--nnodes=1:3")
    words = (*place, "--rdzv-conf=last_call_timeout=600", "--max-restarts=0", worker(_WAITS))
    made = []
    for rank in range(3):
        environment = {ENV_CONTROL_DIR: str(tmp_path / str(rank))}
        (tmp_path / str(rank)).mkdir()
        made.append((launch(f"--node-rank={rank}", *words, env=environment), environment))
        wait_coordinated(port)  # by the first: the job ends with the node that serves it
    for node, environment in made:
        node.wait_line("of 3 restarts 0")
        wait_until(partial(shows_all_nodes, environment), what="the answers of all nodes")
    return made


def test_a_node_that_is_drained_leaves_and_the_others_go_on(nodes: list[tuple[Launched, dict[str, str]]]) -> None:
    """Asked from another node, and on the node itself; no restart of the budget is used, and the cause is told."""
    (first, environment), (second, _), (third, own) = nodes
    asked = drain("1", environment)
    assert (asked.process.returncode, "(node rank 1) leaves job j" in asked.stderr) == (0, True), asked.stderr
    assert second.wait_exit() == 143
    assert "elastic-run drain" in second.stderr
    for node in (first, third):
        node.wait_line("of 2 restarts 0")
    asked = drain("1", own)  # node ranks have no gap, so it has this one now
    assert asked.process.returncode == 0, asked.stderr
    assert third.wait_exit() == 143
    first.wait_line("rank 0 of 1 restarts 0")
    assert first.process.poll() is None


def test_a_node_that_is_not_there_is_refused(nodes: list[tuple[Launched, dict[str, str]]]) -> None:
    """One line names the nodes; nobody leaves."""
    refused = drain("node7", nodes[0][1])
    assert refused.process.returncode == 2
    assert "job j has no node 'node7'; it has " in refused.stderr
    assert refused.stderr.count("(node rank ") == 3
    (path,) = find_sockets(nodes[0][1])[0]
    (answer,) = ask_all([path], "drain", {"node": "a\nb"})
    assert answer.error == "this is not the name of a node"
    assert [node.process.poll() for node, _ in nodes] == [None] * 3


def test_a_spare_hides_no_node_that_does_not_answer(
    nodes: list[tuple[Launched, dict[str, str]]], launch: Launch, tmp_path: Path
) -> None:
    """Of a stopped node `drain` says that it may be the named one, and `status` that it is missing."""
    words = nodes[0][0].process.args
    assert isinstance(words, list)
    spare = launch(*(word for word in words[3:] if word != "--node-rank=0"), env={ENV_CONTROL_DIR: str(tmp_path)})
    spare.wait_line("as a spare")
    (_, environment), _, (stopped, _) = nodes
    stopped.send(signal.SIGSTOP)
    asked = drain("2", environment)
    assert (asked.process.returncode, "1 node of 3 did not answer, and may be '2'" in asked.stderr) == (1, True), asked
    with start("status", env=environment) as shown:
        assert shown.wait_exit() == 0
    assert "1 of 3 nodes have not answered" in shown.stderr
    stopped.send(signal.SIGCONT)


def test_a_job_of_one_node_is_not_drained(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The line names the command that ends it."""
    environment = {ENV_CONTROL_DIR: str(tmp_path)}
    job = launch(worker(_WAITS), env=environment)
    wait_until(partial(has_socket, environment), what="the control socket")
    refused = drain("0", environment)
    assert refused.process.returncode == 2
    assert f"job {job.pid} has one node: `elastic-run stop {job.pid}` ends it" in refused.stderr
