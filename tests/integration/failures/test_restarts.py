"""What follows a failure: restarts and their rules, nodes that are left out."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import contract
from tests.support.launch import launch as run
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.sessions import free_port
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker


def test_restart_until_success(launch: Launch, worker: Worker) -> None:
    """The whole group is restarted, with the count in its environment, until it succeeds."""
    path = worker("say('rank', rank, 'attempt', attempt); sys.exit(rank == 1 and attempt < 2)")
    job = launch("--standalone", "--nproc-per-node=2", "--max-restarts=3", path)
    assert job.wait_exit() == 0
    seen = sorted(job.stdout.splitlines())
    assert [line for line in seen if "rank 1" in line] == [f"rank 1 attempt {attempt}" for attempt in range(3)]


def test_same_error_twice_ends_the_job(launch: Launch, worker: Worker) -> None:
    """An ImportError does not burn the whole restart budget."""
    job = launch("--standalone", "--max-restarts=5", worker("say('attempt', attempt); import no_such_module_at_all"))
    assert job.wait_exit() == 202
    assert job.stdout.count("attempt") == 2
    assert "no_such_module_at_all" in job.stderr


def test_min_uptime_ends_the_job_too(launch: Launch, worker: Worker) -> None:
    """With --min-uptime any failure that comes twice before it ends the job."""
    job = launch("--standalone", "--max-restarts=5", "--min-uptime=60", worker("say('attempt'); sys.exit(9)"))
    assert job.wait_exit() == 202
    assert job.stdout.count("attempt") == 2


def test_no_restart_exit_codes(launch: Launch, worker: Worker) -> None:
    """A listed exit code ends the job at once, with that code."""
    job = launch(
        "--standalone", "--max-restarts=5", "--no-restart-exit-codes=3,64-78", worker("say('attempt'); sys.exit(70)")
    )
    assert job.wait_exit() == 70
    assert job.stdout.count("attempt") == 1


def test_restart_window(launch: Launch, worker: Worker) -> None:
    """--restart-window allows so many restarts per period, and no more."""
    path = worker("say('attempt'); sys.exit(9)")
    job = launch("--standalone", "--restart-window=2/1h", "--max-backoff=0", path)
    assert job.wait_exit() == 9
    assert job.stdout.count("attempt") == 3


def test_every_round_has_its_own_store(launch: Launch, worker: Worker) -> None:
    """A restart gets a new port; --master-port keeps it."""
    path = worker("say('port', os.environ['MASTER_PORT']); sys.exit(attempt == 0)")
    job = launch("--standalone", "--max-restarts=1", path)
    assert job.wait_exit() == 0
    first, second = re.findall(r"port (\d+)", job.stdout)
    assert first != second
    with_port = launch(f"--master-port={first}", "--max-restarts=1", path)
    assert with_port.wait_exit() == 0
    assert re.findall(r"port (\d+)", with_port.stdout) == [first, first]


# --- --failure-rules --------------------------------------------------------------------------------------------------
def write_rule(directory: Path, match: str, decision: str) -> str:
    """Write a file with one rule, and return the flag for it."""
    path = directory / "rules.toml"
    path.write_text(f'[[rule]]\nmatch = "{match}"\nhelp = "Ask Anna."\ndecision = "{decision}"\n', encoding="utf-8")
    return f"--failure-rules={path}"


@pytest.mark.parametrize(
    ("decision", "flags", "attempts"),
    [
        ("stop", ("--max-restarts=3",), 1),
        ("restart", ("--max-restarts=2", "--no-restart-exit-codes=1"), 3),
    ],
)
def test_a_rule_decides_whether_a_job_restarts(
    decision: str, flags: tuple[str, ...], attempts: int, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """`stop` leaves the budget unused, `restart` uses it up against --no-restart-exit-codes."""
    path = worker('print("attempt", flush=True)\nraise OSError("quota of bucket-7")')
    job = launch(write_rule(tmp_path, "bucket-7", decision), *flags, "--max-backoff=0", path)
    assert job.wait_exit() == 1
    assert job.stdout.count("attempt") == attempts
    report = " ".join(job.stderr.split())
    assert "hint Ask Anna." in report
    assert ("the rule 'bucket-7' of --failure-rules decides stop" in report) == (decision == "stop")


def test_a_rule_excludes_the_node(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The node whose worker said what the rule knows leaves; the others go on without a restart."""
    agents, _ = start(launch, worker(LEMON), write_rule(tmp_path, "fallen off the bus", "exclude"), code=5)
    assert [agent.wait_exit() for agent in agents] == [0, contract.EXIT_EXCLUDED, 0]
    assert "is excluded, the rule 'fallen off the bus' of --failure-rules decides exclude" in agents[0].stderr
    assert "restart 0" in agents[0].stderr


@pytest.mark.long
def test_a_rule_that_backtracks_without_end(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The report comes without a rule, and one line names the one whose search took too long."""
    rules = tmp_path / "rules.toml"
    rules.write_text("".join(f"[[rule]]\nmatch = '{match}'\nhelp = 'x'\n" for match in ("other", "(a+)+$")))
    job = launch(f"--failure-rules={rules}", worker("raise ValueError('a' * 40 + 'b')"))
    assert job.wait_exit() == 1
    assert f"--failure-rules: {rules}, rule 2: the search took more than 5 s, so no rule is used" in job.stderr
    assert "cause    rank 0" in job.stderr


def test_a_wrong_decision_is_one_line(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A decision that is unknown is refused before anything starts, with file and number."""
    job = launch(write_rule(tmp_path, "x", "retry"), worker("raise SystemExit(9)"))
    assert job.wait_exit() == contract.EXIT_USAGE
    assert job.stderr.count("\n") == 1
    assert "rules.toml, rule 1: the rule's decision is 'retry', which is none of restart, stop, exclude" in job.stderr


# --- --exclude-after --------------------------------------------------------------------------------------------------
#: The worker of the node that was given LEMON=1 fails as long as it is in the job; the others wait for the end.
LEMON = """
    world, code = int(os.environ["WORLD_SIZE"]), int(os.environ["CODE"])
    say("world", world)
    if os.environ.get("LEMON") == "1":
        print("GPU 2 has fallen off the bus", file=sys.stderr)
        sys.exit(code)
    if world == 3:
        signal.pause()
"""


def start(
    launch: Launch, path: Path, *flags: str | Path, code: int, machines: tuple[str, ...] = ()
) -> tuple[list[Launched], int]:
    """Start a job of two or three nodes, the second one of which is a lemon."""
    port = free_port()
    words = (*place(port, "last_call_timeout=600"), "--nnodes=2:3", "--max-backoff=0", *flags, path)
    agents = []
    for number in range(3):
        env = {"LEMON": str(int(number == 1)), "CODE": str(code)}
        if machines:
            env |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": machines[number]}
        agents.append(launch(*words, env=env))
        if number == 0:
            wait_coordinated(port)
    return agents, port


def test_an_exit_code_excludes_its_node(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """The node leaves with 211 and its reason, also in failure.json; the others go on, without a restart."""
    logs = tmp_path / "logs"
    agents, _ = start(launch, worker(LEMON), "--exclude-exit-codes=77", f"--log-dir={logs}", code=77)
    assert [agent.wait_exit() for agent in agents] == [0, contract.EXIT_EXCLUDED, 0]
    reason = "exit code 77 is listed in --exclude-exit-codes"
    assert reason in " ".join(agents[1].stderr.split())
    for agent in (agents[0], agents[2]):
        assert agent.stdout.splitlines()[-1] == "world 2"
        assert "restart 0" in agent.stderr
        assert f"is excluded, {reason}" in agent.stderr
    found = [json.loads(path.read_text()) for path in logs.rglob(contract.FAILURE_FILE)]
    assert [(one["verdict"], one["exit_code"]) for one in found] == [("excluded", contract.EXIT_EXCLUDED)]


def test_no_fault_hits_twice(launch: Launch, worker: Worker) -> None:
    """With --exclude-after=2/1h the second failure of a node is its last; the line for its machine is printed."""
    flags = ("--exclude-after=2/1h", "--max-restarts=5")
    agents, port = start(launch, worker(LEMON), *flags, code=3, machines=("gpu1", "gpu2", "gpu3"))
    assert agents[1].wait_exit() == contract.EXIT_EXCLUDED
    assert "the cause of 2 failures within 3600 s" in " ".join(agents[1].stderr.split())
    assert "kubectl cordon gpu2" in agents[1].stderr
    assert agents[1].stdout == "world 3\n" * 2
    assert [agents[0].wait_exit(), agents[2].wait_exit()] == [0, 0]
    assert "is excluded, the cause of 2 failures within 3600 s" in agents[0].stderr
    assert port


def test_a_machine_is_told_that_it_is_excluded(launch: Launch, worker: Worker) -> None:
    """Another launcher on an excluded machine is sent away while the job goes on."""
    path = worker(
        """
        if os.environ["LEMON"] == "1" and os.environ["WORLD_SIZE"] == "3":
            sys.exit(77)
        say("world", os.environ["WORLD_SIZE"])
        signal.pause()
        """
    )
    agents, port = start(launch, path, "--exclude-exit-codes=77", code=77, machines=("gpu1", "gpu2", "gpu3"))
    assert agents[1].wait_exit() == contract.EXIT_EXCLUDED
    agents[0].wait_line("^world 2$")
    words = (*place(port, "last_call_timeout=600"), "--nnodes=2:3", "--max-backoff=0", "--exclude-exit-codes=77", path)
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "gpu2", "LEMON": "1", "CODE": "77"}
    again = launch(*words, env=env)
    assert again.wait_exit() == contract.EXIT_EXCLUDED
    assert again.stdout == ""


@pytest.mark.parametrize("flag", ["--exclude-exit-codes=77", "--exclude-after=1/1h"])
def test_the_host_of_the_only_store_stays(launch: Launch, worker: Worker, flag: str) -> None:
    """A job is not ended to exclude the node that serves its store: a line says that it is kept."""
    path = worker("sys.exit(77 if os.environ['LEMON'] == '1' and attempt == 0 else 0)")
    port = free_port()
    words = (*place(port, "last_call_timeout=600"), "--nnodes=1:2", "--max-restarts=1", flag, path)
    host = launch(*words, env={"LEMON": "1"})
    wait_coordinated(port)
    other = launch(*words, env={"LEMON": "0"})
    assert [host.wait_exit(), other.wait_exit()] == [0, 0]
    assert "it serves the job's only store" in other.stderr


def test_a_coordinator_with_a_lease_is_excluded_as_any_node(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Another node takes the lease, and the job goes on without the excluded one."""
    path = worker(
        """
        if os.environ["WORLD_SIZE"] == "2":
            sys.exit(77) if os.environ["LEMON"] == "1" else signal.pause()
        say("alone")
        """
    )
    conf = "--rdzv-conf=store_type=file,last_call_timeout=600"
    words = ("--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path}/", conf, "--nnodes=1:2", "--exclude-exit-codes=77")
    first = launch(*words, path, env={"LEMON": "1"})
    wait_until(lambda: any(tmp_path.rglob("last_round")), what="the coordinator's address")
    other = launch(*words, path, env={"LEMON": "0"})
    assert [first.wait_exit(), other.wait_exit()] == [contract.EXIT_EXCLUDED, 0]
    assert other.stdout == "alone\n"


def list_left_out(pid: int) -> list[dict[str, Any]]:
    """Return what `elastic-run status` says of the nodes that a job goes on without; [] until it answers."""
    with run("status", "--json", str(pid)) as command:
        code = command.wait_exit()
    found: list[dict[str, Any]] = [] if code else json.loads(command.stdout)["left_out"]
    return found


def test_status_lists_the_nodes_that_are_left_out(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Each node of the job answers with the excluded node, its reason and when it may come back."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    body = f"{LEMON}\n    open({str(gate)!r}).close()\n"
    flags = ("--exclude-exit-codes=77", "--exclude-after=9/1h")
    agents, _ = start(launch, worker(body), *flags, code=77)
    assert agents[1].wait_exit() == contract.EXIT_EXCLUDED
    for agent in (agents[0], agents[2]):
        agent.wait_line("world 2")
        (found,) = wait_until(partial(list_left_out, agent.pid), what="a node that is left out")
        assert (found["kind"], found["host"]) == ("excluded", os.uname().nodename)
        assert "exit code 77 is listed in --exclude-exit-codes" in found["reason"]
        assert 3000 < found["expires"] < 3600
    with gate.open("w"):  # until each of the two has come to it
        assert [agents[0].wait_exit(), agents[2].wait_exit()] == [0, 0]
