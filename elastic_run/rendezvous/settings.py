"""The settings of the rendezvous backends (`--rdzv-conf`), checked once, and the places where the nodes meet.

Settings have torch's keys, with their meaning and mostly their defaults. Each mistake is one line that names the key,
the value and what is allowed. Times are seconds and may be fractions (torch: whole numbers).
"""

from __future__ import annotations

from elastic_run.contract import LARGEST_NUMBER, LONGEST_TIME
from elastic_run.core.config import SHORTEST_INTERVAL, JobConfig
from elastic_run.records import dataclass, field, replace
from elastic_run.rendezvous.api import BACKENDS, read_truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping
    from typing import Any

    from elastic_run.rendezvous.coordination.lease import LeaseStore
    from elastic_run.rendezvous.coordination.places import Place


# --- settings --------------------------------------------------------------------------------------------------------
#: Keys that name flags. Many command lines for accelerate have them in `--rdzv-conf`, where torch reads none of them.
NAMES_OF_FLAGS = ("rdzv_backend", "rdzv_endpoint", "rdzv_id")

#: torch's LaunchConfig puts this ``timeout`` into every job's settings; only static and etcd ever meant it.
_TIMEOUT_OF_TORCH = 900

#: Times of the job's configuration, which all nodes share. Of the others but the first, the connections have no use.
_JOB_TIMES = ("join_timeout", "last_call_timeout", "keep_alive_interval")
_TIMES = ("close_timeout", "heartbeat_timeout", "read_timeout", "cas_backoff_max_seconds")
_ATTEMPTS = "keep_alive_max_attempt"
#: The only times that may be 0. For the first, nobody waits for more nodes than the minimum then.
_MAY_BE_ZERO = ("last_call_timeout", "cas_backoff_max_seconds")


@dataclass(frozen=True, slots=True)
class Settings:
    """One node's rendezvous settings; times in seconds."""

    job_settings: Mapping[str, Any] = field(default_factory=dict)  # of `JobConfig`, by their names there
    close_timeout: float = 30.0  # how long the end of a session may take
    is_host: bool | None = None  # whether this node serves the c10d store; None to find out from the endpoint
    store_type: str = "tcp"  # or `file`, for c10d
    rank: int | None = None  # for static
    backend: Mapping[str, Any] = field(default_factory=dict)  # what only the backend's store reads

    def complete(self, config: JobConfig) -> JobConfig:
        """Return a job's configuration with what was given here."""
        return replace(config, **self.job_settings)


def read_settings(kind: str, config: Mapping[str, Any]) -> Settings:
    """Return a backend's settings, checked and with defaults; raise ValueError."""
    backend = BACKENDS[kind]
    known = (*_JOB_TIMES, *_TIMES, "timeout", _ATTEMPTS, *backend.settings)
    unknown = next((key for key in config if key not in known and key not in NAMES_OF_FLAGS), None)
    if unknown is not None:
        message = f"unknown rendezvous setting {unknown!r} for {kind}; known: {', '.join(sorted(known))}"
        raise ValueError(message)
    times = {key: _read_time(key, config[key]) for key in (*_JOB_TIMES, *_TIMES) if key in config}
    job_settings: dict[str, Any] = {key: times[key] for key in _JOB_TIMES if key in times}
    if "join_timeout" not in config and "timeout" in config:
        timeout = _read_time("timeout", config["timeout"])
        if backend.reads_timeout or timeout != _TIMEOUT_OF_TORCH:
            job_settings["join_timeout"] = timeout
    if _ATTEMPTS in config:
        job_settings[_ATTEMPTS] = attempts = _read_number(_ATTEMPTS, config[_ATTEMPTS])
        if attempts < 1:
            message = (
                f"rendezvous setting {_ATTEMPTS}={config[_ATTEMPTS]!r}: the lease, keep_alive_interval x "
                "keep_alive_max_attempt, would be shorter than one keep-alive; give 1 or more"
            )
            raise ValueError(message)
    store_type = str(config.get("store_type", "tcp")).strip().lower()
    if store_type not in ("tcp", "file"):
        message = f"rendezvous setting store_type={store_type!r}: not tcp or file"
        raise ValueError(message)
    return Settings(
        job_settings=job_settings,
        close_timeout=times.get("close_timeout", Settings().close_timeout),
        is_host=read_truth("is_host", config.get("is_host")),
        store_type=store_type,
        rank=None if config.get("rank") is None else _read_number("rank", config["rank"]),
        backend={key: config[key] for key in backend.settings if key in config},
    )


def _read_time(key: str, value: object) -> float:
    may_be_zero = key in _MAY_BE_ZERO
    try:
        seconds = float(value)  # type: ignore[arg-type]  # that is what the except is for
    except (TypeError, ValueError):
        seconds = float("nan")
    if key == "keep_alive_interval" and 0 < seconds < SHORTEST_INTERVAL:
        message = f"rendezvous setting {key}={value!r}: the shortest interval is {SHORTEST_INTERVAL:g} seconds"
        raise ValueError(message)
    if (seconds > 0 or (may_be_zero and seconds == 0)) and seconds != float("inf"):
        return min(seconds, LONGEST_TIME)
    message = f"rendezvous setting {key}={value!r}: not a number of seconds {'from' if may_be_zero else 'above'} 0"
    raise ValueError(message)


def _read_number(key: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError as error:
        message = f"rendezvous setting {key}={value!r}: not a whole number"
        raise ValueError(message) from error
    if number > LARGEST_NUMBER:
        message = f"rendezvous setting {key}={value!r}: above {LARGEST_NUMBER}"
        raise ValueError(message)
    return number


# --- where the nodes meet --------------------------------------------------------------------------------------------
def make_place(kind: str, endpoint: str, run_id: str, settings: Settings, *, secret: bytes | None = None) -> Place:
    """Return where the nodes of a job meet, as one agent reaches it, or raise ValueError; nothing is opened yet."""
    from elastic_run.rendezvous.addresses import parse_endpoints
    from elastic_run.rendezvous.coordination.places import LeasePlace, Place

    backend, is_file = BACKENDS[kind], settings.store_type == "file"
    if backend.etcd_version or is_file:
        timeout = max(1.0, settings.complete(JobConfig()).lease / 2)
        lease = open_lease(kind, endpoint, run_id, settings, secret=secret, timeout=timeout)
        host = None if is_file else parse_endpoints(endpoint, backend.default_port)[0]
        return LeasePlace(kind, run_id, endpoint, lease, host=host, secret=secret)
    endpoints, is_static = parse_endpoints(endpoint, backend.default_port), kind == "static"
    is_host = settings.rank == 0 if is_static else settings.is_host
    return Place(kind, run_id, endpoints, is_host=is_host, secret=secret, serves_workers=is_static)


def check_static(endpoint: str, rank: int | None, nodes: int) -> tuple[str, int]:
    """Return where rank 0 of a static job is; ValueError if what was given for this node can't work."""
    message, found = "", [("", 0)]
    if rank is None:
        message = "rendezvous backend 'static' needs the rank of this node (rank=N): give --node-rank"
    elif not 0 <= rank < nodes:
        ranks = f"in 0 to {nodes - 1}, the ranks of {nodes} nodes" if nodes > 1 else "0, the only rank of one node"
        message = f"--node-rank: {rank} is not {ranks}"
    elif not endpoint.strip():
        message = "rendezvous backend 'static' needs an endpoint: give --master-addr and --master-port"
    elif nodes == 1:
        from elastic_run.rendezvous.utils import parse_rendezvous_endpoint

        found = [parse_rendezvous_endpoint(endpoint, -1)]  # port 0 is any port here: nobody has to know it
    else:
        from elastic_run.rendezvous.addresses import parse_endpoints

        found = parse_endpoints(endpoint, default_port=-1)
        if len(found) > 1:
            message = f"rendezvous endpoint {endpoint!r}: 'static' knows one endpoint, rank 0's"
    if not message and found[0][1] < 0:
        message = f"rendezvous endpoint {endpoint!r} has no port: give --master-port"
    if message:
        raise ValueError(message)
    return found[0]


def open_lease(
    kind: str, endpoint: str, run_id: str, settings: Settings, *, secret: bytes | None, timeout: float
) -> LeaseStore:
    """Return the lease of a job, or raise ValueError; nothing is asked of a server yet."""
    backend, conf = BACKENDS[kind], settings.backend
    is_v2 = backend.etcd_version == 2  # noqa: PLR2004 - the version's name
    if not backend.etcd_version:
        from elastic_run.rendezvous.coordination.lease_file import FileLease

        return FileLease(endpoint, run_id, secret=secret)
    if is_v2:
        from importlib.util import find_spec

        spec = find_spec("etcd")
        if spec is None or spec.origin is None:  # a directory of that name is none either
            message = (
                f"rendezvous backend {kind!r} needs python-etcd: pip install 'elastic-run[etcd]' "
                "(etcd-v3 needs no package)"
            )
            raise ValueError(message)
    from elastic_run.rendezvous.addresses import parse_endpoints
    from elastic_run.rendezvous.coordination.etcd import EtcdServers, EtcdV3Lease

    servers = EtcdServers(parse_endpoints(endpoint, backend.default_port), timeout, read_tls(conf))
    prefix = str(conf.get("etcd_prefix", backend.prefix)).strip("/")
    prefix = f"{prefix}/" if prefix else ""
    if is_v2:
        from elastic_run.rendezvous.coordination.etcd_v2 import EtcdV2Lease

        return EtcdV2Lease(servers, run_id, prefix=prefix, secret=secret)
    return EtcdV3Lease(servers, run_id, prefix=prefix, secret=secret)


#: Authority, certificate and key: torch's two etcd backends call the same things by different names.
_FILES = (("cacert", "ca_cert"), ("cert", "ssl_cert"), ("key", "ssl_cert_key"))


def read_tls(conf: Mapping[str, Any]) -> ssl.SSLContext | None:
    """Return how to talk TLS, or None for plain HTTP; raise ValueError for a setting or a file that can't be used."""
    protocol = str(conf.get("protocol", "http")).strip().lower()
    if protocol not in ("http", "https"):
        message = f"rendezvous setting protocol={protocol!r}: not http or https"
        raise ValueError(message)
    authority, certificate, key = files = [conf.get(one) or conf.get(other) for one, other in _FILES]
    given = ", ".join(str(file) for file in files if file)
    if protocol == "http":
        if given:
            message = f"rendezvous setting protocol=http doesn't go with a certificate ({given}): give protocol=https"
            raise ValueError(message)
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        message = f"rendezvous settings for TLS: can't use {given}: {error.strerror or error}"
        raise ValueError(message) from error
    return context
