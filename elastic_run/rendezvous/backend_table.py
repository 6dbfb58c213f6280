"""The rendezvous backends that come with elastic-run, as one table.

The registry, the settings, the checks of flags and the help read it. A backend is imported when a job uses it. The
handlers are made in `registry`, since a handler reads this table.
"""

from __future__ import annotations

from elastic_run.contract import DEFAULT_C10D_PORT
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from elastic_run.rendezvous.coordination.places import Place
    from elastic_run.rendezvous.leases.lease import LeaseStore
    from elastic_run.rendezvous.settings import Settings

__all__ = ["BACKENDS", "BuiltInBackend", "make_place", "read_settings"]

_ETCD_PORT = 2379
_ETCD_SETTINGS = (
    *("protocol", "ssl_cert", "ssl_cert_key", "ca_cert", "cert", "key", "cacert", "etcd_prefix"),
    *("user", "password", "password_file"),
)


@dataclass(frozen=True, slots=True)
class BuiltInBackend:
    """A rendezvous backend that comes with elastic-run.

    Args:
        make: Makes the place where the job's nodes meet; None for jobs of one node.
        default_port: Port of an endpoint that names none; -1 where an endpoint has to name it.
        settings: Keys of `--rdzv-conf` beyond those that all backends have.
        reads_timeout: Whether torch's backend of this name reads the setting `timeout`, which torch's LaunchConfig puts
            into each job's settings.
        is_shared: Whether the store outlives the job and other jobs use it, so that endpoint and id have to be given.
        prefix: Where torch's backend of this name keeps its jobs in etcd: a cluster's access rules may name it.
        etcd_version: The version of etcd's API that it speaks; 0 where the job doesn't meet in etcd.
    """

    make: Callable[[_Request], Place] | None = None
    default_port: int = -1
    settings: tuple[str, ...] = ()
    reads_timeout: bool = False
    is_shared: bool = False
    prefix: str = ""
    etcd_version: int = 0

    @property
    def has_store(self) -> bool:
        """Whether a job's nodes meet in a store; only then it has settings."""
        return self.make is not None

    @property
    def needs_port(self) -> bool:
        """Whether each endpoint has to name its port."""
        return self.has_store and self.default_port < 0


@dataclass(frozen=True, slots=True)
class _Request:
    """Where a job's nodes meet, as the user described it; see `make_place`."""

    kind: str
    endpoint: str
    run_id: str
    settings: Settings
    secret: bytes | None


def _make_c10d(request: _Request) -> Place:
    settings = request.settings
    if settings.store_type == "file":
        return _make_lease(request)
    return _make_endpoints(request, is_host=settings.is_host)


def _make_static(request: _Request) -> Place:
    return _make_endpoints(request, is_host=request.settings.rank == 0, serves_workers=True)


def _make_endpoints(request: _Request, *, is_host: bool | None, serves_workers: bool = False) -> Place:
    from elastic_run.rendezvous.addresses import parse_endpoints
    from elastic_run.rendezvous.coordination.places import Place

    return Place(
        request.kind,
        request.run_id,
        parse_endpoints(request.endpoint, BACKENDS[request.kind].default_port),
        is_host=is_host,
        secret=request.secret,
        serves_workers=serves_workers,
    )


def _make_lease(request: _Request) -> Place:
    from elastic_run.rendezvous.addresses import parse_endpoints
    from elastic_run.rendezvous.coordination.lease_place import LeasePlace

    kind, endpoint, run_id = request.kind, request.endpoint, request.run_id
    settings, secret = request.settings, request.secret

    def open_store(timeout: float) -> LeaseStore:
        return open_lease(kind, endpoint, run_id, settings, secret=secret, timeout=timeout)

    open_store(1.0).close()  # a setting that is wrong is told now
    host = None if settings.store_type == "file" else parse_endpoints(endpoint, BACKENDS[kind].default_port)[0]
    return LeasePlace(kind, run_id, endpoint, open_store, host=host, secret=secret)


def _require_python_etcd(kind: str) -> None:
    if BACKENDS[kind].etcd_version != 2:  # noqa: PLR2004 - the version's name
        return
    from importlib.util import find_spec

    spec = find_spec("etcd")
    if spec is None or spec.origin is None:  # a directory of that name is none either
        message = (
            f"rendezvous backend {kind!r} needs python-etcd: pip install 'elastic-run[etcd]' (etcd-v3 needs no package)"
        )
        raise ValueError(message)


#: Name for `--rdzv-backend` -> the backend.
BACKENDS: Mapping[str, BuiltInBackend] = {
    "static": BuiltInBackend(_make_static, settings=("rank",), reads_timeout=True),
    "c10d": BuiltInBackend(_make_c10d, default_port=DEFAULT_C10D_PORT, settings=("store_type", "is_host")),
    "etcd": BuiltInBackend(
        _make_lease,
        _ETCD_PORT,
        _ETCD_SETTINGS,
        reads_timeout=True,
        is_shared=True,
        prefix="/torchelastic/p2p",
        etcd_version=2,
    ),
    "etcd-v2": BuiltInBackend(
        _make_lease,
        _ETCD_PORT,
        _ETCD_SETTINGS,
        reads_timeout=True,
        is_shared=True,
        prefix="/torch/elastic/rendezvous",
        etcd_version=2,
    ),
    "etcd-v3": BuiltInBackend(_make_lease, _ETCD_PORT, _ETCD_SETTINGS, is_shared=True, etcd_version=3),
    "local": BuiltInBackend(),
}


def make_place(kind: str, endpoint: str, run_id: str, settings: Settings, *, secret: bytes | None = None) -> Place:
    """Return the place where the nodes of a job meet, as one agent reaches it; nothing is opened yet.

    Raises:
        ValueError: The backend is for one node, or the endpoint or a setting doesn't suit it.
    """
    make = BACKENDS[kind].make
    if make is None:
        message = f"rendezvous backend {kind!r} has no store"
        raise ValueError(message)
    return make(_Request(kind, endpoint, run_id, settings, secret))


def open_lease(
    kind: str, endpoint: str, run_id: str, settings: Settings, *, secret: bytes | None, timeout: float
) -> LeaseStore:
    """Open the lease of a job, which says which agent coordinates; nothing is asked of a server yet.

    Args:
        kind: Name of the backend: one that meets in etcd, or c10d with `store_type=file`.
        endpoint: As the user wrote it: the servers of a cluster, or a path.
        run_id: The job.
        settings: Of the rendezvous.
        secret: The secret that the members of the job share, or None.
        timeout: Seconds for each call to etcd.

    Raises:
        ValueError: The endpoint or a setting is wrong, or python-etcd is missing.
    """
    backend = BACKENDS[kind]
    if not backend.etcd_version:
        from elastic_run.rendezvous.leases.file import FileLease

        return FileLease(endpoint, run_id, secret=secret)
    _require_python_etcd(kind)
    from elastic_run.rendezvous.addresses import parse_endpoints
    from elastic_run.rendezvous.leases.etcd_servers import EtcdServers, read_tls, read_user

    conf = settings.backend
    servers = EtcdServers(parse_endpoints(endpoint, backend.default_port), timeout, read_tls(conf))
    user, prefix = read_user(conf), str(conf.get("etcd_prefix", backend.prefix)).strip("/")
    prefix = f"{prefix}/" if prefix else ""
    if backend.etcd_version == 2:  # noqa: PLR2004 - the version's name
        from elastic_run.rendezvous.leases.etcd_v2 import EtcdV2Lease

        return EtcdV2Lease(servers, run_id, prefix=prefix, user=user, secret=secret)
    from elastic_run.rendezvous.leases.etcd_v3 import EtcdV3Lease

    return EtcdV3Lease(servers, run_id, prefix=prefix, user=user, secret=secret)


def read_settings(kind: str, config: Mapping[str, Any]) -> Settings:
    """Return a backend's settings, checked and with defaults; see `parse_settings`."""
    from elastic_run.rendezvous.settings import parse_settings

    backend = BACKENDS[kind]
    return parse_settings(kind, config, backend.settings, reads_timeout=backend.reads_timeout)
