"""How a port is opened where the system has no IPv6, or refuses."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from elastic_run.store.tcpstore import listener

if TYPE_CHECKING:
    import _socket


@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_without_ipv6_a_public_port_is_one_of_ipv4(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """The kernel has no IPv6, or it is switched off."""
    bind_port = listener.bind_port

    def bind_without_ipv6(host: str, port: int, *, is_dual_stack: bool = False) -> _socket.socket:
        if ":" in host:
            raise OSError(error, "no IPv6 here")
        return bind_port(host, port, is_dual_stack=is_dual_stack)

    monkeypatch.setattr(listener, "bind_port", bind_without_ipv6)
    opened = listener.open_public_listener(0)
    assert opened.getsockname()[0] == "0.0.0.0"  # noqa: S104 - compared
    opened.close()


class _Full:
    """A socket on which the system does not listen."""

    is_closed = False

    def getsockname(self) -> tuple[str, int]:
        """Return where it is bound."""
        return "127.0.0.1", 7

    def listen(self, _: int) -> None:
        """Fail."""
        raise OSError(errno.ENOBUFS, "No buffer space available")

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


def test_a_refusal_to_listen_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is closed."""
    full = _Full()
    monkeypatch.setattr(listener, "bind_port", lambda *_: full)
    with pytest.raises(OSError, match=r"can't listen on 127\.0\.0\.1:7: No buffer space available"):
        listener.open_listener("127.0.0.1", 7)
    assert full.is_closed
