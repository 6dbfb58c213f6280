"""A real etcd of one or three members on loopback: plain, with TLS, with users; members can be killed and stopped."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_run.rendezvous.coordination.etcd import EtcdServers
from elastic_run.rendezvous.settings import read_tls
from elastic_run.store.errors import StoreConnectionError
from tests.support.sessions import free_port
from tests.support.store import LOOPBACK
from tests.support.system import require_marker, starter
from tests.support.wait import wait_until

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

_WAIT_LIMIT = 5.0
#: Who may do everything where users are on.
ROOT = ("root", "secret of root")


class Endpoint(NamedTuple):
    """Where a member is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Certificates:
    """Files that openssl made.

    Args:
        cacert: The authority's certificate.
        cert: A certificate for loopback, good for servers and clients.
        key: Its key.
    """

    cacert: str
    cert: str
    key: str


@starter
def make_certificates(directory: Path) -> Certificates:
    """Make an authority and a certificate that it has signed."""
    require_marker("openssl")
    at = {name: str(directory / name) for name in ("ca.pem", "ca.key", "cert.pem", "cert.key", "request", "names")}
    Path(at["names"]).write_text(f"subjectAltName=IP:{LOOPBACK},DNS:localhost\n", encoding="utf-8")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")
    for command in (
        ("req", "-x509", *new_key, at["ca.key"], "-out", at["ca.pem"], "-subj", "/CN=authority", "-days", "2"),
        ("req", *new_key, at["cert.key"], "-out", at["request"], "-subj", "/CN=member"),
        (
            *("x509", "-req", "-in", at["request"], "-CA", at["ca.pem"], "-CAkey", at["ca.key"], "-CAcreateserial"),
            *("-out", at["cert.pem"], "-days", "2", "-extfile", at["names"]),
        ),
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return Certificates(at["ca.pem"], at["cert.pem"], at["cert.key"])


@starter
class Etcd:
    """A cluster that lives as long as the `with` block.

    Args:
        members: How many.
        certificates: TLS with them, and clients must have one too; plain HTTP if None.
        has_users: Whether clients must name a user (`ROOT` is one).

    Attributes:
        endpoints: Where the members are.
        tls: How to talk to them.
    """

    def __init__(self, members: int = 1, *, certificates: Certificates | None = None, has_users: bool = False) -> None:
        require_marker("etcd")
        self._certificates = certificates
        self._has_users = has_users
        self._files = ExitStack()
        self._directory = Path(self._files.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(2 * members)]
        self.endpoints = [Endpoint(LOOPBACK, port) for port in ports[:members]]
        self._peers = [f"http://{LOOPBACK}:{port}" for port in ports[members:]]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.tls: ssl.SSLContext | None = None
        if certificates is not None:
            own = () if has_users else (certificates.cert, certificates.key)
            conf = {"protocol": "https", "cacert": certificates.cacert}
            self.tls = read_tls(conf | dict(zip(("cert", "key"), own, strict=False)))

    def __enter__(self) -> Etcd:
        try:
            for member in range(len(self.endpoints)):
                self.revive(member)
            for member in range(len(self.endpoints)):
                self.wait_healthy(member)
            if self._has_users:
                self._turn_users_on()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for member in tuple(self._processes):
            self.kill(member)
        self._files.close()

    def client(self, member: int | None = None, timeout: float = _WAIT_LIMIT) -> EtcdServers:
        """Return a client of one member, or of all."""
        return EtcdServers(self.endpoints if member is None else [self.endpoints[member]], timeout, self.tls)

    # --- members -------------------------------------------------------------------------------------------------
    def revive(self, member: int) -> None:
        """Start a member, with the data that it had."""
        scheme = "http" if self._certificates is None else "https"
        peers = ",".join(f"m{number}={peer}" for number, peer in enumerate(self._peers))
        url = f"{scheme}://{self.endpoints[member]}"
        command = ["etcd", "--name", f"m{member}", "--data-dir", str(self._directory / f"m{member}"), "--enable-v2"]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url]
        command += ["--listen-peer-urls", self._peers[member], "--initial-advertise-peer-urls", self._peers[member]]
        command += ["--initial-cluster", peers, "--heartbeat-interval", "50", "--election-timeout", "500"]
        command += ["--unsafe-no-fsync", "--logger", "zap"]
        if self._certificates is not None:
            command += ["--cert-file", self._certificates.cert, "--key-file", self._certificates.key]
            # With users on, etcd's gateway refuses clients whose certificate has a name.
            command += [] if self._has_users else ["--trusted-ca-file", self._certificates.cacert, "--client-cert-auth"]
        with (self._directory / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, member: int) -> None:
        """Kill a member, as a power cut does."""
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    def pause(self, member: int) -> None:
        """Stop a member: its connections stay, and say nothing."""
        os.kill(self._processes[member].pid, signal.SIGSTOP)

    def resume(self, member: int) -> None:
        """Let a member go on."""
        os.kill(self._processes[member].pid, signal.SIGCONT)

    def set_full(self, *, is_full: bool) -> None:
        """Let the cluster refuse writes and answer reads, as etcd does when its quota is used up, or end that."""
        action = "ACTIVATE" if is_full else "DEACTIVATE"
        leader = self._get(0, "POST", "/v3/maintenance/status")["header"]["member_id"]
        self._get(0, "POST", "/v3/maintenance/alarm", action=action, alarm="NOSPACE", memberID=leader)

    def wait_healthy(self, member: int) -> None:
        """Wait until a member serves."""

        def is_healthy() -> bool:
            process = self._processes[member]
            log = self._directory / f"m{member}.log"
            assert process.poll() is None, f"etcd ended with {process.returncode}: {log.read_text()[-2000:]}"
            return self._get(member, "GET", "/health").get("health") == "true"

        wait_until(is_healthy, what=f"member {member} of etcd is healthy")

    def find_leader(self) -> int:
        """Return the number of the leader, once there is one."""

        def look() -> list[int]:
            found = []
            for member in self._processes:
                status = self._get(member, "POST", "/v3/maintenance/status")
                if status.get("leader", "0") == status.get("header", {}).get("member_id"):
                    found.append(member)
            return found

        return wait_until(look, what="etcd has a leader")[0]

    def list_keys(self) -> list[str]:
        """Return all keys of version 3."""
        everything = base64.b64encode(b"\0").decode()
        found = self._get(0, "POST", "/v3/kv/range", key=everything, range_end=everything, keys_only=True)
        return [base64.b64decode(item["key"]).decode() for item in found.get("kvs", [])]

    def delete_keys(self, part: str) -> None:
        """Delete the keys of version 3 that contain this, as somebody does who makes room."""
        for key in self.list_keys():
            if part in key:
                encoded = base64.b64encode(key.encode()).decode()
                self._get(0, "POST", "/v3/kv/deleterange", key=encoded)

    def _get(self, member: int, method: str, path: str, **request: object) -> dict[str, Any]:
        client = self.client(member, timeout=1.0)
        try:
            body = client.ask(method, path, json.dumps(request).encode(), {}, lambda answer: answer.body)
            document: dict[str, Any] = json.loads(body)
        except (StoreConnectionError, ValueError):
            return {}
        return document

    def _turn_users_on(self) -> None:
        name, password = ROOT
        for path, request in (
            ("user/add", {"name": name, "password": password}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": name, "role": "root"}),
            ("user/add", {"name": "guest", "password": "guest"}),
            ("enable", {}),
        ):
            self._get(0, "POST", f"/v3/auth/{path}", **request)
