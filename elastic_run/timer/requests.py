"""What a worker asks of a timer server: to count down to a moment for a scope of its code, or to stop counting.

Source of the classes, fields and of the JSON: torch 2.13, torch.distributed.elastic.timer. Either side may be torch's.
"""

from __future__ import annotations

import abc
import json
import math

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: The only version that there is; it is torch's.
VERSION = 1
_MOST_SIGNAL = 64
_MOST_PID = 1 << 31


class TimerRequest:
    """One request.

    Args:
        worker_id: Who asks; for the servers here its pid.
        scope_id: Name of the scope.
        expiration_time: When it expires, seconds since the epoch; negative to stop counting.
    """

    __slots__ = ("expiration_time", "scope_id", "worker_id")

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimerRequest) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment] # as torch's: its fields may be changed

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._key()}"

    def _key(self) -> tuple[object, ...]:
        return (self.worker_id, self.scope_id, self.expiration_time)


class FileTimerRequest(TimerRequest):
    """A request that goes through a named pipe.

    Args:
        worker_pid: The process that asks.
        scope_id: Name of the scope.
        expiration_time: When it expires, seconds since the epoch; negative to stop counting.
        signal: What the process gets when it expires; nothing if that isn't above 0.
    """

    __slots__ = ("signal", "version")

    def __init__(self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0) -> None:
        super().__init__(worker_id=worker_pid, scope_id=scope_id, expiration_time=expiration_time)
        self.version = VERSION
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """The process that asks."""
        pid: int = self.worker_id
        return pid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileTimerRequest) and self._key() == other._key()

    __hash__ = None

    def _key(self) -> tuple[object, ...]:
        return (*super()._key(), self.signal, self.version)

    def to_json(self) -> str:
        """Return the request as one line of JSON, without the end of the line."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": self.signal,
            }
        )


class TimerClient(abc.ABC):
    """A worker's side: asks a server to count down."""

    @abc.abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Start a timer of this worker.

        Args:
            scope_id: Name of the scope.
            expiration_time: When it expires, seconds since the epoch.
        """

    @abc.abstractmethod
    def release(self, scope_id: str) -> None:
        """End a timer of this worker.

        Args:
            scope_id: Name of the scope.
        """


def read_request(line: bytes) -> FileTimerRequest:
    """Read a request from the pipe.

    Args:
        line: What was written; a beginning that is no JSON, such as half a line of another writer, is passed over.

    Returns:
        The request.

    Raises:
        ValueError: It is no request; the message says why.
    """
    # A quote inside a JSON text has a backslash before it, so this can only be where the request begins.
    start = line.rfind(b'{"')
    try:
        fields = json.loads(line[max(0, start) :])
    except (ValueError, RecursionError):
        message = "not JSON"
        raise ValueError(message) from None
    if not isinstance(fields, dict):
        message = "not a JSON object"
        raise ValueError(message)  # noqa: TRY004 - all that is wrong with a line is one kind of error
    if fields.get("version", VERSION) != VERSION:
        message = f"of version {fields['version']!r}, and only {VERSION} is known"
        raise ValueError(message)
    for name, is_good in _CHECKS.items():
        if not is_good(fields.get(name)):
            message = f"its {name} is {fields.get(name, 'missing')!r}"
            raise ValueError(message)
    return FileTimerRequest(fields["pid"], fields["scope_id"], fields["expiration_time"], fields["signal"])


def is_moment(value: object) -> bool:
    """Whether a value is a time that can be compared with others."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False


def _is_pid(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST_PID


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_signal(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value <= _MOST_SIGNAL


_CHECKS: dict[str, Callable[[object], bool]] = {
    "pid": _is_pid,
    "scope_id": _is_name,
    "expiration_time": is_moment,
    "signal": _is_signal,
}
