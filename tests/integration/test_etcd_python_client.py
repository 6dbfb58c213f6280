"""What python-etcd, torch's client of version 2, makes of what we write, and we of what it writes."""

from __future__ import annotations

import threading
import time
from base64 import b64decode, b64encode
from contextlib import closing
from typing import TYPE_CHECKING, Any

import etcd
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, etcd_rendezvous, etcd_rendezvous_backend

from elastic_run.rendezvous.backend_table import make_backend, read_settings
from elastic_run.store.errors import StoreAccessError
from elastic_run.store.jobstore.api import LEFT_BEHIND
from elastic_run.store.jobstore.etcd_v2 import EtcdV2JobStore
from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client
from tests.support.etcd import Etcd, make_certificates
from tests.support.wait import DEADLINE, stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


def text(value: bytes) -> str:
    """Return what lies in etcd for a small value of ours."""
    return b64encode(b"+" + value).decode()


# --- what we write ---------------------------------------------------------------------------------------------------
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


def test_its_compare_and_swap_counts_our_writes(client: etcd.Client, store: EtcdV2JobStore) -> None:
    """It can't make a key that we made, nor swap one that we changed since it looked; else it can."""
    assert store.create("d/0", b"ours") == b"ours"
    with pytest.raises(etcd.EtcdAlreadyExist):
        client.write(f"{_JOB}/k/d/0", "its", prevExist=False)
    seen = client.read(f"{_JOB}/k/d/0").modifiedIndex
    store.write({"d/0": b"changed"})
    with pytest.raises(etcd.EtcdCompareFailed):
        client.write(f"{_JOB}/k/d/0", "its", prevIndex=seen)
    client.write(f"{_JOB}/k/d/0", text(b"its"), prevIndex=client.read(f"{_JOB}/k/d/0").modifiedIndex)
    assert store.get(["d/0"]) == [b"its"]


def test_its_watch_brings_what_we_write(client: etcd.Client, store: EtcdV2JobStore) -> None:
    """A watch of its from an index on brings the write of ours that came with that index, also after the fact."""
    store.write({"d/0": b"before"})
    index = client.read(f"{_JOB}/k/d/0").modifiedIndex
    found: list[Any] = []
    path = f"{_JOB}/k/d"
    watching = threading.Thread(
        target=lambda: found.append(client.watch(path, index=index + 1, recursive=True, timeout=DEADLINE))
    )
    watching.start()
    store.write({"d/1": b"news"})
    watching.join(DEADLINE)
    assert [(one.key, one.value) for one in found] == [(f"{path}/1", text(b"news"))]
    again = client.watch(path, index=index + 1, recursive=True, timeout=DEADLINE)
    assert again.modifiedIndex == found[0].modifiedIndex


# --- what it writes --------------------------------------------------------------------------------------------------
def test_we_see_what_it_writes(client: etcd.Client, store: EtcdV2JobStore) -> None:
    """Keys, streams and heartbeats of its are read, and a key that it made first stays its own."""
    client.write(f"{_JOB}/k/d/0", text(b"its"), prevExist=False)
    client.write(f"{_JOB}/s/facts", text(b"fact"), append=True)
    client.write(f"{_JOB}/b/n", text(b"1"), ttl=1)
    assert store.get(["d/0", "d/1"]) == [b"its", None]
    assert store.create("d/0", b"ours") == b"its"
    assert store.read("facts", 0, DEADLINE)[0] == [b"fact"]
    assert store.read_heartbeats(["n"]) != [None]
    wait_until(lambda: store.read_heartbeats(["n"]) == [None])


def test_our_waits_end_with_what_it_writes(client: etcd.Client, store: EtcdV2JobStore) -> None:
    """Who waits for a key of ours, or for a stream, is woken by its writing it."""
    store.append("facts", b"before")
    _, position = store.read("facts", 0, DEADLINE)
    for path, wait in (
        (f"{_JOB}/k/d/0", lambda: store.wait("d/0", DEADLINE)),
        (f"{_JOB}/s/facts/00000000009999999999", lambda: store.read("facts", position, DEADLINE)[0]),
    ):
        writing = threading.Timer(0.1, lambda path=path: client.write(path, text(b"its")))
        writing.start()
        begun = time.monotonic()
        assert wait() in (b"its", [b"its"])
        assert time.monotonic() - begun < stretched(DEADLINE / 2)
        writing.join()


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
