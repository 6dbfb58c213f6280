"""What the nodes of a job must agree on beside flags: scripts, ranks, releases of elastic-run, versions of torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch

from elastic_run import contract
from elastic_run.rendezvous.coordination.link import PROTOCOL
from tests.support.etcd import Etcd
from tests.support.hosts import virtual_hosts
from tests.support.launch import ELASTIC_RUN
from tests.support.local_rendezvous import CONF, RUN_ID, place, wait_coordinated
from tests.support.programs import TELLS_SOON
from tests.support.sessions import free_port
from tests.support.system import mark_system
from tests.support.wait import stretched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TypeAlias

    from tests.support.launch import Launch, Launched, Worker

    Place: TypeAlias = tuple[str, ...]


#: Says its rank, and waits until somebody writes to a pipe.
WAIT = "say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nopen(os.environ['GATE']).close()\n"


@pytest.fixture(params=["c10d", "file", *mark_system(["etcd", "etcd-v3"])])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Return flags that make nodes meet, in each kind of store; a job without --rdzv-id, as many are."""
    with ExitStack() as stack:
        backend, conf = request.param, CONF
        if backend == "c10d":
            endpoint = f"localhost:{free_port()}"
        elif backend == "file":
            backend, endpoint, conf = "c10d", str(tmp_path / "store"), f"{CONF},store_type=file"
        else:
            endpoint = str(stack.enter_context(Etcd()).endpoints[0])
        yield (f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Make the pipe for which workers wait."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def start_two(launch: Launch, meeting: Place, path: Path, gate: Path) -> list[Launched]:
    """Start the two nodes of a job, and wait until their workers run."""
    nodes = [launch(*meeting, "--nnodes=2", path, env={"GATE": str(gate)}) for _ in range(2)]
    for node in nodes:
        node.wait_line("rank . of 2")
    return nodes


def test_another_script_at_the_same_place_is_refused(
    launch: Launch, worker: Worker, meeting: Place, gate: Path, tmp_path: Path
) -> None:
    """A second job is refused with both scripts named; it doesn't end with 0."""
    other = tmp_path / "other.py"
    other.touch()
    path = worker(WAIT)
    first = start_two(launch, meeting, path, gate)
    second = launch(*meeting, "--nnodes=2", other)
    assert second.wait_exit() == 208
    said = " ".join(second.stderr.split())
    assert f"the script of role 'default' is 'other.py' here and '{path.name}' in the job" in said
    with gate.open("w"):
        assert [node.wait_exit() for node in first] == [0, 0]


def test_another_file_of_the_same_name_is_refused(launch: Launch, worker: Worker, gate: Path, tmp_path: Path) -> None:
    """Two projects that both have a train.py are two jobs; copies of one file in two directories are one."""
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", f"--rdzv-id={RUN_ID}")
    path = worker(WAIT)
    paths = [tmp_path / directory / "train.py" for directory in ("here", "copied", "elsewhere")]
    for each, text in zip(paths, (path.read_text(), path.read_text(), "print('another')"), strict=True):
        each.parent.mkdir()
        each.write_text(text)
    first = [launch(*meeting, "--nnodes=2", each, env={"GATE": str(gate)}) for each in paths[:2]]
    for node in first:
        node.wait_line("rank . of 2")
    second = launch(*meeting, "--nnodes=2", paths[2])
    assert second.wait_exit() == 208
    said = " ".join(second.stderr.split())
    assert "the script of role 'default' is '" in said
    assert "elsewhere/train.py' here and '" in said
    with gate.open("w"):
        assert [node.wait_exit() for node in first] == [0, 0]


def test_a_spare_that_never_ran_says_so(launch: Launch, worker: Worker, meeting: Place, gate: Path) -> None:
    """A node that was not needed says how to start another job; its last line says that its script never ran."""
    path = worker(WAIT)
    first = start_two(launch, meeting, path, gate)
    spare = launch(*meeting, "--nnodes=2", path, env={"GATE": str(gate)})
    spare.wait_line("waiting: as a spare")
    is_served_by_the_job = "c10d" in meeting[0] and "file" not in meeting[-1]
    spare.wait_line(f"if this is another job, give it another --rdzv-{'endpoint' if is_served_by_the_job else 'id'}")
    with gate.open("w"):
        assert [node.wait_exit() for node in (*first, spare)] == [0, 0, 0]
    assert spare.stderr.splitlines()[-1] == (
        "elastic-run: the job has ended with success; this node was a spare, the script never ran here: "
        "2 nodes were enough"
    )
    assert all("never ran" not in node.stderr for node in first)


@pytest.mark.parametrize(
    "ways",
    [
        (["{path}"], ["../{directory}/{name}"]),
        (["{path}", "--lr", "1"], ["copy/{name}"]),
        (["--run-path", "{path}"], ["{path}"]),
        (["--no-python", sys.executable, "{path}"], ["{path}"]),
        (["--role=trainer", "{path}"], ["--role=reader", "other.py"]),
    ],
    ids=["directories", "mount points", "run-path", "interpreter", "roles"],
)
def test_honest_nodes_are_not_refused(launch: Launch, worker: Worker, ways: tuple[list[str], list[str]]) -> None:
    """Nodes that name one script in different ways, and roles with different scripts, form one job."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])")
    (path.parent / "copy").mkdir()
    for copy in (path.parent / "copy" / path.name, path.parent / "other.py"):
        copy.write_bytes(path.read_bytes())
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=j", f"--rdzv-conf={CONF}")
    names = {"path": path, "name": path.name, "directory": path.parent.name}
    nodes = [
        launch(*meeting, "--nnodes=2", *(word.format(**names) for word in words), cwd=path.parent) for words in ways
    ]
    assert [node.wait_exit() for node in nodes] == [0, 0], [node.stderr for node in nodes]
    said = sorted("".join(node.stdout for node in nodes).splitlines())
    assert said == ["rank 0 of 2", "rank 1 of 2"]


def test_another_script_with_static_ranks_is_refused(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """With --node-rank the script is compared as well, and the right node still gets its place."""
    other = tmp_path / "other.py"
    other.touch()
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])")
    port = free_port()
    flags = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", f"--rdzv-id={RUN_ID}")
    first = launch(*flags, "--node-rank=0", path)
    wait_coordinated(port)
    wrong = launch(*flags, "--node-rank=1", other)
    assert wrong.wait_exit() == 208
    right = launch(*flags, "--node-rank=1", path)
    assert [first.wait_exit(), right.wait_exit()] == [0, 0]


def test_a_master_elsewhere_than_the_given_rank_0(launch: Launch, worker: Worker) -> None:
    """A given rank 0 counts where --master-addr is no address of this machine: it may lead here all the same."""
    flags = ("--nnodes=2", "--node-rank=0", "--master-addr=192.0.2.1", f"--master-port={free_port()}")
    node = launch(*flags, worker("pass"), program=TELLS_SOON)
    node.wait_line(
        r"waiting: 1/2 nodes .*; this node has rank 0, but 192\.0\.2\.1 is no address of this machine: is --nod"
    )
    node.send(signal.SIGTERM)
    assert node.wait_exit() == 143


def test_a_second_node_of_rank_0_is_told_who_has_it(worker: Worker) -> None:
    """A second node of rank 0 ends at once with 2 where another machine serves the job; the job goes on."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])")
    with virtual_hosts(2) as hosts:
        flags = ("--nnodes=2", f"--master-addr={hosts[0].address}", "--master-port=29777", "--rdzv-id=j", path)
        first = hosts[0].start([*TELLS_SOON, "--node-rank=0", *flags])
        first.wait_line("waiting: 1/2 nodes")
        second = hosts[1].start([*ELASTIC_RUN, "--node-rank=0", *flags])
        assert second.wait_exit() == 2
        assert f"serves the job at {hosts[0].address}:29777, which is no address" in " ".join(second.stderr.split())
        right = hosts[1].start([*ELASTIC_RUN, "--node-rank=1", *flags])
        assert [first.wait_exit(), right.wait_exit()] == [0, 0]


def test_a_second_node_of_rank_0_on_the_same_machine_is_asked_for_its_rank(launch: Launch, worker: Worker) -> None:
    """Where the port of rank 0 is taken on this machine the line asks for another rank, and advises no port 0."""
    flags = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    path = worker("say('rank', rank)")
    first = launch(*flags, "--node-rank=0", path, program=TELLS_SOON)
    first.wait_line("waiting: 1/2 nodes")
    second = launch(*flags, "--node-rank=0", path)
    assert second.wait_exit() == 2
    assert f"is taken by pid {first.pid} (" in second.stderr
    assert (
        "choose another port, the same on all nodes; if that process is another node of this job, give this node "
        "another --node-rank" in second.stderr
    )
    assert "0 for any" not in second.stderr
    right = launch(*flags, "--node-rank=1", path)
    assert [first.wait_exit(), right.wait_exit()] == [0, 0]


def test_one_rank_for_two_nodes_ends_the_job_on_both(launch: Launch, worker: Worker) -> None:
    """Two nodes with the same --node-rank end with 208 before anything runs, and each names both."""
    conf = "--rdzv-conf=keep_alive_interval=0.3"
    flags = ("--nnodes=3", "--master-addr=127.0.0.1", f"--master-port={free_port()}", conf)
    path = worker("say('ran')")
    nodes = [launch(*flags, f"--node-rank={rank}", path) for rank in (0, 1, 1)]
    assert [node.wait_exit() for node in nodes] == [208, 208, 208]
    pids = [f"(pid {node.pid})" for node in nodes[1:]]
    for node in nodes:
        said = " ".join(node.stderr.split())
        assert "--node-rank=1 was given to two nodes: " in said
        assert node.stdout == ""
        assert all(pid in said for pid in pids)
        assert "hint Give each node a --node-rank of its own" in said


# --- releases of elastic-run ------------------------------------------------------------------------------------------
#: Seconds on a quiet machine.
_AT_ONCE = 1.0
#: Runs the launcher as another release would: another version, another protocol, a field more in each document.
RELEASE = """
import elastic_run
from elastic_run.core.job import codec
elastic_run.__version__ = {version!r}
to_json = codec.encode
codec.encode = lambda document: to_json({{**document, "new_field": 1}})
from elastic_run.rendezvous.coordination import link
link.PROTOCOL = {protocol}
link.PREAMBLE = link.NAME + b"{protocol}\\n"
from elastic_run import __main__
__main__.main()
"""


def release(protocol: int) -> tuple[str, ...]:
    """Return the command of a launcher that speaks a protocol."""
    return (sys.executable, "-c", RELEASE.format(version=f"9.{protocol}.0", protocol=protocol))


@pytest.mark.parametrize("comes_first", [True, False], ids=["first", "second"])
def test_releases_of_one_protocol_work_together(launch: Launch, worker: Worker, *, comes_first: bool) -> None:
    """A job whose nodes are being upgraded runs, restarts and ends as any other, whoever coordinates it."""
    path = worker("if attempt == 0:\n    sys.exit(5) if rank else signal.pause()\nsay('rank', rank)")
    port = free_port()
    programs = [{"program": release(PROTOCOL)}, {}]
    agents = []
    for options in programs if comes_first else programs[::-1]:
        agents.append(launch(*place(port), "--nnodes=2", "--max-restarts=1", path, **options))
        if len(agents) == 1:
            wait_coordinated(port)
    assert [agent.wait_exit() for agent in agents] == [0, 0], [agent.stderr for agent in agents]
    assert sorted("".join(agent.stdout for agent in agents).splitlines()) == ["rank 0", "rank 1"]


@pytest.mark.parametrize("other", [PROTOCOL + 99, PROTOCOL - 1])
def test_others_are_refused(launch: Launch, worker: Worker, other: int) -> None:
    """A node of another protocol is told both, with 208; the job says so, waits for another node and goes on."""
    path = worker("say('rank', rank)")
    port = free_port()
    agents = [launch(*place(port), "--nnodes=2", "--max-restarts=1", path)]
    wait_coordinated(port)
    stranger = launch(*place(port), "--nnodes=2", "--max-restarts=1", path, program=release(other))
    assert stranger.wait_exit() == 208
    said = " ".join(stranger.stderr.split())
    assert time.monotonic() - stranger.started_at < stretched(_AT_ONCE)
    assert f"uses protocol {PROTOCOL}, this node {other}: install the same release of elastic-run" in said
    agents[0].wait_line(f"speaks protocol {other} of another release of elastic-run")
    agents.append(launch(*place(port), "--nnodes=2", "--max-restarts=1", path))
    assert [agent.wait_exit() for agent in agents] == [0, 0]
    assert sorted("".join(agent.stdout for agent in agents).splitlines()) == ["rank 0", "rank 1"]


# --- versions of what the nodes run -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("program", "flags", "code"),
    [
        ("raise ValueError('bad batch')", [], 1),
        pytest.param(
            "import time; time.sleep(600)",
            ["--hang-timeout=1", "--hang-action=fail", "--shutdown-timeout=1"],
            212,
            marks=pytest.mark.long,
        ),
        pytest.param(
            "import time; print('trains', flush=True); time.sleep(600)",
            [],
            contract.EXIT_SIGNAL_BASE + signal.SIGTERM,
            marks=pytest.mark.long,
        ),
    ],
    ids=["failure", "hang", "stop"],
)
def test_nodes_tell_that_their_versions_of_torch_differ(
    launch: Launch,
    worker: Worker,
    tmp_path: Path,
    program: str,
    flags: list[str],
    code: int,
) -> None:
    """The version is read from the file that Python would import, and no torch is imported for it."""
    package = tmp_path / "other" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '2.4.0'\n", encoding="ascii")
    path, port = worker(program), free_port()
    agents = []
    for env in ({}, {"PYTHONPATH": str(tmp_path / "other")}):
        agents.append(launch(*place(port), "--nnodes=2", *flags, path, env=env))
        if not env:
            wait_coordinated(port)
    if code == contract.EXIT_SIGNAL_BASE + signal.SIGTERM:
        for agent in agents:
            agent.wait_line("trains")
        for agent in agents:
            agent.send(signal.SIGTERM)
    assert [agent.wait_exit() for agent in agents] == [code, code]
    for agent in agents:
        started, _, report = agent.stderr.partition("-- elastic-run: ")
        assert "the nodes have different versions of torch: " in started
        said = " ".join(report.split())
        assert "the nodes differ: " in said
        assert "torch 2.4.0 on " in said
        assert f"torch {torch.__version__} on " in said
