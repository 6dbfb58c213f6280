"""How a store's address is looked up, and how long its connections may be dark."""

from __future__ import annotations

import errno
import socket

import pytest

from elastic_run.store import connecting
from elastic_run.store.connecting import Backoff, notice_darkness, reason_of, resolve
from elastic_run.store.errors import CLOSED, REFUSED, SILENT, UNREACHABLE, StoreConnectionError


def test_a_name_without_an_address_is_told_with_the_name_servers_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no name server that does not answer."""

    def look_up(*_: object) -> list[connecting.Address]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(connecting, "_look_up", look_up)
    with pytest.raises(StoreConnectionError, match=r"^the name 'n1' has no address \(Name or service not known\)$"):
        resolve("n1", 1, 60.0)


def test_the_kernel_breaks_a_connection_that_is_dark_for_so_long() -> None:
    """Also one that waits for the confirmation of what it has sent."""
    with socket.socket() as connection:
        notice_darkness(connection, 30.0)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        idle, interval, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert 20 <= idle + interval * count <= 40


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ECONNREFUSED, REFUSED),
        (errno.ETIMEDOUT, SILENT),
        (errno.EHOSTUNREACH, UNREACHABLE),
        (errno.ENETUNREACH, UNREACHABLE),
        (errno.ECONNRESET, CLOSED),
    ],
)
def test_what_the_system_says_of_a_connection_has_one_word(error: int, reason: str) -> None:
    """How long a node tries again, and what its user is told, depends on it."""
    assert reason_of(OSError(error, "")) == reason


def test_pauses_double_up_to_the_longest() -> None:
    """Each pause is the drawn part of its bound, which doubles until pauses are as long as they get."""
    drawn = iter([1.0, 0.5, 1.0, 1.0])
    backoff = Backoff(0.1, 0.5, lambda: next(drawn))
    assert [backoff.next_pause() for _ in range(4)] == pytest.approx([0.1, 0.1, 0.4, 0.5])
