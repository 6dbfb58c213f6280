"""What other ranks see of a rank that is dead, late or told to stop; so none of it is a cause while there is another.

Pure. Sources: the messages of torch 2.13's TCPStore, ProcessGroupNCCL and gloo, read in its source or made by killing a
peer, and those of older releases in public issue threads. Imported only after a failure, hence the expressions.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

#: Characters of a message that are looked at.
_LIMIT = 4096
#: Types that only ever come from talking to another process.
_TYPES = frozenset(
    (
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    )
)
#: What gloo says of data that is longer than its receiver's collective takes.
_OTHER_SIZE = "Received data size doesn't match expected size"
#: What NCCL says of the same, where it goes through sockets. It calls that an invalid usage.
_TRUNCATED = "message truncated : receiving"
#: Texts of a lost or late peer. The hints for them stand in report/failure_rules.toml.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset|refused|aborted)"
    r"|broken pipe"
    r"|failed to recv|recvvalue|sendbytes|recvbytes"
    r"|socket timeout|client socket has timed out"
    r"|timed out waiting \d+ ?ms for (?:send|recv)"
    r"|timed out after \d+ seconds waiting for clients"
    r"|wait timeout after|application timeout caused pair closure"
    r"|caught collective operation timeout"
    r"|heartbeat monitor timed out|unable to get heartbeat"
    r"|ncclremoteerror|remote process exited or there was a network error"
    r"|(?:nccl )?communicator (?:was|has been) aborted"
    r"|failed to pass monitoredbarrier"
    rf"|{_OTHER_SIZE}|{_TRUNCATED}",
    re.IGNORECASE,
)
#: Types whose message, where it matches, is torch's: a program that talks to a database or to a web server of its own
#: sees the same words, but in exceptions of Python or of a library.
_TORCH_TYPES = frozenset(
    (
        *("DistBackendError", "DistNetworkError", "DistStoreError"),
        *("RuntimeError", "Error", "runtime_error", "system_error"),
        *("IoException", "TimeoutException", "EnforceNotMet"),
    )
)
#: The same types, but the rank's own fault.
_OWN_FAULT = re.compile(
    r"eaddrinuse|address already in use|duplicate gpu|ncclinvalid|unhandled cuda error|out of memory|no backend type",
    re.IGNORECASE,
)
#: How a program ends that obeys a signal, or whose DataLoader processes were stopped with it.
_OBEDIENCE = re.compile(
    r"^KeyboardInterrupt|SignalException|SIGTERM|SIGINT|SIGHUP|DataLoader worker .*(?:exited|killed)", re.DOTALL
)


def is_secondary(name: str, message: str) -> bool:
    """Whether an exception looks like a lost peer.

    Args:
        name: Its class without the module.
        message: Its message.

    Returns:
        Whether another worker is more likely the cause.
    """
    message = message[:_LIMIT]
    if _OWN_FAULT.search(message) and _TRUNCATED not in message:
        return False
    return name in _TYPES or _LOST_PEER.search(message) is not None


def is_of_torch(name: str) -> bool:
    """Whether an exception that looks like a lost peer is one that torch raises, so that the peer is another rank.

    Args:
        name: Its class without the module.

    Returns:
        Whether.
    """
    return name in _TORCH_TYPES


def is_lost_peer(lines: Iterable[str]) -> bool:
    """Whether the last lines of an aborted program speak of a lost peer.

    Args:
        lines: Of its stderr.

    Returns:
        Whether one of them does.
    """
    return any(_LOST_PEER.search(line) for line in lines)


def is_of_other_size(lines: Iterable[str]) -> bool:
    """Whether the last lines of an aborted program say that it got more bytes than its collective takes.

    Args:
        lines: Of its stderr.

    Returns:
        Whether one of them does.
    """
    return any(_OTHER_SIZE in line for line in lines)


def is_obedience(type_name: str, message: str) -> bool:
    """Whether an exception is how a program obeys the signal that stopped it.

    Args:
        type_name: Its class.
        message: Its message.

    Returns:
        Whether it says nothing about a failure.
    """
    return _OBEDIENCE.search(f"{type_name}: {message[:_LIMIT]}") is not None
