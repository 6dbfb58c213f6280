"""From the user's words to the job store in an etcd cluster."""

from __future__ import annotations

from elastic_run.rendezvous.leases.etcd_settings import read_tls, read_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from elastic_run.rendezvous.leases.etcd_settings import EtcdUser
    from elastic_run.rendezvous.settings import Settings
    from elastic_run.store.jobstore.api import JobStore
    from elastic_run.store.jobstore.etcd_v3_client import Pass
    from elastic_run.store.jobstore.http_client import HttpClient
    from elastic_run.store.jobstore.revisions import Revisions

__all__ = ["make_opener"]


def make_opener(
    version: int,
    endpoints: Sequence[tuple[str, int]],
    run_id: str,
    settings: Settings,
    *,
    default_prefix: str,
) -> Callable[[float], JobStore]:
    """Make what opens a connection to the store of a job that meets in etcd.

    Args:
        version: Of etcd's API, 2 or 3.
        endpoints: Hosts and ports of the cluster's servers.
        run_id: The job.
        settings: Of the rendezvous.
        default_prefix: What comes before the job's keys, unless the settings say it.

    Returns:
        A function from the seconds for the connection to an open store.

    Raises:
        ValueError: A setting is wrong, or a file that it names can't be read.
    """
    conf = settings.backend
    tls = read_tls(conf)
    user = read_user(conf)
    prefix = str(conf.get("etcd_prefix", default_prefix)).strip("/")
    open_store = _opener(version, run_id, settings.lease, f"{prefix}/" if prefix else "", user)
    return lambda timeout: open_store(_client(endpoints, timeout, tls))


def _opener(
    version: int, run_id: str, lease: float, prefix: str, user: EtcdUser | None
) -> Callable[[HttpClient], JobStore]:
    from elastic_run.store.jobstore.http_client import Credentials  # noqa: PLC0415 - imported when used

    credentials = None if user is None else Credentials(user.name, user.password)
    shared: list[Pass] = []
    seen: list[Revisions] = []

    def find_revisions() -> Revisions:
        from elastic_run.store.jobstore.revisions import Revisions  # noqa: PLC0415 - imported when used

        if not seen:
            seen.append(Revisions())
        return seen[0]

    def open_v3(client: HttpClient) -> JobStore:
        from elastic_run.store.jobstore.etcd_v3 import EtcdV3JobStore  # noqa: PLC0415 - imported when used
        from elastic_run.store.jobstore.etcd_v3_client import EtcdV3Client, Pass  # noqa: PLC0415 - ditto

        if not shared:
            shared.append(Pass())
        return EtcdV3JobStore(
            EtcdV3Client(client, credentials, shared[0], find_revisions()), run_id, lease=lease, prefix=prefix
        )

    def open_v2(client: HttpClient) -> JobStore:
        from elastic_run.store.jobstore.etcd_v2 import EtcdV2JobStore  # noqa: PLC0415 - imported when used
        from elastic_run.store.jobstore.etcd_v2_client import EtcdV2Client  # noqa: PLC0415 - ditto

        api = EtcdV2Client(client, credentials, find_revisions())
        return EtcdV2JobStore(api, run_id, lease=lease, prefix=prefix)

    return open_v3 if version == 3 else open_v2  # noqa: PLR2004 - the version's name


def _client(endpoints: Sequence[tuple[str, int]], timeout: float, tls: ssl.SSLContext | None) -> HttpClient:
    from elastic_run.store.jobstore.http_client import Endpoint, HttpClient  # noqa: PLC0415 - imported when used

    return HttpClient([Endpoint(host, port) for host, port in endpoints], timeout, tls)
