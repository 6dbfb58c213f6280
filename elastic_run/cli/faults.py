"""The value of --inject-fault: faults separated by commas.

Each is `KIND[=VALUE][@TIME][:rank=R][:attempt=N][:seed=N]`.
"""

from __future__ import annotations

from elastic_run.cli.values import duration, refuse
from elastic_run.cluster.limits import memory_limit
from elastic_run.core.agent.faults import ACTIONS, AGENT_ACTIONS, Fault
from elastic_run.notices import UsageError
from elastic_run.signals import SIGKILL, SIGSTOP, signal_number

#: Signals by the names of faults, and 0 for those without; None where the signal is the value.
_KINDS = {
    "kill": SIGKILL,
    "stop": SIGSTOP,
    "signal": None,
    **dict.fromkeys(sorted(AGENT_ACTIONS), 0),
    **dict.fromkeys(ACTIONS, 0),
}
#: Kinds that take a time as value.
_PAUSING = ("stop", "freeze")
_HIGHEST_CODE = 255
_PLACES = ("rank", "attempt", "seed")


def check_faults(text: str, world_size: int) -> None:
    """Refuse a fault for a rank that the job can't have, or one that needs a memory limit where there is none."""
    faults = read_faults(text)
    if any(fault.action == "oom" for fault in faults) and memory_limit() is None:
        message = f"--inject-fault: {text!r} has oom, but no control group limits the memory of this job"
        raise UsageError(message)
    highest = max(fault.rank or 0 for fault in faults)
    if highest >= world_size:
        message = f"--inject-fault: {text!r} names rank {highest}, but the job has ranks 0 to {world_size - 1}"
        raise UsageError(message)


def read_faults(text: str) -> tuple[Fault, ...]:
    """Read faults such as `kill@30s:rank=1,stop=5s@10s..60s:rank=any:attempt=all:seed=7`; empty for none."""
    return tuple(_read_fault(part) for part in text.split(",")) if text else ()


def _read_fault(text: str) -> Fault:
    what, *words = text.split(":")
    head, at, when = what.partition("@")
    kind, _, value = head.partition("=")
    if kind not in _KINDS:
        refuse(f"has a fault {kind!r}, which is none of {', '.join(_KINDS)}")
    signal = _KINDS[kind]
    if signal is None:
        signal = signal_number(value)
        if signal is None:
            refuse(f"has {kind}={value}, which is not the name of a signal such as SIGSEGV")
    elif value and kind not in (*_PAUSING, "exit"):
        refuse(f"has {kind}={value}, but {kind} takes no value")
    first, dots, last = when.partition("..") if at else ("0", "", "")
    after = _read_seconds(first)
    before = _read_seconds(last) if dots else after
    if before < after:
        refuse(f"has the time {when}, whose end is before its start")
    places = dict(word.partition("=")[::2] for word in words)
    if len(places) < len(words) or not places.keys() <= set(_PLACES):
        refuse(f"has {':'.join(words)!r}, and the keys are {', '.join(_PLACES)}, each at most once")
    return Fault(
        signal=signal,
        after=after,
        before=before,
        rank=_read_number("rank", places.get("rank", "0"), "any"),
        attempt=_read_number("attempt", places.get("attempt", "0"), "all"),
        pause=_read_seconds(value) if kind in _PAUSING and value else 0.0,
        seed=_read_number("seed", places.get("seed", "0")) or 0,
        action=_read_action(kind, value),
    )


def _read_action(kind: str, value: str) -> str:
    if kind == "exit":
        code = _read_number(kind, value or "1") or 0
        if code > _HIGHEST_CODE:
            refuse(f"has {kind}={value}, which is above {_HIGHEST_CODE}")
        return f"{kind} {code}"
    return kind if kind in ACTIONS or kind in AGENT_ACTIONS else ""


def _read_seconds(text: str) -> float:
    try:
        return duration(text)
    except ValueError as error:
        refuse(f"has the time {text!r}, which {error}")


def _read_number(name: str, text: str, word: str = "") -> int | None:
    """Read a number from 0 up; None for a word, if there is one."""
    if word and text == word:
        return None
    if not (text.isascii() and text.isdecimal()):
        refuse(f"has {name}={text}, which is not a number from 0 up{f', nor {word}' if word else ''}")
    return int(text)
