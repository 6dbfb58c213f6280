"""Three etcd members on the hub of the virtual hosts, whose leader can be found and killed."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING

from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.hosts import HostProcess, VirtualHost

_MEMBERS = 3
_FIRST_PORT = 2379
_PORT_STEP = 10


class EtcdCluster:
    """The members, running.

    Args:
        hub: The host they are on.
        directory: For their data.
    """

    def __init__(self, hub: VirtualHost, directory: Path) -> None:
        self._hub = hub
        self._directory = directory
        self._members: dict[int, HostProcess] = {}
        for member in range(_MEMBERS):
            self.start(member)
        self.wait_leader()

    @property
    def endpoints(self) -> str:
        """Where clients find them, for a command line."""
        return ",".join(f"{self._hub.address}:{self._port(member)}" for member in range(_MEMBERS))

    def start(self, member: int) -> None:
        """Start a member, with the data it had."""
        peers = ",".join(f"m{number}={self._url(number, peer=True)}" for number in range(_MEMBERS))
        flags = {
            "name": f"m{member}",
            "data-dir": str(self._directory / f"m{member}"),
            "listen-client-urls": self._url(member),
            "advertise-client-urls": self._url(member),
            "listen-peer-urls": self._url(member, peer=True),
            "initial-advertise-peer-urls": self._url(member, peer=True),
            "initial-cluster": peers,
            "enable-v2": "true",
            "heartbeat-interval": "100",
            "election-timeout": "1000",
            "logger": "zap",
            "unsafe-no-fsync": "true",
        }
        command = ["etcd", *(f"--{name}={value}" for name, value in flags.items())]
        self._members[member] = self._hub.start(command, merge=True)

    def kill(self, member: int) -> None:
        """SIGKILL a member."""
        self._members[member].kill()
        self._members[member].wait_exit()

    def wait_leader(self) -> int:
        """Wait until there is a leader, and return its number."""
        return wait_until(self._leaders, what="leader")[0]

    def state_of(self, member: int) -> str | None:
        """Return what a member says it is, such as StateFollower; None when it doesn't answer."""
        with self._hub.on_network():
            connection = http.client.HTTPConnection(self._hub.address, self._port(member), timeout=2)
            try:
                connection.request("GET", "/v2/stats/self")
                return str(json.load(connection.getresponse())["state"])
            except (OSError, ValueError, KeyError, http.client.HTTPException):
                return None
            finally:
                connection.close()

    def _leaders(self) -> list[int]:
        return [member for member in self._members if self.state_of(member) == "StateLeader"]

    def _url(self, member: int, *, peer: bool = False) -> str:
        return f"http://{self._hub.address}:{self._port(member) + peer}"

    @staticmethod
    def _port(member: int) -> int:
        return _FIRST_PORT + _PORT_STEP * member
