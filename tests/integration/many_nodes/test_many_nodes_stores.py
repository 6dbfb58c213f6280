"""The store of a job of several nodes, and the ending of a job whose store is lost."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Certificates, Etcd, make_certificates
from tests.support.local_rendezvous import RUNS, LocalJob
from tests.support.programs import shortened
from tests.support.sessions import free_port
from tests.support.system import mark_system
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from contextlib import ExitStack

    from tests.support.launch import Launch, Launched, Worker


KINDS = ("file", "etcd", "etcd-v3")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make an authority, a certificate and a key."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


class Lease:
    """Where a job's lease is.

    Args:
        stack: Ends the etcd.
        kind: `file`, `etcd` or `etcd-v3`.
        directory: For a file.
    """

    def __init__(self, stack: ExitStack, kind: str, directory: Path) -> None:
        self.etcd = None if kind == "file" else stack.enter_context(Etcd())
        self.directory = directory / "store.d"
        self.place = ("c10d", str(directory / "store")) if self.etcd is None else (kind, str(self.etcd.endpoints[0]))
        self.conf = "store_type=file," if self.etcd is None else ""


@pytest.fixture(params=mark_system(KINDS, but=("file",)))
def lease(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path) -> Lease:
    """Return a place for a lease, of each kind."""
    return Lease(stack, request.param, tmp_path)


@pytest.fixture
def etcd_job(launch: Launch, worker: Worker, stack: ExitStack) -> tuple[LocalJob, Etcd]:
    """Return a job of two nodes in an etcd, and that one."""
    etcd = stack.enter_context(Etcd())
    conf = "keep_alive_interval=0.5,last_call_timeout=30,join_timeout=5"
    place = ("etcd-v3", str(etcd.endpoints[0]))
    return LocalJob(launch, worker(RUNS), "--nnodes=2", "--max-restarts=1", conf=conf, place=place), etcd


def start(launch: Launch, worker: Worker, lease: Lease, size: int, *, interval: float = 20.0) -> LocalJob:
    """Start a job, and wait until its workers run."""
    conf = f"{lease.conf}keep_alive_interval={interval},last_call_timeout=30"
    flags = (f"--nnodes=1:{size}", "--max-restarts=1")
    job = LocalJob(launch, worker(RUNS), *flags, conf=conf, place=lease.place)
    job.start_all(size)
    return job


def find_coordinator(job: LocalJob) -> Launched:
    """Return the node that coordinates: the one that listens for the others."""

    def is_listening(pid: int) -> bool:
        sockets = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        listening = {f"socket:[{words[9]}]" for words in map(str.split, lines) if words[3] == "0A"}
        return len(sockets & listening) > 1  # one is for the workers

    return wait_until(lambda: [node for node in job.nodes if is_listening(node.pid)])[0]


# --- the nodes of a job ----------------------------------------------------------------------------------------------
def test_a_job_fails_once_and_leaves_nothing(launch: Launch, worker: Worker, lease: Lease) -> None:
    """Nodes meet, restart after a failure, succeed, and remove the lease."""
    job = start(launch, worker, lease, 2)
    job.fail(0, 1)
    job.wait_round(2, restart=1)
    job.finish()
    if lease.etcd is not None:
        assert lease.etcd.list_keys() == []
    assert not [*lease.directory.rglob("*")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("is_coordinator", [True, False], ids=["the coordinator", "another"])
def test_a_node_that_goes_is_missed_at_once(
    launch: Launch, worker: Worker, lease: Lease, number: signal.Signals, *, is_coordinator: bool
) -> None:
    """After SIGKILL or SIGTERM the other nodes are the next round long before the lease is over."""
    job = start(launch, worker, lease, 3)
    coordinator = find_coordinator(job)
    gone = coordinator if is_coordinator else next(node for node in job.nodes if node is not coordinator)
    job.nodes.remove(gone)
    begun = time.monotonic()
    gone.send(number)
    job.wait_round(2)
    assert time.monotonic() - begun < stretched(5)
    job.finish()


def test_the_next_coordinator_goes_on_with_the_budget_of_the_job(launch: Launch, worker: Worker, lease: Lease) -> None:
    """Restarts that a coordinator has spent are spent for the coordinator after it, too."""
    job = start(launch, worker, lease, 3)
    job.fail(0, 0)
    job.wait_round(3, restart=1)
    job.kill(find_coordinator(job))
    job.wait_round(2, restart=1)
    job.fail(1, 0)
    assert [node.wait_exit() for node in job.nodes] == [5, 5]


def test_all_nodes_die_and_the_job_is_started_again(launch: Launch, worker: Worker, lease: Lease) -> None:
    """Nothing that a dead job has left hinders the next one with its id."""
    job = start(launch, worker, lease, 2, interval=0.3)
    for node in tuple(job.nodes):
        job.kill(node)
    job.start_all(2)
    job.finish()


def test_a_lease_that_somebody_has_deleted_is_written_again(launch: Launch, worker: Worker, lease: Lease) -> None:
    """The round runs on, and a failure after it restarts the workers of all nodes."""
    job = start(launch, worker, lease, 2, interval=0.4)
    if lease.etcd is None:
        shutil.rmtree(lease.directory)
        wait_until(lambda: [*lease.directory.rglob("*")])
    elif lease.place[0] == "etcd-v3":
        lease.etcd.delete_keys("")
        wait_until(lease.etcd.list_keys)
    job.fail(0, 0)
    job.wait_round(2, restart=1)
    assert all(node.stdout.count("restart 0") == 1 for node in job.nodes)
    job.finish()


# --- an etcd that is out of reach ------------------------------------------------------------------------------------
def wait_told(job: LocalJob) -> None:
    """Wait until the coordinator has said that its etcd is out of reach."""
    text = "the job goes on, and its next round waits for the store"
    wait_until(lambda: any(text in node.stderr for node in job.nodes))


def test_a_round_runs_on_while_etcd_is_away(etcd_job: tuple[LocalJob, Etcd]) -> None:
    """A line tells of it after the lease; when etcd is back, a failure restarts the workers as ever."""
    job, etcd = etcd_job
    job.start_all(2)
    etcd.pause(0)
    wait_told(job)
    etcd.resume(0)
    job.fail(0, 0)
    job.wait_round(2, restart=1)
    job.finish()


def test_a_job_that_needs_etcd_in_vain_ends(etcd_job: tuple[LocalJob, Etcd]) -> None:
    """A worker fails while etcd doesn't answer: after join_timeout the job ends with 207 on all nodes."""
    job, etcd = etcd_job
    job.start_all(2)
    etcd.pause(0)
    wait_told(job)
    job.fail(0, 0)
    assert [node.wait_exit() for node in job.nodes] == [207, 207]
    assert all("lease could not be renewed" in " ".join(node.stderr.split()) for node in job.nodes)
    etcd.resume(0)


def test_an_etcd_without_room_is_enough_for_a_coordinator(etcd_job: tuple[LocalJob, Etcd]) -> None:
    """The lease that is there is renewed, and a failure restarts the workers as ever."""
    job, etcd = etcd_job
    job.start_all(2)
    etcd.set_full(is_full=True)
    job.fail(0, 0)
    job.wait_round(2, restart=1)
    job.finish()


@pytest.mark.parametrize("backend", ["etcd", "etcd-v3"])
def test_the_leader_of_etcd_dies(launch: Launch, worker: Worker, backend: str) -> None:
    """With the other members the job goes on: the round runs, and a failure restarts its workers."""
    with Etcd(members=3) as etcd:
        endpoint = ",".join(map(str, etcd.endpoints))
        conf = "keep_alive_interval=1,last_call_timeout=30"
        flags = ("--nnodes=2", "--max-restarts=1")
        job = LocalJob(launch, worker(RUNS), *flags, conf=conf, place=(backend, endpoint))
        job.start_all(2)
        etcd.kill(etcd.find_leader())
        etcd.find_leader()
        job.fail(0, 0)
        job.wait_round(2, restart=1)
        job.finish()


# --- a guarded etcd, and places that can't be used -------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["etcd", "etcd-v3"])
def test_a_guarded_etcd(launch: Launch, worker: Worker, certificates: Certificates, backend: str) -> None:
    """A job meets in an etcd with TLS that requires a client certificate."""
    with Etcd(certificates=certificates) as etcd:
        conf = f"protocol=https,cacert={certificates.cacert},cert={certificates.cert},key={certificates.key}"
        flags = ("--nnodes=2", "--max-restarts=1")
        job = LocalJob(launch, worker(RUNS), *flags, conf=conf, place=(backend, str(etcd.endpoints[0])))
        job.start_all(2)
        job.fail(0, 0)
        job.wait_round(2, restart=1)
        job.finish()


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("protocol=https,cacert={0.cacert}", "user"),
        ("protocol=https", "CERTIFICATE_VERIFY_FAILED"),
    ],
    ids=["no user", "unknown authority"],
)
def test_an_etcd_that_refuses_us_is_named_at_once(
    launch: Launch, worker: Worker, certificates: Certificates, conf: str, expected: str
) -> None:
    """A node that is not let in says why, without waiting for join_timeout."""
    with Etcd(certificates=certificates, has_users=True) as etcd:
        place = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoints[0]}", "--rdzv-id=j")
        agent = launch(*place, f"--rdzv-conf={conf.format(certificates)}", "--nnodes=2", worker("pass"))
        assert agent.wait_exit() == 201
        said = " ".join(agent.stderr.split())
        assert str(etcd.endpoints[0]) in said
        assert expected in said


def test_a_directory_that_nobody_may_write_to(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A path that can't be used is named at once, with the reason."""
    (tmp_path / "file").write_text("no directory")
    endpoint = f"--rdzv-endpoint={tmp_path}/file/store"
    conf = "--rdzv-conf=store_type=file"
    agent = launch("--rdzv-backend=c10d", endpoint, "--rdzv-id=j", conf, "--nnodes=2", worker("pass"))
    assert agent.wait_exit() == 201
    assert "Not a directory" in " ".join(agent.stderr.split())


# --- the host of the store is lost: the ending says what would have saved the job -------------------------------------
CONF = "--rdzv-conf=keep_alive_interval=0.3,keep_alive_max_attempt=3,last_call_timeout=0.2"


def start_job(launch: Launch, program: Path, endpoint: str) -> list[Launched]:
    """Start two nodes, of which the first serves the store, and wait until their workers run."""
    flags = (
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=lost",
        f"--rdzv-endpoint={endpoint}",
        CONF,
    )
    agents = [launch(*flags, program)]
    agents[0].wait_line("rank 0 of 1", deadline=60)
    soon = shortened({"elastic_run.rendezvous.coordination.outage.REFUSED_FOR": 1.0})
    agents.append(launch(*flags, program, program=soon))
    for agent in agents:
        agent.wait_line("rank . of 2")
    return agents


def report_of(agent: Launched) -> str:
    """Return an agent's closing report as one line."""
    return " ".join(agent.stderr[agent.stderr.index("-- elastic-run: ") :].split())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_ending_names_what_would_have_saved_the_job(launch: Launch, worker: Worker, number: signal.Signals) -> None:
    """With one endpoint the job ends with the node that serves its store, and the report names the remedy."""
    program = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nsignal.pause()")
    port = free_port()
    host, other = start_job(launch, program, f"127.0.0.1:{port}")
    host.send(number)
    host.wait_exit()
    assert other.wait_exit() != 0
    assert "--rdzv-endpoint=a,b,c" in report_of(other)
    assert f"127.0.0.1:{port}" in report_of(other)


def test_several_endpoints_save_the_job(launch: Launch, worker: Worker) -> None:
    """With the remedy that the report names the other node goes on after the host's loss."""
    program = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nsignal.pause()")
    endpoints = ",".join(f"127.0.0.1:{port}" for port in (free_port(), free_port()))
    host, other = start_job(launch, program, endpoints)
    host.send(signal.SIGKILL)
    other.wait_line("rank 0 of 1")
    other.send(signal.SIGTERM)
    assert other.wait_exit() == 143
