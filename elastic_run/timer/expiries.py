"""Which timers of this process's servers have ended which process: the agent's report asks for it.

A server and the agent that watches the same workers know nothing of each other, so what they share is kept here, for
the process: the last expiries, by pid.
"""

from __future__ import annotations

_MOST = 1024

_texts: dict[int, str] = {}


def note(pid: int, text: str) -> None:
    """Note that a process is about to be ended.

    Args:
        pid: The process.
        text: Why: `scope 'train_step' expired after 60 s`.
    """
    _texts.pop(pid, None)
    while len(_texts) >= _MOST:
        del _texts[next(iter(_texts))]
    _texts[pid] = text


def take(pid: int) -> str:
    """Return why a process that has ended was ended, once; "" where no timer did it."""
    return _texts.pop(pid, "")
