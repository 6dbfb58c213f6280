"""Which process sent a signal to the launcher, in words for the user.

A sender may be gone a moment later (`kill`, `scancel`), so its name is read together with the signal; psutil's import,
16 ms, would be too long for that.
"""

from __future__ import annotations

from elastic_run.multiprocessing.process.process_table import read_name
from elastic_run.signals import SIGHUP, SIGINT, SIGQUIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.signals import SignalInfo

#: Codes of sigaction(2): of signals that the kernel sends by itself, at least; and of a timer that the process has set
#: or inherited (alarm).
_SI_KERNEL, _SI_TIMER = 0x80, -2


class Senders:
    """The last sender of each signal.

    Attributes:
        passed_on: Signals that this launcher has passed on to workers.
        warned_with: Signals with which this launcher has warned workers of new nodes.
    """

    def __init__(self) -> None:
        self.passed_on: set[int] = set()
        self.warned_with: set[int] = set()
        self._senders: dict[int, str] = {}
        self._reasons: dict[int, str] = {}

    def add(self, number: int, found: SignalInfo | None) -> None:
        """Store the sender of a signal that came."""
        self._senders[number] = "" if found is None else _describe(found)
        self._reasons.pop(number, None)

    def name(self, number: int, sender: str) -> None:
        """Name the sender of a request that came in place of a signal."""
        self._senders[number] = sender

    def explain(self, number: int, reason: str) -> None:
        """Store why the launcher stops the job as if a signal had come, which nobody has sent."""
        self._senders[number] = self._reasons[number] = reason

    def find_reason(self, number: int) -> str:
        """Return why the launcher stops the job as if this signal had come; "" if it has come."""
        return self._reasons.get(number, "")

    def find(self, number: int) -> str:
        """Return the sender of the last signal of a number, such as `pid 12 (bash)`; "" if it isn't known."""
        return self._senders.get(number, "")


def _describe(found: SignalInfo) -> str:
    if found.code == _SI_TIMER:
        return "a timer"
    if found.code >= _SI_KERNEL:
        return "the terminal" if found.number in (SIGINT, SIGQUIT, SIGHUP) else "the kernel"
    if not found.pid:
        return f"a process outside of this container (uid {found.uid})"
    name = read_name(found.pid)
    return f"pid {found.pid} ({name})" if name else f"pid {found.pid}"
