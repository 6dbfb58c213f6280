"""How a port is opened where the system has no IPv6, or refuses."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from elastic_run.store import worker_store as listener

if TYPE_CHECKING:
    import _socket


@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_without_ipv6_a_public_port_is_one_of_ipv4(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """The kernel has no IPv6, or it is switched off."""
    bind = listener._bind

    def bind_without_ipv6(host: str, port: int) -> _socket.socket:
        if ":" in host:
            raise OSError(error, "no IPv6 here")
        return bind(host, port)

    monkeypatch.setattr(listener, "_bind", bind_without_ipv6)
    (opened,) = listener.open_listeners([])
    assert opened.getsockname()[0] == "0.0.0.0"  # noqa: S104 - compared
    opened.close()
