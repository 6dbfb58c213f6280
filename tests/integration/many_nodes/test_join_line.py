"""The line that tells others how to join, and the token in it: copied to a shell it works, and only it does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from elastic_run.rendezvous.coordination.link import DOCUMENT, PREAMBLE, encode_frame
from tests.support.hosts import virtual_hosts
from tests.support.local_rendezvous import COPIED, copied, place, token_of, wait_coordinated, wait_join_line
from tests.support.processes import descendants_of, describe
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launch import Launch, Worker


VARIABLE = "ELASTIC_RUN_RDZV_TOKEN"


def test_the_copied_line_joins_with_variables_and_arguments(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """It keeps the variables that stand in for flags, and every argument as it was typed."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'], sys.argv[1:])")
    variables = {"PET_NPROC_PER_NODE": "2", "PET_LOG_DIR": str(tmp_path / "a b"), "PET_NODE_RANK": "0"}
    words = ["it's $HOME", "*", "two\nlines\\", "x" * 3000]
    flags = ("--nnodes=2", "--rdzv-backend=c10d")  # without a backend, a node rank means a static job
    first = launch(*flags, path, *words, env={**variables, "OMP_NUM_THREADS": "1"})
    second = launch(program=copied(first), env=COPIED)
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]
    lines = (first.stdout + second.stdout).splitlines()
    assert sorted(lines) == [f"rank {rank} of 4 {words}" for rank in range(4)]
    assert "PET_NODE_RANK" not in wait_join_line(first)


def test_the_copied_line_needs_no_file_of_the_first_node(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """It has the values of a configuration file as flags, so that a node without the file joins."""
    file = tmp_path / "job.toml"
    file.write_text('nnodes = 2\nnproc_per_node = 2\nrole = "a b"\n[rdzv-conf]\njoin_timeout = 60\n', encoding="utf-8")
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'], 'in', os.environ['ROLE_NAME'])")
    first = launch(f"--config={file}", path, env={"OMP_NUM_THREADS": "1"})
    line = wait_join_line(first)
    assert "--config" not in line
    assert "--rdzv-conf=join_timeout=60,last_call_timeout=0" in line
    file.unlink()
    second = launch(program=copied(first), env=COPIED)
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]
    lines = (first.stdout + second.stdout).splitlines()
    assert sorted(lines) == [f"rank {rank} of 4 in a b" for rank in range(4)]


def test_the_token_stands_nowhere_else(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """Neither command lines, nor workers, nor files of the job have it, also where the job fails."""
    path = worker("say('environment', dict(os.environ))\nsys.stdin.read()\nraise ValueError('the end')")
    flags = ("--nnodes=2", "--redirects=3", "--event-log-handler=console", f"--log-dir={tmp_path / 'logs'}")
    first = launch(*flags, path, stdin=-1)
    token = token_of(wait_join_line(first))
    assert token
    second = launch(program=copied(first), env=COPIED, stdin=-1)
    logs = tmp_path / "logs"
    wait_until(
        lambda: len([file for file in logs.glob("*_*/attempt_0/*/stdout.log") if file.stat().st_size]) == 2,
        what="workers",
    )
    pids = [pid for agent in (first, second) for pid in (agent.pid, *descendants_of(agent.pid))]
    commands = [describe(pid) for pid in pids]
    assert len(commands) >= 6
    assert not any(token in command for command in commands if "bash" not in command)
    for agent in (first, second):
        assert agent.process.stdin is not None
        agent.process.stdin.close()
    assert [first.wait_exit(), second.wait_exit()] == [1, 1]
    files = [file for file in logs.rglob("*") if file.is_file()]
    assert {"failure.json", "stdout.log"} <= {file.name for file in files}
    assert not any(token.encode() in file.read_bytes() for file in files)
    assert (first.stdout + first.stderr).count(token) == 1
    assert token not in second.stdout + second.stderr


def test_a_token_of_the_user_is_not_shown(launch: Launch, worker: Worker) -> None:
    """Where the user has given a token the line says that others need it, and doesn't show it."""
    first = launch("--nnodes=2", worker("pass"), env={VARIABLE: "a secret"})
    first.wait_line("other nodes, with the token that this one has, join with: elastic-run ")
    second = launch(program=copied(first), env={**COPIED, VARIABLE: "a secret"})
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]
    assert "a secret" not in first.stderr + second.stderr


def test_an_empty_variable_means_no_token(launch: Launch, worker: Worker) -> None:
    """With an empty variable the job has no token, and whoever knows endpoint and id joins."""
    first = launch("--nnodes=2", worker("pass"), env={VARIABLE: ""})
    first.wait_line("other nodes join with: elastic-run ")
    second = launch(program=copied(first), env=COPIED)
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]


def test_a_host_that_has_only_loopback_says_so(worker: Worker) -> None:
    """Without a network the line says that only agents of this host can join; with --local-addr, why that is so."""
    with virtual_hosts(1) as (host,):
        host.run("ip", "link", "del", "eth0")
        agents = [
            host.start([sys.executable, "-m", "elastic_run", "--nnodes=2", *flags, worker("pass")], env=COPIED)
            for flags in ((), ("--local-addr=127.0.0.1",))
        ]
        agents[0].wait_line(r"127.0.0.1 is loopback \(this host has no other address\): only agents on this host can")
        agents[1].wait_line(
            r"127.0.0.1 is loopback \(--local-addr is loopback\): only agents on this host can reach it"
        )
        other = host.start(copied(agents[0]), env=COPIED)
        assert [agents[0].wait_exit(), other.wait_exit()] == [0, 0]


# --- the token --------------------------------------------------------------------------------------------------------
TOKEN = "3c1f9b0c the job's own"  # noqa: S105 - of no job
GIVEN = {"ELASTIC_RUN_RDZV_TOKEN": TOKEN}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe with a name, from which each worker of `waits_at` reads a byte before it ends."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


@contextlib.contextmanager
def opened(gate: Path, workers: int) -> Iterator[None]:
    """Let the workers go on."""
    with gate.open("wb", buffering=0) as writer:
        writer.write(b"." * workers)
        yield


def waits_at(gate: Path) -> str:
    """Return a worker's program: it says its rank, and ends when it may."""
    return f"say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nos.read(os.open({str(gate)!r}, os.O_RDONLY), 1)"


def is_refused(port: int, data: bytes) -> bool:
    """Tell whether a stranger's bytes close its connection without an answer."""
    with socket.create_connection(("localhost", port), DEADLINE) as stranger:
        try:
            stranger.sendall(data)
            return stranger.recv(1) == b""
        except ConnectionError:
            return True


@pytest.mark.parametrize(
    ("job", "joiner", "words"),
    [
        (TOKEN, "another", "has another token than this node"),
        (TOKEN, "", "has a token, and this node was given none"),
        ("", TOKEN, "has no token, and this node was given one"),
    ],
    ids=["another", "none", "needless"],
)
def test_a_node_with_another_token_is_refused(
    launch: Launch, worker: Worker, *, job: str, joiner: str, words: str
) -> None:
    """A node whose token is not the job's ends with 208 and says why; the job goes on without it."""
    port, variable = free_port(), "ELASTIC_RUN_RDZV_TOKEN"
    path = worker("say('rank', rank)")
    first = launch(*place(port), "--nnodes=2", path, env={variable: job})
    wait_coordinated(port, job.encode() or None)
    stranger = launch(*place(port), "--nnodes=2", path, env={variable: joiner})
    assert stranger.wait_exit() == 208
    assert f"the job at localhost:{port} {words}" in stranger.stderr
    second = launch(*place(port), "--nnodes=2", path, env={variable: job})
    assert [first.wait_exit(), second.wait_exit()] == [0, 0]
    assert first.stderr.count("refused a connection: ") == bool(job)


def test_a_job_on_one_port_with_its_workers(launch: Launch, worker: Worker, gate: Path) -> None:
    """With static rendezvous workers need no token at the shared port, and agents do."""
    port = free_port()
    static = ("--rdzv-backend=static", "--master-addr=localhost", f"--master-port={port}", "--nnodes=2")
    path = worker(
        "from elastic_run.store.client import StoreClient\n"
        "with StoreClient('localhost', int(os.environ['MASTER_PORT']), 20.0) as store:\n"
        "    store.set(f'here/{rank}', b'x')\n"
        "    store.wait(['here/0', 'here/1'])\n" + waits_at(gate)
    )
    first = launch(*static, "--node-rank=0", path, env=GIVEN)
    stranger = launch(*static, "--node-rank=1", path)
    assert stranger.wait_exit() == 208
    second = launch(*static, "--node-rank=1", path, env=GIVEN)
    for agent in (first, second):
        agent.wait_line("rank . of 2")
    assert is_refused(port, PREAMBLE + encode_frame(DOCUMENT, {}))
    with opened(gate, 2):
        assert [first.wait_exit(), second.wait_exit()] == [0, 0]


def test_a_successor_asks_for_the_token_too(launch: Launch, worker: Worker, gate: Path) -> None:
    """When the coordinator is killed, the next one takes nodes in that prove the token."""
    ports = free_port(), free_port()
    words = list(place(ports[0]))
    words[1] = f"--rdzv-endpoint=localhost:{ports[0]},localhost:{ports[1]}"
    path = worker(waits_at(gate))
    host = launch(*words, "--nnodes=2:3", path, env=GIVEN)
    wait_coordinated(ports[0], TOKEN.encode())
    others = [launch(*words, "--nnodes=2:3", path, env=GIVEN) for _ in range(2)]
    for agent in (host, *others):
        agent.wait_line("rank . of 3")
    host.send(signal.SIGKILL)
    for agent in others:
        agent.wait_line("rank . of 2")
    assert is_refused(ports[1], PREAMBLE + encode_frame(DOCUMENT, {}))
    with opened(gate, 2):
        assert [agent.wait_exit() for agent in others] == [0, 0]
