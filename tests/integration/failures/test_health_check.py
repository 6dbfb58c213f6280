"""--health-check: before each round of a node; a node that fails it leaves, and holds nobody up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.programs import shortened
from tests.support.sessions import free_port
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launch import Launch, Launched, Worker

    Check = Callable[[str], str]


UNHEALTHY = contract.EXIT_UNHEALTHY


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Write a health check in shell, and return the command that runs it."""
    count = 0

    def write(body: str) -> str:
        nonlocal count
        count += 1
        path = tmp_path / f"check{count}.sh"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_healthy_node_checks_before_each_round(launch: Launch, worker: Worker, check: Check, tmp_path: Path) -> None:
    """The check runs before the first round and before each restart."""
    notes = tmp_path / "notes"
    path = worker("say('attempt', attempt)\nsys.exit(attempt < 2)")
    command = check(f"echo checked >> {notes}")
    job = launch("--max-restarts=2", "--max-backoff=0", f"--health-check={command}", path)
    assert job.wait_exit() == 0
    assert job.stdout.split("\n")[:-1] == ["attempt 0", "attempt 1", "attempt 2"]
    assert notes.read_text().count("checked") == 3


def test_a_failing_check_ends_the_launcher_with_its_reason(
    launch: Launch, worker: Worker, check: Check, tmp_path: Path
) -> None:
    """No worker starts, the last lines stand in the report and in failure.json, and the exit code is 210."""
    path = worker("say('worker')")
    command = check("for i in 1 2 3 4; do echo line $i >&2; done; exit 9")
    job = launch(f"--health-check={command} 'an argument'", f"--log-dir={tmp_path / 'logs'}", path)
    assert job.wait_exit() == UNHEALTHY
    assert job.stdout == ""
    reason = "the health check ended with exit code 9: line 2 | line 3 | line 4"
    assert reason in " ".join(job.stderr.split())
    (document,) = tuple((tmp_path / "logs").rglob(contract.FAILURE_FILE))
    found = json.loads(document.read_text())
    assert (found["verdict"], found["exit_code"]) == ("unhealthy", UNHEALTHY)
    assert reason in json.dumps(found)


HANGING = {
    "sleeps": "sleep 1000",
    "ignores TERM": "trap '' TERM INT HUP; while :; do sleep 1000; done",
    "forks": "sleep 1000 & setsid sleep 1000 & (setsid env -i sleep 1000 &) ; sleep 1000",
    "pipe": "sleep 1000 | cat",
    "floods": "yes",
}


@pytest.mark.parametrize("body", HANGING.values(), ids=HANGING)
def test_a_check_that_never_ends_is_killed_with_all_that_it_started(
    launch: Launch, worker: Worker, check: Check, tmp_path: Path, body: str
) -> None:
    """At the timeout it is over, whatever it does, and nothing of it is left."""
    pids = tmp_path / "pid"
    command = check(f"echo $$ > {pids}\n{body}")
    limit = f"{round(stretched(0.5), 1):g}"  # on a busy machine it takes a moment until the pid is written
    job = launch(f"--health-check={command}", f"--health-check-timeout={limit}", worker("say('worker')"))
    begun = time.monotonic()
    assert job.wait_exit() == UNHEALTHY
    assert time.monotonic() - begun < stretched(5)
    assert f"the health check did not end within {limit} s" in " ".join(job.stderr.split())
    assert not is_alive(int(pids.read_text()))


@pytest.mark.long
def test_a_check_may_print_a_gigabyte(launch: Launch, worker: Worker, check: Check) -> None:
    """The launcher reads all of it and keeps the end."""
    command = check("head -c 1000000000 /dev/zero; echo; echo the last line; exit 1")
    job = launch(f"--health-check={command}", worker("say('worker')"))
    assert job.wait_exit(deadline=60) == UNHEALTHY
    assert "the last line" in job.stderr


def test_a_background_process_does_not_hold_the_check(launch: Launch, worker: Worker, check: Check) -> None:
    """The check is over when its first process is, though another one holds its output; that one is killed."""
    command = check("sleep 1000 & echo $!\nexit 0")
    job = launch(f"--health-check={command}", worker("say('worker')"))
    assert job.wait_exit() == 0
    assert job.stdout == "worker\n"


def test_a_killed_launcher_leaves_no_check(launch: Launch, worker: Worker, check: Check, tmp_path: Path) -> None:
    """After kill -9 in the middle of a check nothing of the check lives."""
    pids = tmp_path / "pids"
    command = check(f"(setsid sleep 1000 & echo $! >> {pids}); echo $$ >> {pids}; echo >> {pids}.done; sleep 1000")
    job = launch(f"--health-check={command}", worker("say('worker')"))
    done = pids.with_name("pids.done")
    wait_until(done.exists, what="the check runs")
    job.send(signal.SIGKILL)
    job.wait_exit()
    wait_until(lambda: not any(map(is_alive, map(int, pids.read_text().split()))), what="the check is gone")


def test_a_signal_ends_the_launcher_in_the_middle_of_a_check(
    launch: Launch, worker: Worker, check: Check, tmp_path: Path
) -> None:
    """SIGTERM stops the launcher at once; the check is killed."""
    pids = tmp_path / "pid"
    command = check(f"trap '' TERM; echo $$ > {pids}.new; mv {pids}.new {pids}; sleep 1000")
    job = launch(f"--health-check={command}", worker("say('worker')"))
    wait_until(pids.exists, what="the check runs")
    job.send(signal.SIGTERM)
    assert job.wait_exit(deadline=5) == 128 + signal.SIGTERM
    assert not is_alive(int(pids.read_text()))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("nosuchprogram --now", "program 'nosuchprogram' is not on PATH"),
        ("/etc/passwd", "program '/etc/passwd' is not executable (chmod +x)"),
        ("'", "is not a command: no closing quotation"),
        (" ", "names no program"),
    ],
)
def test_a_check_that_cannot_be_started_is_refused(launch: Launch, worker: Worker, command: str, reason: str) -> None:
    """One line and exit code 2, before anything is started."""
    job = launch(f"--health-check={command}", worker("say('worker')"))
    assert job.wait_exit() == contract.EXIT_USAGE
    assert job.stderr.count("\n") == 1
    assert reason in job.stderr
    assert job.stdout == ""


def test_an_unhealthy_node_does_not_hold_the_others_up(launch: Launch, worker: Worker, check: Check) -> None:
    """A job of 1:2 goes on with the healthy node, which names the other one; no restart is used."""
    path = worker("say('restarts', attempt, os.environ['WORLD_SIZE'])\nsys.exit(0)")
    port = free_port()
    conf = "last_call_timeout=600,join_timeout=600"
    words = ("--nnodes=2:3", "--node-rank")
    often = shortened({"elastic_run.report.waiting.INTERVAL": 2.0})
    first = launch(*place(port, conf), *words, "1", path, program=often)
    wait_coordinated(port)
    sick = launch(*place(port, conf), *words, "2", f"--health-check={check('echo GPU 3 is lost; exit 1')}", path)
    assert sick.wait_exit() == UNHEALTHY
    first.wait_line(r"unhealthy: the health check ended with exit code 1: GPU 3 is lost", deadline=30)
    others = [launch(*place(port, conf), "--nnodes=2:3", path) for _ in range(2)]
    assert [agent.wait_exit() for agent in (first, *others)] == [0, 0, 0]
    assert first.stdout == "restarts 0 3\n"
    for agent in (first, *others):
        told = r"first round: 3 nodes, 3 workers; this is node \d \(without \S+ \(unhealthy: .*GPU 3 is lost\)\)"
        assert re.search(told, agent.stderr), agent.stderr


def test_an_unhealthy_first_node_asks_no_other_to_join(launch: Launch, worker: Worker, check: Check) -> None:
    """Without an endpoint, its job ends with it: a command to join would lead nowhere."""
    job = launch("--nnodes=1:2", f"--health-check={check('exit 1')}", worker("say('worker')"))
    assert job.wait_exit() == UNHEALTHY
    assert "join with" not in job.stderr
    assert job.stdout == ""


@pytest.mark.long
def test_an_unhealthy_node_waits_for_a_store_that_comes_late(launch: Launch, worker: Worker, check: Check) -> None:
    """A node that is found unhealthy before the others have started tells them why it does not come."""
    path, port = worker("say('world', os.environ['WORLD_SIZE'])"), free_port()
    conf = "last_call_timeout=600,join_timeout=600"
    sick_conf = (*place(port, f"{conf},is_host=false"), "--nnodes=2:3")
    sick = launch(*sick_conf, f"--health-check={check('echo GPU 3 is lost; exit 1')}", path)
    sick.wait_line("waiting: the store at .* has been out of reach")
    with pytest.raises(subprocess.TimeoutExpired):
        sick.process.wait(3)
    others = [launch(*place(port, conf), "--nnodes=2:3", path)]
    assert sick.wait_exit(deadline=10) == UNHEALTHY
    others[0].wait_line(r"unhealthy: the health check ended with exit code 1: GPU 3 is lost", deadline=30)
    others += [launch(*place(port, conf), "--nnodes=2:3", path) for _ in range(2)]
    assert [agent.wait_exit() for agent in others] == [0, 0, 0]


@pytest.mark.parametrize("successors", [0, 1])
def test_an_unhealthy_node_that_is_to_serve_the_store_serves_it(
    launch: Launch, worker: Worker, check: Check, successors: int
) -> None:
    """The others meet there and begin without it; else they would look for its store, and not learn why."""
    path, port = worker("say('world', os.environ['WORLD_SIZE'])"), free_port()
    more = "".join(f",localhost:{free_port()}" for _ in range(successors))
    flags = (*place(port, "last_call_timeout=600"), f"--rdzv-endpoint=localhost:{port}{more}", "--nnodes=2:3")
    sick = launch(*flags, f"--health-check={check('echo GPU 3 is lost; exit 1')}", path)
    sick.wait_line("serves the job's store for 30 s more, so that new nodes learn why it has left the job")
    others = [launch(*flags, path)]
    sick.wait_line("stays without workers until the other nodes have ended")
    others[0].wait_line(r"waiting: 1/3 nodes .*unhealthy: the health check ended with exit code 1: GPU 3 is lost")
    others += [launch(*flags, path) for _ in range(2)]
    assert [agent.wait_exit() for agent in others] == [0, 0, 0]
    assert [agent.stdout for agent in others] == ["world 3\n"] * 3
    assert sick.wait_exit() == UNHEALTHY
    assert sick.stdout == ""
    assert "was a spare" not in sick.stderr


FAILS_ONCE = """
    marker, world = sys.argv[1], os.environ["WORLD_SIZE"]
    say("world", world)
    if rank == 0:
        open(marker + ".there", "w").close()
    if world == "2" and rank == 1:
        while not os.path.exists(marker + ".there"):
            time.sleep(0.01)
        open(marker, "w").close()
        sys.exit(77)
    if world == "2":
        time.sleep(1000)
"""


def test_a_check_that_fails_after_a_failure_costs_no_restart(
    launch: Launch, worker: Worker, check: Check, tmp_path: Path
) -> None:
    """A node whose worker fails and whose check fails then leaves; the others go on with --max-restarts=0."""
    broken, path = tmp_path / "broken", worker(FAILS_ONCE)
    port = free_port()
    flags = (*place(port, "last_call_timeout=600"), "--nnodes=1:2", "--max-restarts=0")
    well = launch(*flags, "--node-rank=0", path, broken)
    wait_coordinated(port)
    sick = launch(*flags, "--node-rank=1", f"--health-check={check(f'! test -e {broken}')}", path, broken)
    assert sick.wait_exit() == UNHEALTHY
    assert well.wait_exit() == 0
    assert well.stdout.split("\n")[:-1] == ["world 2", "world 1"]
    assert "restart 0" in well.stderr
    assert "unhealthy: the health check ended with exit code 1" in well.stderr


HOST_FAILS = """
    marker, sick, world = sys.argv[1], os.environ.get("SICK"), os.environ["WORLD_SIZE"]
    say("world", world)
    if world == "3" and sick:
        open(marker, "w").close()
        sys.exit(77)
    if world == "3":
        time.sleep(1000)
    while not os.path.exists(marker + ".end"):
        time.sleep(0.01)
"""


def start_sick_host(launch: Launch, worker: Worker, check: Check, broken: Path) -> list[Launched]:
    """Start three nodes, the first of which serves the only store, and fails its check after a failure."""
    path, port = worker(HOST_FAILS), free_port()
    command = check(f'test -z "$SICK" || ! test -e {broken}')
    flags = (*place(port, "last_call_timeout=600"), "--nnodes=1:3", "--max-restarts=0", f"--health-check={command}")
    host = launch(*flags, "--node-rank=0", path, broken, env={"SICK": "1"})
    wait_coordinated(port)
    others = [launch(*flags, path, broken) for _ in range(2)]
    for agent in others:
        agent.wait_line("^world 2$", deadline=30)
    return [host, *others]


def test_an_unhealthy_host_of_the_store_does_not_end_the_job(
    launch: Launch, worker: Worker, check: Check, tmp_path: Path
) -> None:
    """The node that serves the job's only store stays as long as the others run, without workers, and ends with 210."""
    broken = tmp_path / "broken"
    host, *others = start_sick_host(launch, worker, check, broken)
    host.wait_line("serves the job's store, so it stays without workers until the other nodes have ended")
    assert host.process.poll() is None
    broken.with_name("broken.end").touch()
    assert [agent.wait_exit() for agent in others] == [0, 0]
    assert host.wait_exit() == UNHEALTHY
    assert host.stdout == "world 3\n"


def test_a_check_may_pass_on_the_second_node_only(launch: Launch, worker: Worker, check: Check) -> None:
    """Of three nodes two are unhealthy: the second one to start is the job, and names the others."""
    command = check('test "$SICK" = 0 || { echo sick; exit 4; }')
    path = worker("say('world', os.environ['WORLD_SIZE'])")
    port = free_port()
    flags = (*place(port, "last_call_timeout=3"), "--nnodes=1:3", f"--health-check={command}", path)
    agents = [launch(*flags, env={"SICK": "1"})]
    wait_coordinated(port)
    agents.append(launch(*flags, env={"SICK": "0"}))
    agents[0].wait_line("it stays without workers until the other nodes have ended")  # the second node is there
    agents.append(launch(*flags, env={"SICK": "1"}))
    assert [agent.wait_exit() for agent in agents] == [UNHEALTHY, 0, UNHEALTHY]
    assert [agent.stdout for agent in agents] == ["", "world 1\n", ""]


# --- the programs of examples/health, on a recorded kernel log and nvidia-smi's answers -------------------------------
EXAMPLES = Path(__file__).parents[3] / "examples" / "health"
#: As dmesg shows it: an error of a program, an old fatal one, and a fresh fatal one.
LOG = """\
[    0.000000] Linux version 6.8.0
[  100.250000] NVRM: Xid (PCI:0000:5e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 9000.125000] NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=python, Ch 00000008, intr 00000000. MMU Fault
[ 9100.500000] NVRM: Xid (PCI:0000:86:00): 48, pid=4242, name=python, An uncorrectable double bit error (DBE)
[ 9160.500000] eth0: link is up
"""


def run_check(name: str, *words: str | Path, path: str = "") -> tuple[int, str]:
    """Run a check; return its exit code and what it wrote."""
    env = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *words], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_a_fatal_xid_of_the_last_hour_is_found(tmp_path: Path) -> None:
    """Only the fresh and fatal one counts, with its code, its GPU and its age."""
    log = tmp_path / "dmesg"
    log.write_text(LOG)
    assert run_check("xid.py", log) == (1, "Xid 48 of GPU PCI:0000:86:00, 60 s ago\n")
    log.write_text("".join(line for line in LOG.splitlines(keepends=True) if ": 48," not in line))
    assert run_check("xid.py", log) == (0, "no fatal Xid\n")


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("echo '0, None'; echo '1, None'", 0, "no GPU needs a recovery action\n"),
        ("echo '0, None'; echo '1, Reset'; echo '2, Reboot'", 1, "GPU 1 needs: Reset\nGPU 2 needs: Reboot\n"),
        ("echo 'No devices were found'; exit 6", 1, "nvidia-smi ended with code 6: No devices were found\n"),
        (
            "test $1 = -L && exit 0; echo 'Field \"gpu_recovery_action\" is not a valid field to query.'; exit 2",
            0,
            "this driver tells no recovery action; it answers with code 0\n",
        ),
    ],
    ids=["well", "sick", "no devices", "old driver"],
)
def test_a_gpu_that_needs_a_recovery_action_is_found(body: str, code: int, told: str, tmp_path: Path) -> None:
    """Each GPU that the driver wants to have reset is named; an older driver is only asked whether it answers."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    assert run_check("nvml_recovery.py", path=str(tmp_path)) == (code, told)
