"""Rendezvous handlers of others: entry points, torch's own handlers, python-etcd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, etcd_rendezvous, etcd_rendezvous_backend

from elastic_run.rendezvous.settings import open_lease, read_settings
from elastic_run.store.errors import StoreAccessError
from tests.support.etcd import Etcd, make_certificates
from tests.support.sessions import free_port
from tests.support.wait import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Callable

    import etcd

    from tests.support.launch import Launch, Worker


_PACKAGES = Path(__file__).parents[1].parent / "data" / "rendezvous_plugin"
_PROGRAM = """
import json, sys
from elastic_run.rendezvous import RendezvousParameters, get_rendezvous_handler, rendezvous_handler_registry

backend, settings = sys.argv[1], json.loads(sys.argv[2])
try:
    handler = get_rendezvous_handler(RendezvousParameters(backend, "host-1", "job-1", 1, 4, **settings))
    info = handler.next_rendezvous().bootstrap_store_info
    found = [type(handler).__module__, handler.get_run_id(), info.master_addr, info.master_port]
except Exception as error:
    found = [type(error).__name__, str(error)]
loaded = sorted({"meeting_place", "broken_place", "importlib.metadata", "torch"} & set(sys.modules))
print(json.dumps([found, loaded]))
"""


def _install(directory: Path, package: str, version: str, entry_points: dict[str, str]) -> None:
    """Write the metadata that an installer would write for a package."""
    metadata = directory / f"{package}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[torchrun.handlers]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install a good package and a broken one, each of which brings backends."""
    _install(
        tmp_path,
        "meeting_place",
        "1.0",
        {"meeting-place": "meeting_place:get_handler", "c10d": "meeting_place:get_handler"},
    )
    _install(
        tmp_path,
        "broken_place",
        "2.5",
        {"broken": "broken_place:get_handler", "no-function": "meeting_place:none", "no-creator": "builtins:list"},
    )
    return tmp_path


def _ask(site: Path, backend: str, **settings: object) -> tuple[list[object], list[str]]:
    """Ask a fresh interpreter for a backend: what it found, and which of the interesting modules it loaded."""
    path = os.pathsep.join([str(_PACKAGES), str(site), str(Path(__file__).parents[1].parent.parent)])
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, backend, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ended.stderr == ""
    found, loaded = json.loads(ended.stdout)
    return found, loaded


def test_a_plugin_is_found_by_its_name(site: Path) -> None:
    """A package's handler is found under its entry point's name and gets all parameters; no other is loaded."""
    found, loaded = _ask(site, "meeting-place", port="1234")
    assert found == ["meeting_place", "job-1", "host-1", 1234]
    assert loaded == ["importlib.metadata", "meeting_place"]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "broken",
            "broken_place:get_handler) can't be loaded: ModuleNotFoundError: No module named 'a_missing_library'",
        ),
        (
            "no-function",
            "meeting_place:none) can't be loaded: AttributeError: module 'meeting_place' has no attribute 'none'",
        ),
        (
            "no-creator",
            "builtins:list) returned [], not a function that builds a handler",
        ),
    ],
)
def test_a_broken_plugin_is_named_with_its_package_and_error(site: Path, backend: str, message: str) -> None:
    """A plug-in that can't be loaded is one line that names the backend, the package and what went wrong."""
    found, _ = _ask(site, backend)
    assert found == ["ValueError", f"rendezvous backend {backend!r}: plug-in broken_place 2.5 ({message}"]


def test_a_built_in_backend_comes_before_plugins(site: Path) -> None:
    """A plug-in can't take a built-in name, and for a built-in name the installed packages are not even looked at."""
    found, loaded = _ask(site, "local")
    assert found == ["ValueError", "rendezvous backend 'local' is for one node, not for up to 4"]
    assert loaded == []


def test_an_unknown_backend_is_answered_with_plugins_too(site: Path) -> None:
    """The list of known backends holds those of installed packages, without loading them."""
    found, loaded = _ask(site, "meeting-plaice")
    assert str(found[1]).startswith("the rendezvous backend 'meeting-plaice' is not registered; known: ")
    assert "broken, c10d, " in str(found[1])
    assert loaded == ["importlib.metadata"]


# --- torch's own rendezvous -------------------------------------------------------------------------------------------
@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Install the plug-in, and keep torch's look-ups of names from waiting for a name server."""
    metadata = tmp_path / "torchs_own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchs_own\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[torchrun.handlers]\ntorchs-own = torchs_own:get_handler\n"
        "creator-itself = creator_itself:create_rendezvous_handler\n"
    )
    return {"PYTHONPATH": os.pathsep.join((str(_PACKAGES), str(tmp_path))), "RES_OPTIONS": "attempts:0"}


@pytest.mark.long
def test_nodes_of_different_size_and_a_restart(launch: Launch, worker: Worker, environment: dict[str, str]) -> None:
    """Two agents meet through torch's handler, agree on the ranks of 1 + 2 workers, and restart together."""
    script = worker(
        "world, local_rank, size = (os.environ[name] for name in ('WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'))\n"
        "say(f'rank {rank} of {world}')\n"
        "mark = f'{sys.argv[1]}.{size}.{local_rank}'\n"
        "if not os.path.exists(mark):\n"
        "    open(mark, 'w').close()\n"
        "    if size == '2': signal.pause()\n"
        "    while not all(os.path.exists(f'{sys.argv[1]}.2.{other}') for other in '01'): time.sleep(0.01)\n"
        "    sys.exit(3)\n"
    )
    mark = str(Path(script).with_name("mark"))
    common = ("--nnodes=2", "--rdzv-backend=torchs-own", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j")
    conf = "--rdzv-conf=last_call_timeout=1"
    first = launch(*common, conf, "--nproc-per-node=2", "--max-restarts=1", script, mark, env=environment)
    second = launch(*common, conf, "--nproc-per-node=1", "--max-restarts=1", script, mark, env=environment)
    assert first.wait_exit() == 0, first.stderr
    assert second.wait_exit() == 0, second.stderr
    assert "stopping the workers: nodes wait to join" in first.stderr
    # Torch's registry loads the plug-in in the middle of its own import, and need not tell the user.
    assert "Traceback" not in first.stderr + second.stderr
    lines = sorted((first.stdout + second.stdout).splitlines())
    assert len(lines) == 6, lines
    assert set(lines) == {f"rank {rank} of 3" for rank in range(3)}


@pytest.mark.long
@pytest.mark.parametrize("compat", ["", pytest.param("1", marks=pytest.mark.long)])
def test_an_entry_point_that_is_the_creator_itself(
    launch: Launch, worker: Worker, environment: dict[str, str], compat: str
) -> None:
    """A plug-in whose entry point takes the parameters, and asks for torch's class of them, launches a job."""
    script = worker("say(f'rank {rank} of', os.environ['WORLD_SIZE'])\n")
    place = ("--rdzv-backend=creator-itself", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j")
    job = launch(*place, "--nproc-per-node=2", script, env={**environment, "ELASTIC_RUN_COMPAT": compat})
    assert job.wait_exit() == 0, job.stderr
    assert "Traceback" not in job.stderr
    assert sorted(job.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.long
def test_a_plug_in_that_refuses_is_quoted(launch: Launch, worker: Worker, environment: dict[str, str]) -> None:
    """Where a plug-in's creator raises torch's error the line has its words and its cause, and the code is 201."""
    place = ("--rdzv-backend=creator-itself", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=j")
    job = launch(*place, "--rdzv-conf=refuse=1", worker("say('ran')"), env=environment)
    assert job.wait_exit() == 201, job.stderr
    assert job.stdout == ""
    said = (
        "error: the rendezvous plug-in makes no handler: no luck: refuse is given (LOGLEVEL=DEBUG shows the traceback)"
    )
    assert job.stderr.splitlines()[-1] == f"elastic-run: {said}"


# --- python-etcd ------------------------------------------------------------------------------------------------------
#: Keys of `--rdzv-conf`, as each of torch's two backends calls them.
_NAMES_OF_ETCD = ("cacert", "cert", "key")
_NAMES_OF_ETCD_V2 = ("ca_cert", "ssl_cert", "ssl_cert_key")


@pytest.mark.system
@pytest.mark.parametrize(
    ("backend", "names", "make_theirs"),
    [
        ("etcd", _NAMES_OF_ETCD, etcd_rendezvous._create_etcd_client),
        ("etcd-v2", _NAMES_OF_ETCD_V2, etcd_rendezvous_backend._create_etcd_client),
    ],
)
def test_settings_mean_what_they_mean_to_torch(
    tmp_path: Path, backend: str, names: tuple[str, ...], make_theirs: Callable[[RendezvousParameters], etcd.Client]
) -> None:
    """With the same `--rdzv-conf` torch's client and ours reach the same etcd, which wants a certificate of both."""
    certificates = make_certificates(tmp_path)
    files = (certificates.cacert, certificates.cert, certificates.key)
    conf = {"protocol": "https", **dict(zip(names, files, strict=True))}
    with Etcd(certificates=certificates) as server:
        endpoint = str(server.endpoints[0])
        theirs = make_theirs(RendezvousParameters(backend, endpoint, "job", 1, 1, None, **conf))
        settings = read_settings(backend, {**conf, "etcd_prefix": "/custom", "timeout": "77"})
        assert settings.job_settings["join_timeout"] == 77
        lease = open_lease(backend, endpoint, "job", settings, secret=None, timeout=DEADLINE)
        assert lease.acquire("a node", 10.0) is not None
        assert theirs.read("/custom/elastic-run/job/coordinator").value.endswith("a node")
        without = read_settings(backend, {key: value for key, value in conf.items() if key not in names[1:]})
        lease = open_lease(backend, endpoint, "job", without, secret=None, timeout=DEADLINE)
        with pytest.raises(StoreAccessError, match="certificate"):
            lease.read()


@pytest.mark.parametrize("spec", ["None", "importlib.machinery.ModuleSpec('etcd', None)"], ids=["none", "directory"])
def test_without_python_etcd_one_line_names_the_extra(
    spec: str, launch: Launch, worker: Worker, tmp_path: Path
) -> None:
    """Exit 2, before anything starts; Python takes a directory of that name for a package without content."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: {spec} if name == 'etcd' else found(name, *rest)\n",
        encoding="utf-8",
    )
    flags = ("--nnodes=1:2", "--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=job")
    launcher = launch(*flags, worker("say('running')"), env={"PYTHONPATH": str(tmp_path)})
    assert launcher.wait_exit() == 2
    assert launcher.stderr == (
        "elastic-run: error: --rdzv-backend: rendezvous backend 'etcd' needs python-etcd: "
        "pip install 'elastic-run[etcd]' (etcd-v3 needs no package)\n"
    )
