"""The value of --inject-fault: faults separated by commas.

Each is `KIND[=VALUE][@TIME][:rank=R][:attempt=N][:seed=N]`.
"""

from __future__ import annotations

from elastic_run.cli.values import duration, nearest
from elastic_run.cluster.limits import memory_limit
from elastic_run.core.agent.faults import ACTIONS, AGENT_ACTIONS, Fault
from elastic_run.errors import UsageError
from elastic_run.signals import SIGKILL, SIGSTOP, signal_number

#: Signals by the names of faults, and 0 for those without; None where the signal is the value.
_KINDS = {
    "kill": SIGKILL,
    "stop": SIGSTOP,
    "signal": None,
    "child": None,
    **dict.fromkeys(sorted(AGENT_ACTIONS), 0),
    **dict.fromkeys(ACTIONS, 0),
}
#: Kinds that take a time as value, and those that take a number: its default, the least and the most.
_PAUSING = ("stop", "freeze")
_NUMBERS = {"exit": (1, 0, 255), "port": (None, 1, 65535), "slow": (10, 2, 100)}
_PLACES = ("rank", "attempt", "seed")


def check_faults(text: str, world_size: int) -> None:
    """Check faults against the job and this machine.

    Args:
        text: The flag's value.
        world_size: The most workers that the job can have.

    Raises:
        UsageError: A fault is for a rank that the job can't have, or needs a memory limit and there is none.
    """
    faults = read_faults(text)
    if any(fault.action == "oom" for fault in faults) and memory_limit() is None:
        message = f"--inject-fault: {text!r} has oom, but no control group limits the memory of this job"
        raise UsageError(message)
    highest = max(fault.rank or 0 for fault in faults)
    if highest >= world_size:
        message = f"--inject-fault: {text!r} names rank {highest}, but the job has ranks 0 to {world_size - 1}"
        raise UsageError(message)


def read_faults(text: str) -> tuple[Fault, ...]:
    """Read faults.

    Args:
        text: Such as `kill@30s:rank=1,stop=5s@10s..60s:rank=any:attempt=all:seed=7`; empty for none.

    Raises:
        ValueError: Something in it is none; the message follows the value.
    """
    return tuple(_read_fault(part) for part in text.split(",")) if text else ()


def _read_fault(text: str) -> Fault:
    what, *places = text.split(":")
    head, at, when = what.partition("@")
    kind, _, value = head.partition("=")
    if kind not in _KINDS:
        message = f"has a fault {kind!r}, which is none of {', '.join(_KINDS)}{nearest(kind, _KINDS)}"
        raise ValueError(message)
    signal, pause = _read_kind(kind, value)
    action = _read_action(kind, value)
    if kind == "import" and at:
        message = f"has the time {when!r}, but the module of import={value} is missing from the start"
        raise ValueError(message)
    after, before = _read_time(when if at else "0")
    given = _read_places(places)
    return Fault(
        signal=signal,
        after=after,
        before=before,
        rank=None if given.get("rank") == "any" else _read_number("rank", given.get("rank", "0"), "any"),
        attempt=None if given.get("attempt") == "all" else _read_number("attempt", given.get("attempt", "0"), "all"),
        pause=pause,
        seed=_read_number("seed", given.get("seed", "0")),
        action=action,
        is_for_child=kind == "child",
    )


def _read_kind(kind: str, value: str) -> tuple[int, float]:
    """Return the signal and the pause."""
    signal = _KINDS[kind]
    if signal is None:
        signal = signal_number(value)
        if signal is None:
            message = f"has {kind}={value}, which is not the name of a signal such as SIGSEGV"
            raise ValueError(message)
    elif value and kind not in (*_PAUSING, *_NUMBERS, "import"):
        message = f"has {kind}={value}, but {kind} takes no value"
        raise ValueError(message)
    return signal, _read_seconds(value) if kind in _PAUSING and value else 0.0


def _read_action(kind: str, value: str) -> str:
    if kind in _NUMBERS:
        return f"{kind} {_read_value(kind, value)}"
    if kind == "import":
        if not all(part.isidentifier() for part in value.split(".")):
            message = f"has import={value}, which is not the name of a module such as torchvision"
            raise ValueError(message)
        return f"{kind} {value}"
    return kind if kind in ACTIONS or kind in AGENT_ACTIONS else ""


def _read_value(kind: str, text: str) -> int:
    default, least, most = _NUMBERS[kind]
    if not text and default is not None:
        return default
    number = _read_number(kind, text)
    if number > most:
        message = f"has {kind}={text}, which is above {most}"
        raise ValueError(message)
    if number < least:
        message = f"has {kind}={text}, which is below {least}"
        raise ValueError(message)
    return number


def _read_time(text: str) -> tuple[float, float]:
    first, dots, last = text.partition("..")
    after = _read_seconds(first)
    before = _read_seconds(last) if dots else after
    if before < after:
        message = f"has the time {text}, whose end is before its start"
        raise ValueError(message)
    return after, before


def _read_seconds(text: str) -> float:
    try:
        return duration(text)
    except ValueError:
        message = f"has the time {text!r}, which is not a number of seconds, nor a number with s, m, h or d"
        raise ValueError(message) from None


def _read_places(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _PLACES or name in found:
            again = " twice" if name in found else f", which is none of {', '.join(_PLACES)}{nearest(name, _PLACES)}"
            message = f"has a key {name!r}{again}"
            raise ValueError(message)
        found[name] = value
    return found


def _read_number(name: str, text: str, word: str = "") -> int:
    if not (text.isascii() and text.isdecimal()):
        message = f"has {name}={text}, which is not a number from 0 up{f', nor {word}' if word else ''}"
        raise ValueError(message)
    return int(text)
