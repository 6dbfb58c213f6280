"""The launcher on several nodes over the stores that somebody else keeps: a guarded etcd, a directory that all see."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.protocol.job_keys import decision_key
from elastic_run.rendezvous.backend_table import make_backend, read_settings
from tests.support.etcd import ROOT, Certificates, Etcd, make_certificates
from tests.support.wait import DEADLINE, stretched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launched

    Launch = Callable[..., Launched]
    Worker = Callable[[str], Path]

SAY_RANK = "say('rank', rank, 'of', os.environ['WORLD_SIZE'], 'attempt', attempt)"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make an authority, a certificate and a key."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def run_two(launch: Launch, path: Path, backend: str, endpoint: str, conf: str) -> None:
    """Run a job of two nodes that fails once and succeeds then."""
    place = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=j", f"--rdzv-conf={conf}")
    agents = [launch(*place, "--nnodes=2", "--max-restarts=1", path) for _ in range(2)]
    assert [agent.wait_exit() for agent in agents] == [0, 0], [agent.stderr for agent in agents]
    said = sorted("".join(agent.stdout for agent in agents).splitlines())
    assert said == ["rank 0 of 2 attempt 1", "rank 1 of 2 attempt 1"]
    assert all("restart 1 of 1" in agent.stderr for agent in agents)


def wait_coordinated(backend: str, endpoint: str, conf: str) -> None:
    """Wait until the first node of a job has made itself its coordinator."""
    settings = read_settings(backend, dict(pair.split("=", 1) for pair in conf.split(",")))
    with make_backend(backend, endpoint, "j", settings).open(DEADLINE) as store:
        assert store.wait(decision_key(0), DEADLINE) is not None


@pytest.fixture
def fails_once(worker: Worker) -> Path:
    """Return a program whose rank 1 fails in the first attempt."""
    return worker(f"if attempt == 0:\n    sys.exit(5) if rank else signal.pause()\n{SAY_RANK}")


def test_etcd_v3_with_tls_user_and_password(
    launch: Launch, fails_once: Path, certificates: Certificates, tmp_path: Path
) -> None:
    """A job meets in an etcd that speaks TLS and lets only users in."""
    secret = tmp_path / "password"
    secret.write_text(f"{ROOT[1]}\n")
    with Etcd(certificates=certificates, has_users=True) as etcd:
        conf = f"protocol=https,cacert={certificates.cacert},user={ROOT[0]},password_file={secret}"
        run_two(launch, fails_once, "etcd-v3", str(etcd.endpoints[0]), conf)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v3"])
def test_etcd_with_certificates_of_its_clients(
    launch: Launch, fails_once: Path, certificates: Certificates, backend: str
) -> None:
    """A job meets in an etcd that wants a certificate of whoever comes, by either version of its API."""
    with Etcd(certificates=certificates) as etcd:
        conf = f"protocol=https,cacert={certificates.cacert},cert={certificates.cert},key={certificates.key}"
        run_two(launch, fails_once, backend, str(etcd.endpoints[0]), conf)


@pytest.mark.parametrize("backend", ["etcd", "etcd-v3"])
@pytest.mark.parametrize("killed", [0, 1], ids=["the coordinator", "another"])
def test_a_guardian_is_let_in_as_well(
    launch: Launch, worker: Worker, certificates: Certificates, backend: str, *, killed: int
) -> None:
    """When an agent is killed its guardian tells the others by the same certificate: they don't wait for a lease."""
    path = worker("say('rank', rank, 'of', os.environ['WORLD_SIZE'])\nsignal.pause()")
    with Etcd(certificates=certificates) as etcd:
        conf = f"protocol=https,cacert={certificates.cacert},cert={certificates.cert},key={certificates.key}"
        conf += ",last_call_timeout=60,keep_alive_interval=20"
        words = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={etcd.endpoints[0]}", "--rdzv-id=j")
        agents = [launch(*words, f"--rdzv-conf={conf}", "--nnodes=1:2", path)]
        wait_coordinated(backend, str(etcd.endpoints[0]), conf)
        agents.append(launch(*words, f"--rdzv-conf={conf}", "--nnodes=1:2", path))
        for agent in agents:
            agent.wait_line("rank . of 2")
        begun = time.monotonic()
        agents[killed].send(signal.SIGKILL)
        agents[1 - killed].wait_line("rank 0 of 1")
        assert time.monotonic() - begun < stretched(10)
        agents[1 - killed].send(signal.SIGTERM)
        assert agents[1 - killed].wait_exit() == 143


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ("protocol=https,cacert={0.cacert},user=root,password=wrong", "user"),
        ("protocol=https,cacert={0.cacert}", "user"),
        ("protocol=https,user=root,password=wrong", "CERTIFICATE_VERIFY_FAILED"),
    ],
    ids=["wrong password", "no user", "unknown authority"],
)
def test_an_etcd_that_refuses_us_is_named_at_once(
    launch: Launch, worker: Worker, certificates: Certificates, conf: str, expected: str
) -> None:
    """Who is not let in learns why, without waiting for join_timeout."""
    with Etcd(certificates=certificates, has_users=True) as etcd:
        place = ("--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoints[0]}", "--rdzv-id=j")
        agent = launch(*place, f"--rdzv-conf={conf.format(certificates)}", "--nnodes=2", worker("pass"))
        assert agent.wait_exit() == 201
        said = " ".join(agent.stderr.split())
        assert str(etcd.endpoints[0]) in said
        assert expected in said


def test_a_directory_that_both_nodes_see(launch: Launch, fails_once: Path, tmp_path: Path) -> None:
    """With store_type=file the endpoint is a path; when the job is over nothing of it is left there."""
    path = tmp_path / "shared" / "store"
    path.parent.mkdir()
    run_two(launch, fails_once, "c10d", str(path), "store_type=file")
    assert list(path.parent.rglob("*")) == []


def test_a_directory_that_nobody_may_write_to(launch: Launch, worker: Worker, tmp_path: Path) -> None:
    """A path that can't be used is named at once, with the reason."""
    (tmp_path / "file").write_text("no directory")
    endpoint = f"--rdzv-endpoint={tmp_path}/file/store"
    conf = "--rdzv-conf=store_type=file"
    agent = launch("--rdzv-backend=c10d", endpoint, "--rdzv-id=j", conf, "--nnodes=2", worker("pass"))
    assert agent.wait_exit() == 201
    assert "Not a directory" in " ".join(agent.stderr.split())
