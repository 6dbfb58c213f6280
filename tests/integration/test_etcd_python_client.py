"""How a job lies in version 2 of etcd, whose client is python-etcd: keys, settings, and what is wrong around it."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING

import etcd
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, etcd_rendezvous, etcd_rendezvous_backend

from elastic_run.rendezvous.backend_table import make_backend, read_settings
from elastic_run.store.errors import SILENT, StoreAccessError, StoreConnectionError
from elastic_run.store.jobstore.api import LEFT_BEHIND
from elastic_run.store.jobstore.etcd_v2 import EtcdV2JobStore
from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client, _Pool
from elastic_run.store.jobstore.http_client import Credentials, Endpoint, HttpClient
from elastic_run.store.jobstore.http_connection import Answer
from tests.support.etcd import Etcd, make_certificates
from tests.support.store import LOOPBACK
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.support.launch import Launched

_LEASE = 2.5
_JOB = "/custom/elastic-run/job"
#: Keys of `--rdzv-conf`, as each of torch's two backends calls them.
_NAMES_OF_ETCD = ("cacert", "cert", "key")
_NAMES_OF_ETCD_V2 = ("ca_cert", "ssl_cert", "ssl_cert_key")


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    """Start an etcd of one member."""
    with Etcd() as started:
        yield started


@pytest.fixture
def client(server: Etcd) -> etcd.Client:
    """Return python-etcd's client, made as torch makes it."""
    return etcd.Client(server.endpoints[0].host, server.endpoints[0].port, allow_reconnect=True)


@pytest.fixture
def store(server: Etcd) -> Iterator[EtcdV2JobStore]:
    """Return our store, with `etcd_prefix=/custom`."""
    with EtcdV2JobStore(EtcdV2Client(server.client()), "job", lease=_LEASE, prefix="custom/") as opened:
        yield opened
        opened.remove_job()


# --- keys ------------------------------------------------------------------------------------------------------------
def test_it_reads_our_keys(client: etcd.Client, store: EtcdV2JobStore) -> None:
    """It finds each key below etcd_prefix and the run id, with our value as text, at the index that we know."""
    store.write({"d/0": b"value"})
    found = client.read(f"{_JOB}/k/d/0")
    assert b64decode(found.value) == b"+value"
    ours = store._api.read_directory("custom/elastic-run/job/k/d/")
    assert [(item.created, item.changed) for item in ours.items] == [(found.createdIndex, found.modifiedIndex)]
    assert ours.number == found.etcd_index


def test_it_reads_our_stream_in_our_order(client: etcd.Client, store: EtcdV2JobStore) -> None:
    """It lists what was appended in the order in which it was."""
    for value in (b"one", b"two", b"three"):
        store.append("facts", value)
    found = client.read(f"{_JOB}/s/facts", recursive=True, sorted=True)
    assert [b64decode(child.value)[1:] for child in found.children] == [b"one", b"two", b"three"]


def test_a_run_id_is_no_path_and_no_escape(server: Etcd, client: etcd.Client) -> None:
    """What paths and URLs give a meaning to stands in the key as it is, so that older nodes of a job find it."""
    for run_id, name in (("a/../b", "a%2F..%2Fb"), ("50%2F?#", "50%252F%3F%23"), ("ü é", "%C3%BC%20%C3%A9")):
        with EtcdV2JobStore(EtcdV2Client(server.client()), run_id, lease=_LEASE) as store:
            store.write({"d/0": b"value"})
            assert [node.key for node in client.read("/elastic-run").children] == [f"/elastic-run/{name}"]
            assert (store.get(["d/0"]), store.wait("d/0", DEADLINE)) == ([b"value"], b"value")
            store.remove_job()


def test_it_sees_our_times_to_live(client: etcd.Client, store: EtcdV2JobStore) -> None:
    """A heartbeat has the lease as its time to live, in whole seconds, and is gone after it; the job has a day."""
    store.heartbeat("n")
    assert 0 < client.read(f"{_JOB}/b/n").ttl <= 3
    job = {node["key"]: node for node in client.read("/custom/elastic-run")._children}[_JOB]
    assert LEFT_BEHIND - 60 < job["ttl"] <= LEFT_BEHIND

    def is_gone() -> bool:
        try:
            client.read(f"{_JOB}/b/n")
        except etcd.EtcdKeyNotFound:
            return True
        return False

    wait_until(is_gone)


# --- what the user says ----------------------------------------------------------------------------------------------
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
        endpoint = server.endpoints[0]
        theirs = make_theirs(RendezvousParameters(backend, str(endpoint), "job", 1, 1, None, **conf))
        settings = read_settings(backend, {**conf, "etcd_prefix": "/custom", "timeout": "77"})
        assert settings.job_settings["join_timeout"] == 77
        made = make_backend(backend, str(endpoint), "job", settings)
        with closing(made.open(DEADLINE)) as store:
            store.write({"d/0": b"value"})
            assert b64decode(theirs.read(f"{_JOB}/k/d/0").value) == b"+value"
        without = read_settings(backend, {key: value for key, value in conf.items() if key not in names[1:]})
        made = make_backend(backend, str(endpoint), "job", without)
        with closing(made.open(DEADLINE)) as store, pytest.raises(StoreAccessError, match="certificate"):
            store.get(["d/0"])


# --- what is wrong around it -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", ["None", "importlib.machinery.ModuleSpec('etcd', None)"], ids=["none", "directory"])
def test_without_python_etcd_one_line_names_the_extra(
    spec: str, launch: Callable[..., Launched], worker: Callable[[str], Path], tmp_path: Path
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


def test_a_user_may_have_letters_of_any_alphabet() -> None:
    """UTF-8 is what etcd takes; python-etcd itself would send Latin-1, or fail."""
    asked: list[Mapping[str, str]] = []

    def ask(_method: str, _url: str, _body: bytes, headers: Mapping[str, str]) -> Answer:
        asked.append(headers)
        return Answer(200, {}, b"")

    pool = _Pool(SimpleNamespace(ask=ask), Credentials("jürgen", "пароль"))  # type: ignore[arg-type] # all that it uses
    pool.urlopen("GET", "http://127.0.0.1/v2/keys/x", headers={}, timeout=1.0)
    assert b64decode(asked[0]["Authorization"].removeprefix("Basic ")).decode() == "jürgen:пароль"


def test_no_other_backend_imports_python_etcd() -> None:
    """Its import would take a tenth of a second."""
    stores = ("etcd_v3", "etcd_v3_client", "c10d", "file", "signed")
    imports = "".join(f"import elastic_run.store.jobstore.{name}\n" for name in stores)
    program = f"import sys\n{imports}import elastic_run.rendezvous.coordination.handler\nprint('etcd' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"False\n"


class Answering:
    """A server that gives every connection the same answer, in pieces with a pause between them."""

    def __init__(self, *pieces: bytes, pause: float = 0.0) -> None:
        self._pieces, self._pause = pieces, pause
        self._listener = socket.create_server((LOOPBACK, 0))
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> HttpClient:
        self._threads[0].start()
        return HttpClient([Endpoint(LOOPBACK, self._listener.getsockname()[1])], 1.0)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                thread = threading.Thread(target=self._answer, args=(self._listener.accept()[0],))
                self._threads.append(thread)
                thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            for piece in self._pieces:
                connection.sendall(piece)
                self._is_over.wait(self._pause)


def test_a_stranger_s_404_is_no_missing_key() -> None:
    """python-etcd takes every 404 for a key that isn't there; one without etcd's number is a refusal."""
    body = b'{"message": "no such page"}'
    with (
        Answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)) as http,
        EtcdV2JobStore(EtcdV2Client(http), "job", lease=_LEASE) as store,
        pytest.raises(StoreAccessError, match="no such page"),
    ):
        store.create("d/0", b"value")


def test_a_watch_that_ends_without_news_says_so() -> None:
    """Else who waits would hear nothing until the connection breaks."""
    with (
        Answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", pause=DEADLINE) as http,
        closing(http),
        pytest.raises(StoreConnectionError, match="ended a watch"),
    ):
        EtcdV2Client(http).watch("d/", 1).next_items(DEADLINE)


@pytest.mark.parametrize(
    "ask",
    [lambda api: api.read("k"), lambda api: api.watch("d/", 1).next_items(DEADLINE)],
    ids=["request", "watch"],
)
def test_an_answer_byte_by_byte_is_given_up_at_the_deadline(
    ask: Callable[[EtcdV2Client], object], caplog: pytest.LogCaptureFixture
) -> None:
    """A timeout of urllib3 would begin anew with each byte; and python-etcd logs nothing of it."""
    caplog.set_level(logging.WARNING)
    with Answering(*([b"HTTP/1.1 200 OK\r\n"] + 100 * [b"X: y\r\n"]), pause=0.2) as http:
        api = EtcdV2Client(http)
        begun = time.monotonic()
        with pytest.raises(StoreConnectionError) as caught:
            ask(api)
    assert caught.value.reason == SILENT
    assert time.monotonic() - begun < stretched(5.0)
    assert not caplog.records
