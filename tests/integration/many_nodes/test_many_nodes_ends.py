"""How agents of a job of several nodes end: with one truth after a crash, and promptly when they are told to go."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd
from tests.support.launch import launch as start
from tests.support.local_rendezvous import place, wait_coordinated
from tests.support.processes import children_of
from tests.support.sessions import free_port
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launch import Launch, Launched, Worker


SEGFAULT = "import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)"


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), signal.SIGSEGV)", SEGFAULT], ids=["bare", "with a trace"])
def test_a_crash_is_the_cause_everywhere(launch: Launch, worker: Worker, code: str) -> None:
    """A worker that dies by SIGSEGV on one node is the cause on all, with exit code 139, and nothing else is."""
    body = "\n    ".join(code.splitlines())
    path = worker(
        f"import socket\nif rank == 2:\n    {body}\n"
        "try:\n    signal.sigtimedwait([signal.SIGUSR2], 60)\nexcept InterruptedError:\n    pass\n"
        "raise ConnectionError('a peer is gone')"
    )
    port = free_port()
    agents = [launch(*place(port), "--nnodes=3", path) for _ in range(3)]
    assert [agent.wait_exit() for agent in agents] == [128 + signal.SIGSEGV] * 3
    causes = [re.search(r"rank 2 on \S+ .*?SIGSEGV", " ".join(agent.stderr.split())) for agent in agents]
    assert all(causes), [agent.stderr for agent in agents]


def test_a_rank_that_does_not_stop_is_the_cause_everywhere(launch: Launch, worker: Worker) -> None:
    """Two ranks of one node had only lost a peer; each node names the rank of the other that did not stop."""
    path = worker(
        "import time\n"
        "ready = __file__ + '.ready'\n"
        "def load_batch():\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    open(ready, 'w').close()\n"
        "    while True:\n"
        "        signal.pause()\n"
        "if rank == 3:\n"
        "    load_batch()\n"
        "open(f'{__file__}.{rank}', 'w').close()\n"
        "while not all(map(os.path.exists, (ready, __file__ + '.0', __file__ + '.1'))) or rank == 2:\n"
        "    time.sleep(0.01)\n"
        "raise RuntimeError('[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13965')"
    )
    flags = (*place(free_port()), "--nnodes=2", "--nproc-per-node=2", "--shutdown-timeout=1")
    agents = [launch(*flags, f"--node-rank={rank}", path) for rank in range(2)]
    assert [agent.wait_exit() for agent in agents] == [1, 1]
    for agent in agents:
        said = " ".join(agent.stderr.split())
        assert re.search(r"cause rank 3 is in load_batch \(worker\d*\.py:\d+\): it did not stop", said), agent.stderr
        assert re.search(r"first rank [01] on ", said), agent.stderr


@pytest.mark.parametrize(
    ("nodes", "failing", "words"),
    [
        (1, "1023", "others ranks 0, 2-3 had the same FileNotFoundError logs"),
        (2, "1023", "others all 4 ranks had the same FileNotFoundError logs"),
        (2, "32", "others only [^ ]+ .node 1. had this FileNotFoundError, on 2 of 2 ranks: no rank of the other node"),
        (2, "203", "others 3 of 4 ranks on [^ ]+, [^ ]+ had the same FileNotFoundError"),
    ],
)
def test_the_report_says_whether_one_node_or_all_had_the_error(
    launch: Launch, worker: Worker, nodes: int, failing: str, words: str
) -> None:
    """The stop's signal ends workers that have already written the same exception; each node's report counts them."""
    path = worker(
        "import atexit, time\n"
        "def end_slowly():\n"
        "    open(f'{sys.argv[0]}.{rank}', 'w').close()\n"
        "    signal.pause()\n"
        "first, *others = sys.argv[1]\n"
        "if str(rank) == first:\n"
        "    while not all(os.path.exists(f'{sys.argv[0]}.{other}') for other in others):\n"
        "        time.sleep(0.01)\n"
        "elif str(rank) in others:\n"
        "    atexit.register(end_slowly)\n"
        "else:\n"
        "    signal.pause()\n"
        "open(f'/no/such/shard-{rank}.bin')"
    )
    flags = (f"--nnodes={nodes}", f"--nproc-per-node={4 // nodes}", *(place(free_port()) if nodes > 1 else ()))
    agents = [launch(*flags, f"--node-rank={rank}", path, failing) for rank in range(nodes)]
    assert [agent.wait_exit() for agent in agents] == [1] * nodes
    for agent in agents:
        assert re.search(words, " ".join(agent.stderr.split())), agent.stderr


def test_all_nodes_report_what_was_tried_before(launch: Launch, tmp_path: Path) -> None:
    """After causes A, B, B and C the report of each node has a line for A and one for both B."""
    path = tmp_path / "worker.sh"
    path.write_text('[ "$RANK" = 0 ] && exec sleep 1000\nset -- 4 5 5 6\nshift $TORCHELASTIC_RESTART_COUNT\nexit $1\n')
    port = free_port()
    flags = ("--nnodes=2", "--max-restarts=3", "--max-backoff=0", "--no-python", "sh", path)
    agents = [launch(*place(port), *flags) for _ in range(2)]
    assert [agent.wait_exit() for agent in agents] == [6, 6]
    for agent in agents:
        lines = agent.stderr.splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith("before   "))
        assert re.match(r"before   attempt 0 failed after \S+ s: rank 1 fail.* 4$", lines[first])
        assert re.match(r" {9}attempts 1-2 failed after .*: rank 1 fail.* 5$", lines[first + 1])


def wait_told(agent: Launched) -> None:
    """Wait until an agent's workers have ended, and the coordinator has read so: it passes the question on to all."""
    wait_until(lambda: len(children_of(agent.pid)) == 1, what="only a guardian left")
    with start("status", str(agent.pid)) as command:
        assert command.wait_exit() == 0


def test_a_node_that_is_done_stays_for_the_others(launch: Launch, worker: Worker) -> None:
    """Without an exit barrier too: a failure elsewhere restarts the workers of a node whose own ones had ended."""
    path = worker(
        "again = os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
        "say('rank', rank, 'again' if again else 'first')\n"
        "if rank == 1 and not again:\n    open(sys.argv[1]).read()\n    sys.exit(5)\n"
    )
    gate = path.with_name("gate")
    os.mkfifo(gate)
    port = free_port()
    words = ("--nnodes=2", "--max-restarts=1", "--exit-barrier-timeout=0", path, str(gate))
    agents = [launch(*place(port), f"--node-rank={rank}", *words) for rank in range(2)]
    with gate.open("w"):
        wait_told(agents[0])
    for rank, agent in enumerate(agents):
        agent.wait_line(f"rank {rank} again")
        assert agent.wait_exit() == 0


def test_a_host_without_an_exit_barrier_lets_the_others_read_the_end(launch: Launch, worker: Worker) -> None:
    """A node that hears the end a moment late ends with the job's exit code, and not because its store is gone."""
    path = worker("if rank == 0:\n    open(sys.argv[1]).read()\nopen(sys.argv[2 + rank], 'w').close()\n")
    gate, done = path.with_name("gate"), [path.with_name(f"done{rank}") for rank in range(2)]
    os.mkfifo(gate)
    port = free_port()
    words = ("--nnodes=2", "--exit-barrier-timeout=0", path, str(gate), *map(str, done))
    host = launch(*place(port), "--node-rank=0", *words)
    wait_coordinated(port)
    other = launch(*place(port), "--node-rank=1", *words)
    with gate.open("w"):
        wait_until(done[1].exists)
        wait_told(other)
        other.send(signal.SIGSTOP)
    host.wait_line("the job is over; waiting up to")
    other.send(signal.SIGCONT)
    assert other.wait_exit() == 0, other.stderr
    assert host.wait_exit() == 0


@pytest.mark.parametrize("code", [0, 7])
def test_an_agent_that_lingers_goes_when_told_to(launch: Launch, worker: Worker, code: int) -> None:
    """The node that serves the store stays for one that has not heard the end; a signal ends that, with the verdict."""
    path = worker(
        "if rank == 0:\n    say('there')\n    open(sys.argv[1]).read()\n    sys.exit(int(sys.argv[2]))\n"
        "open(sys.argv[3], 'w').close()\n"
    )
    gate, done = path.with_name("gate"), path.with_name("done")
    os.mkfifo(gate)
    port = free_port()
    conf = "last_call_timeout=3,keep_alive_interval=60"
    words = ("--nnodes=2", path, str(gate), str(code), str(done))
    host = launch(*place(port, conf), "--node-rank=0", *words)
    wait_coordinated(port)
    other = launch(*place(port, conf), "--node-rank=1", *words)
    with gate.open("w"):
        wait_until(done.exists)
        wait_told(other)
        other.send(signal.SIGSTOP)
    host.wait_line(r"the job is over; waiting up to \d+ s for nodes that do not know it yet: \S+$")
    host.send(signal.SIGTERM)
    begun = time.monotonic()
    assert host.wait_exit() == code
    assert time.monotonic() - begun < stretched(2)
    other.close()


@pytest.mark.parametrize(("flags", "seconds"), [((), 90), (("--exit-barrier-timeout=2m",), 120)])
def test_the_exit_barrier_has_the_length_that_was_given(
    launch: Launch, worker: Worker, flags: tuple[str, ...], seconds: int
) -> None:
    """TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT is the length of the exit barrier, and --exit-barrier-timeout goes first."""
    path = worker("if rank == 0:\n    open(sys.argv[1]).read()\nopen(sys.argv[2], 'w').close()\n")
    gate, done = path.with_name("gate"), path.with_name("done")
    os.mkfifo(gate)
    port = free_port()
    env = {"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT": "90"}
    words = (*place(port, "keep_alive_interval=60"), "--nnodes=2", *flags, path, str(gate), str(done))
    host = launch("--node-rank=0", *words, env=env)
    wait_coordinated(port)
    other = launch("--node-rank=1", *words, env=env)
    with gate.open("w"):
        wait_until(done.exists)
        wait_told(other)
        other.send(signal.SIGSTOP)
    told = int(host.wait_line(r"the job is over; waiting up to (\d+) s for nodes that do not know it yet: ")[1])
    assert seconds - 10 < told <= seconds
    host.send(signal.SIGTERM)
    assert host.wait_exit() == 0
    other.close()


TELLING = (
    "signal.signal(signal.SIGTERM, lambda *_: (say('told', time.monotonic()), sys.exit(0)))\n"
    "say('there')\nwhile True:\n    signal.pause()\n"
)


def assert_goes_soon(agent: Launched) -> None:
    """Tell an agent to go, and see that its workers hear it at once, and it ends a second after them."""
    begun = time.monotonic()
    agent.send(signal.SIGTERM)
    told = float(agent.wait_line(r"told (\S+)")[1])
    assert agent.wait_exit() == 143
    assert told - begun < stretched(1)
    assert time.monotonic() - told < stretched(2.5)


def test_a_signal_while_etcd_is_away(launch: Launch, worker: Worker) -> None:
    """Workers get the signal at once though nobody can be told, and the agent is gone a second after them."""
    path = worker(TELLING)
    with Etcd() as etcd:
        words = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoints[0]}", "--rdzv-id=j")
        agents = [launch(*words, "--nnodes=2", path) for _ in range(2)]
        for agent in agents:
            agent.wait_line("there")
        etcd.pause(0)
        assert_goes_soon(agents[0])
        etcd.resume(0)
        agents[1].send(signal.SIGTERM)
        assert agents[1].wait_exit() == 143


def test_a_signal_while_the_host_of_the_store_hangs(launch: Launch, worker: Worker) -> None:
    """So it is where the store is another agent's, which was stopped."""
    path = worker(TELLING)
    port = free_port()
    host = launch(*place(port, "last_call_timeout=3"), "--nnodes=2", path)
    wait_coordinated(port)
    other = launch(*place(port, "last_call_timeout=3"), "--nnodes=2", path)
    for agent in (host, other):
        agent.wait_line("there")
    host.send(signal.SIGSTOP)
    assert_goes_soon(other)
    host.send(signal.SIGCONT)
    host.send(signal.SIGTERM)
    assert host.wait_exit() == 143


def test_a_node_that_leaves_is_heard_at_once(launch: Launch, worker: Worker) -> None:
    """Where the store answers, the short time that last words have is enough: the others don't wait for a lease."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nsignal.pause()\n")
    with Etcd() as etcd:
        conf = "--rdzv-conf=last_call_timeout=60,keep_alive_interval=20"
        words = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoints[0]}", "--rdzv-id=j", conf)
        agents = [launch(*words, "--nnodes=1:2", path) for _ in range(2)]
        for agent in agents:
            agent.wait_line("rank . of 2")
        begun = time.monotonic()
        agents[0].send(signal.SIGTERM)
        agents[1].wait_line("rank 0 of 1")
        assert time.monotonic() - begun < stretched(5)
        assert agents[0].wait_exit() == 143
        agents[1].send(signal.SIGTERM)
        assert agents[1].wait_exit() == 143


# --- jobs that last for months leave nothing in memory with each round ------------------------------------------------
#: A launcher that says how many blocks of memory it has when it begins its 150th round, and each 100 rounds later.
_COUNTING = """
import gc, os, runpy, sys
from elastic_run.agent.driver.round import Round
begin = Round.__init__
def count(self, *arguments, **options):
    if options["number"] % 100 == 50 and options["number"] > 100:
        gc.collect()
        os.write(1, b"blocks %d\\n" % sys.getallocatedblocks())
    begin(self, *arguments, **options)
Round.__init__ = count
sys.argv = ["elastic_run", *sys.argv[1:]]
runpy.run_module("elastic_run", run_name="__main__")
"""


@pytest.mark.soak
def test_restarts_leave_nothing_in_memory(launch: Launch, tmp_path: Path) -> None:
    """In some 100 restarts of 900 the launcher gets no more objects, and it still counts them all.

    What is imported or waited for once, at some time of the job, may fall into the others; so do the timers of the
    rounds of the last second, whose number grows until the job is a second old.
    """
    path = tmp_path / "worker.sh"
    path.write_text("exit $((TORCHELASTIC_RESTART_COUNT % 2 + 1))\n")
    flags = ("--standalone", "--max-restarts=1051", "--max-backoff=0", "--no-python", "sh", path)
    job = launch(*flags, program=(sys.executable, "-c", _COUNTING))
    assert job.wait_exit(deadline=200) in {1, 2}
    blocks = [int(line.split()[1]) for line in job.stdout.splitlines()]
    assert len(blocks) == 10
    assert min(after - before for before, after in pairwise(blocks)) < 200, blocks  # it was 800
    assert "restart 1051 of 1051" in job.stderr
    assert "(1051 attempts in all)" in job.stderr
