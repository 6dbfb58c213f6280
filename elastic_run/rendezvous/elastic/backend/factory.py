"""From a backend's name and the user's words to its `Backend`: the one place that knows all kinds of stores."""

from __future__ import annotations

from elastic_run.rendezvous.elastic.addresses import parse_endpoints
from elastic_run.rendezvous.elastic.backend.base import SharedBackend
from elastic_run.rendezvous.elastic.backend.tcp import TcpBackend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.rendezvous.elastic.backend.base import Backend
    from elastic_run.rendezvous.settings import Settings
    from elastic_run.store.jobstore.api import JobStore

__all__ = ["DEFAULT_PORTS", "make_backend"]

DEFAULT_PORTS = {"c10d": 29400, "etcd": 2379, "etcd-v2": 2379, "etcd-v3": 2379, "static": -1}


def make_backend(
    kind: str,
    endpoint: str,
    run_id: str,
    settings: Settings,
    *,
    is_host: bool | None = None,
    secret: bytes | None = None,
) -> Backend:
    """Make a backend.

    Args:
        kind: Its name, such as `c10d`.
        endpoint: As the user wrote it.
        run_id: The job.
        settings: Of the rendezvous.
        is_host: Whether this process serves the store; None for what the settings and the endpoint say.
        secret: What the members of the job share, or None.

    Returns:
        The backend; nothing was opened yet.

    Raises:
        ValueError: The endpoint doesn't suit it.
    """
    if kind == "c10d" and settings.store_type == "file":
        return _make_file(endpoint, run_id, settings, secret)
    endpoints = parse_endpoints(endpoint, DEFAULT_PORTS[kind])
    if kind == "c10d":
        is_host = settings.is_host if is_host is None else is_host
        return TcpBackend(kind, run_id, endpoints, is_host=is_host, secret=secret)
    if kind == "static":
        is_host = settings.rank == 0 if is_host is None else is_host
        return TcpBackend(kind, run_id, endpoints, is_host=is_host, secret=secret, serves_workers=True)
    from elastic_run.rendezvous.elastic.backend.etcd import make_etcd_backend  # noqa: PLC0415 - imported when used

    return make_etcd_backend(kind, endpoints, run_id, settings, endpoint=endpoint, secret=secret)


def _make_file(path: str, run_id: str, settings: Settings, secret: bytes | None) -> Backend:
    from elastic_run.store.jobstore.file import FileJobStore  # noqa: PLC0415 - imported when used

    def open_store(_: float) -> JobStore:
        return FileJobStore(path, run_id)

    return SharedBackend("c10d", run_id, path, conf=settings.backend, host=None, open_store=open_store, secret=secret)
