"""Every kind of job store, each in front of the real thing, under one name each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from elastic_run.core.job.config import JobConfig
from elastic_run.store.jobstore.c10d import C10dJobStore
from elastic_run.store.jobstore.etcd_v2 import EtcdV2JobStore
from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client
from elastic_run.store.jobstore.etcd_v3 import EtcdV3JobStore
from elastic_run.store.jobstore.etcd_v3_client import EtcdV3Client
from elastic_run.store.jobstore.file import FileJobStore
from elastic_run.store.jobstore.http_client import Credentials
from elastic_run.store.jobstore.memory import JobSpace, MemoryJobStore
from elastic_run.store.jobstore.signed import SignedStore
from elastic_run.store.tcpstore import agent_client
from elastic_run.store.tcpstore.token_proof import ClientAuthentication
from tests.support.etcd import ROOT, Etcd, make_certificates
from tests.support.store import LOOPBACK, ServedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from elastic_run.store.jobstore.api import JobStore

    Opener: TypeAlias = Callable[[str], JobStore]

#: Seconds, where a test does not say another.
LEASE = JobConfig().lease
_TORCHS_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def torchs_server(backend: str = "libuv") -> Iterator[int]:
    """Serve torch's own TCPStore in a child process; gives its port."""
    env = {**os.environ, "RES_OPTIONS": "attempts:0"}
    command = [sys.executable, "-c", _TORCHS_SERVER, backend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


@contextmanager
def memory() -> Iterator[Opener]:
    """Give a space for each job."""
    spaces: dict[str, JobSpace] = {}
    yield lambda run_id: MemoryJobStore(spaces.setdefault(run_id, JobSpace()), run_id)


@contextmanager
def our_server() -> Iterator[Opener]:
    """Serve TCPStore's protocol with our server."""
    with ServedStore() as served:
        yield lambda run_id: C10dJobStore(LOOPBACK, served.port, run_id)


@contextmanager
def torch_libuv() -> Iterator[Opener]:
    """Serve it with torch's."""
    with torchs_server() as port:
        yield lambda run_id: C10dJobStore(LOOPBACK, port, run_id)


@contextmanager
def torch_older() -> Iterator[Opener]:
    """Serve it with torch's older one, whose clients look again ten times as often here."""
    with torchs_server("older") as port, mock.patch.object(agent_client, "_WAIT_AGAIN", agent_client._WAIT_AGAIN / 10):
        yield lambda run_id: C10dJobStore(LOOPBACK, port, run_id)


@contextmanager
def etcd_v3() -> Iterator[Opener]:
    """Start an etcd of one member."""
    with Etcd() as etcd:
        yield lambda run_id: EtcdV3JobStore(EtcdV3Client(etcd.client()), run_id, lease=LEASE)


@contextmanager
def file() -> Iterator[Opener]:
    """Give a directory."""
    with tempfile.TemporaryDirectory() as directory:
        yield lambda run_id: FileJobStore(f"{directory}/store", run_id)


@contextmanager
def etcd_v2() -> Iterator[Opener]:
    """Start an etcd of one member."""
    with Etcd() as etcd:
        yield lambda run_id: EtcdV2JobStore(EtcdV2Client(etcd.client()), run_id, lease=LEASE)


@contextmanager
def etcd_v2_of_three() -> Iterator[Opener]:
    """Start an etcd of three members, with TLS on both sides."""
    with tempfile.TemporaryDirectory() as directory, Etcd(3, certificates=make_certificates(Path(directory))) as etcd:
        yield lambda run_id: EtcdV2JobStore(EtcdV2Client(etcd.client()), run_id, lease=LEASE, prefix="/torchelastic/")


@contextmanager
def etcd_v3_of_three() -> Iterator[Opener]:
    """Start an etcd of three members."""
    with Etcd(3) as etcd:
        yield lambda run_id: EtcdV3JobStore(EtcdV3Client(etcd.client()), run_id, lease=LEASE)


@contextmanager
def etcd_v3_guarded() -> Iterator[Opener]:
    """Start an etcd with TLS and users."""
    with tempfile.TemporaryDirectory() as directory:
        certificates = make_certificates(Path(directory))
        with Etcd(certificates=certificates, has_users=True) as etcd:
            yield lambda run_id: EtcdV3JobStore(EtcdV3Client(etcd.client(), Credentials(*ROOT)), run_id, lease=LEASE)


@contextmanager
def signed() -> Iterator[Opener]:
    """Serve values that are signed, to who proves the token."""
    token = b"secret"
    with ServedStore(token) as served:
        proving = ClientAuthentication(token)
        yield lambda run_id: SignedStore(C10dJobStore(LOOPBACK, served.port, run_id, authentication=proving), token)


STORES: dict[str, Callable[[], AbstractContextManager[Opener]]] = {
    "memory": memory,
    "c10d": our_server,
    "c10d-signed": signed,
    "c10d-torch": torch_libuv,
    "c10d-torch-older": torch_older,
    "file": file,
    "etcd-v2": etcd_v2,
    "etcd-v2-three": etcd_v2_of_three,
    "etcd-v3": etcd_v3,
    "etcd-v3-three": etcd_v3_of_three,
    "etcd-v3-guarded": etcd_v3_guarded,
}
#: Those that need no program beside Python.
WITHOUT_ETCD = [name for name in STORES if not name.startswith("etcd")]
