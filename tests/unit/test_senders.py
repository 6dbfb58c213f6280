"""Which process sent a signal to the launcher, in words."""

from __future__ import annotations

import os

import pytest

from elastic_run.agent.senders import Senders
from elastic_run.signals import SIGINT, SIGTERM, SignalInfo

_BY_KILL, _BY_KERNEL, _BY_TIMER = 0, 0x80, -2


@pytest.mark.parametrize(
    ("number", "code", "pid", "words"),
    [
        (SIGINT, _BY_KERNEL, 0, "the terminal"),
        (SIGTERM, _BY_KERNEL, 0, "the kernel"),
        (SIGTERM, _BY_TIMER, 0, "a timer"),
        (SIGTERM, _BY_KILL, 0, "a process outside of this container (uid 7)"),
        (SIGTERM, _BY_KILL, 2**22 + 1, f"pid {2**22 + 1}"),
    ],
)
def test_a_sender_is_described(number: int, code: int, pid: int, words: str) -> None:
    """The kernel's own signals, a timer, a process that can't be seen, and one that is gone are told apart."""
    senders = Senders()
    senders.add(number, SignalInfo(number=number, code=code, pid=pid, uid=7))
    assert senders.find(number) == words


def test_a_process_has_its_name() -> None:
    """A process that lives is named; the last sender of a number counts, and an unknown one takes its place."""
    senders = Senders()
    senders.add(SIGTERM, SignalInfo(number=SIGTERM, code=_BY_KILL, pid=os.getpid(), uid=0))
    assert senders.find(SIGTERM).startswith(f"pid {os.getpid()} (")
    senders.add(SIGTERM, None)
    assert senders.find(SIGTERM) == senders.find(SIGINT) == ""
