"""From the user's words to an etcd cluster: endpoints, TLS, user and password, under torch's names and our own."""

from __future__ import annotations

from elastic_run.user_file import read_user_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elastic_run.rendezvous.settings import Settings
    from elastic_run.store.jobstore.api import JobStore
    from elastic_run.store.jobstore.etcd_v3_client import Pass
    from elastic_run.store.jobstore.http_client import Credentials, HttpClient
    from elastic_run.store.jobstore.revisions import Revisions

__all__ = ["make_opener"]

#: torch's two etcd backends call the same things by different names.
_CERTIFICATE = ("cert", "ssl_cert")
_KEY = ("key", "ssl_cert_key")
_AUTHORITY = ("cacert", "ca_cert")
#: Bytes of a password's file; a device may have no end.
_LONGEST_PASSWORD = 1 << 16


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
    tls = _read_tls(conf)
    credentials = _read_credentials(conf)
    prefix = str(conf.get("etcd_prefix", default_prefix)).strip("/")
    open_store = _opener(version, run_id, settings.lease, f"{prefix}/" if prefix else "", credentials)
    return lambda timeout: open_store(_client(endpoints, timeout, tls))


def _opener(
    version: int, run_id: str, lease: float, prefix: str, credentials: Credentials | None
) -> Callable[[HttpClient], JobStore]:
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


def _read_credentials(conf: Mapping[str, Any]) -> Credentials | None:
    user, password = str(conf.get("user", "")), str(conf.get("password", ""))
    path = conf.get("password_file")
    if path:
        try:
            password = read_user_file(str(path), _LONGEST_PASSWORD).decode().rstrip("\n")
        except OSError as error:
            message = f"rendezvous setting password_file={path}: {error.strerror}"
            raise ValueError(message) from error
        except UnicodeDecodeError as error:
            message = f"rendezvous setting password_file={path}: not a text in UTF-8"
            raise ValueError(message) from error
    if not user and not password:
        return None
    if not user:
        message = "rendezvous setting password needs user=NAME"
        raise ValueError(message)
    from elastic_run.store.jobstore.http_client import Credentials  # noqa: PLC0415 - imported when used

    return Credentials(user, password)


def _read_tls(conf: Mapping[str, Any]) -> ssl.SSLContext | None:
    protocol = str(conf.get("protocol", "http")).strip().lower()
    if protocol not in ("http", "https"):
        message = f"rendezvous setting protocol={protocol!r}: not http or https"
        raise ValueError(message)
    certificate, key, authority = (_either(conf, names) for names in (_CERTIFICATE, _KEY, _AUTHORITY))
    if protocol == "http":
        given = certificate or key or authority
        if given:
            message = f"rendezvous setting protocol=http doesn't go with a certificate ({given}): give protocol=https"
            raise ValueError(message)
        return None
    from elastic_run.store.errors import StoreAccessError  # noqa: PLC0415 - imported when used
    from elastic_run.store.jobstore.http_client import make_tls  # noqa: PLC0415 - ditto

    try:
        return make_tls(authority, certificate, key)
    except StoreAccessError as error:
        message = f"rendezvous settings for TLS: {error}"
        raise ValueError(message) from error


def _either(conf: Mapping[str, Any], names: tuple[str, str]) -> str | None:
    value = conf.get(names[0]) or conf.get(names[1])
    return None if value is None else str(value)
