"""What ``--rdzv-conf`` says, read once and checked: torch's keys, with their meaning and mostly their defaults.

Each mistake is one line that names the key, the value and what is allowed; an unknown key names the nearest one.
Times are seconds and may be fractions (torch: whole numbers).
"""

from __future__ import annotations

from elastic_run.contract import LARGEST_NUMBER, LONGEST_TIME
from elastic_run.core.job.config import SHORTEST_INTERVAL, JobConfig
from elastic_run.records import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["NAMES_OF_FLAGS", "Settings", "parse_settings"]

#: Keys that name flags. Many command lines for accelerate have them in `--rdzv-conf`, where torch reads none of them.
NAMES_OF_FLAGS = ("rdzv_backend", "rdzv_endpoint", "rdzv_id")

#: torch's LaunchConfig puts this ``timeout`` into every job's settings; only static and etcd ever meant it.
_TIMEOUT_OF_TORCH = 900

#: Times of the job's configuration, which all nodes share, and times of this node's connections.
_JOB_TIMES = ("join_timeout", "last_call_timeout", "keep_alive_interval")
_TIMES = ("close_timeout", "heartbeat_timeout", "read_timeout")
_ATTEMPTS = "keep_alive_max_attempt"
#: Random pause after torch's agents have lost a race to write the state of the rendezvous. Ours have no such race.
_CAS_BACKOFF = "cas_backoff_max_seconds"
_COMMON = (*_JOB_TIMES, *_TIMES, "timeout", _ATTEMPTS, _CAS_BACKOFF)
#: The only times that may be 0. For the first, nobody waits for more nodes than the minimum then.
_MAY_BE_ZERO = ("last_call_timeout", _CAS_BACKOFF)


@dataclass(frozen=True, slots=True)
class Settings:
    """One node's rendezvous settings; times in seconds.

    Args:
        job_settings: The values of `JobConfig` that were given, by their names there.
        close_timeout: How long the end of a session may take.
        heartbeat_timeout: How long one heartbeat may take before its connection is given up.
        read_timeout: How long the store may take for an answer.
        is_host: Whether this node serves the c10d store; None to find out from the endpoint.
        store_type: `tcp` or `file`, for c10d.
        rank: This node's rank, for static.
        backend: The settings that only the backend's store reads.
    """

    job_settings: Mapping[str, Any] = field(default_factory=dict)
    close_timeout: float = 30.0
    heartbeat_timeout: float = 5.0
    read_timeout: float = 60.0
    is_host: bool | None = None
    store_type: str = "tcp"
    rank: int | None = None
    backend: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lease(self) -> float:
        """See `JobConfig.lease`."""
        return self.complete(JobConfig()).lease

    def complete(self, config: JobConfig) -> JobConfig:
        """Return a job's configuration with what was given here."""
        return replace(config, **self.job_settings)


def parse_settings(backend: str, config: Mapping[str, Any], own: tuple[str, ...], *, reads_timeout: bool) -> Settings:
    """Return a backend's settings, checked and with defaults; `own` are its keys beyond the common ones.

    Raises:
        ValueError: A key is unknown, a value of the wrong kind, or they don't go together.
    """
    _refuse_unknown(backend, config, (*_COMMON, *own))
    job_settings: dict[str, Any] = {key: _read_time(key, config[key]) for key in _JOB_TIMES if key in config}
    if "join_timeout" not in config and "timeout" in config:
        timeout = _read_time("timeout", config["timeout"])
        if reads_timeout or timeout != _TIMEOUT_OF_TORCH:
            job_settings["join_timeout"] = timeout
    if _CAS_BACKOFF in config:
        _read_time(_CAS_BACKOFF, config[_CAS_BACKOFF])
    if _ATTEMPTS in config:
        job_settings[_ATTEMPTS] = _read_attempts(config[_ATTEMPTS])
    return Settings(
        job_settings=job_settings,
        **{key: _read_time(key, config[key]) for key in _TIMES if key in config},
        is_host=_read_truth("is_host", config.get("is_host")),
        store_type=_read_word("store_type", config.get("store_type", "tcp"), ("tcp", "file")),
        rank=None if config.get("rank") is None else _read_number("rank", config["rank"]),
        backend={key: config[key] for key in own if key in config},
    )


def _refuse_unknown(backend: str, config: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((key for key in config if key not in known and key not in NAMES_OF_FLAGS), None)
    if unknown is None:
        return
    import difflib

    nearest = difflib.get_close_matches(unknown, known, n=1)
    hint = f", did you mean {nearest[0]!r}?" if nearest else ""
    message = f"unknown rendezvous setting {unknown!r} for {backend}{hint}; known: {', '.join(sorted(known))}"
    raise ValueError(message)


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


def _read_attempts(value: object) -> int:
    attempts = _read_number(_ATTEMPTS, value)
    if attempts < 1:
        message = (
            f"rendezvous setting {_ATTEMPTS}={value!r}: the lease, keep_alive_interval x keep_alive_max_attempt, "
            "would be shorter than one keep-alive; give 1 or more"
        )
        raise ValueError(message)
    return attempts


def _read_truth(key: str, value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "true", "t", "yes", "y"):
        return True
    if word in ("0", "false", "f", "no", "n"):
        return False
    message = f"rendezvous setting {key}={value!r}: not one of 1, true, t, yes, y, 0, false, f, no, n"
    raise ValueError(message)


def _read_word(key: str, value: object, allowed: tuple[str, ...]) -> str:
    word = str(value).strip().lower()
    if word in allowed:
        return word
    message = f"rendezvous setting {key}={value!r}: not {' or '.join(allowed)}"
    raise ValueError(message)
