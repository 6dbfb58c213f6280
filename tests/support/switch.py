"""The network between virtual hosts: a bridge in a network namespace of its own, with cables and rules for them.

- Everything lives in that namespace, so names never meet those of another test run or of the machine, and all of it is
  gone when the namespace's last process is.
- A cable pulled is a port that is down: nobody hears FIN or RST. A *dark* host still sees its link up, and no packet
  arrives or leaves. A *cut* drops packets from one host to another in that direction only, and lets addresses be
  resolved, as a firewall's rule would.
- Rules are nftables sets, changed by one command each; the table is written once.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Every run has its own world, so all may use the same addresses.
NETWORK = "10.77.0"
NETWORK6 = "fd77:"
_RULES = """
table bridge switch {
  set dark { type ifname; }
  set cut { type ether_addr . ether_addr; }
  chain between { type filter hook forward priority 0;
    iifname @dark drop
    oifname @dark drop
    ether type arp accept
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
    ether saddr . ether daddr @cut drop
  }
  chain in { type filter hook input priority 0; iifname @dark drop; ether saddr . ether daddr @cut drop; }
  chain out { type filter hook output priority 0; oifname @dark drop; ether saddr . ether daddr @cut drop; }
}
table inet hub {
  chain in { type filter hook input priority 0; }
}
"""


def run(command: Sequence[str], *, text: str = "") -> str:
    """Run a command of the test bed to its end."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        message = f"{' '.join(command)}: {done.stderr.strip()}"
        raise RuntimeError(message)
    return done.stdout


def address_of(number: int) -> str:
    """Return a host's IPv4 address; the hub's number is 1."""
    return f"{NETWORK}.{number}"


def address6_of(number: int) -> str:
    """Return a host's IPv6 address."""
    return f"{NETWORK6}:{number}"


def hardware_of(number: int) -> str:
    """Return the hardware address of a host's network card: the same after each boot."""
    return f"02:00:00:00:00:{number:02x}"


def _inside(pid: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


class Switch:
    """The bridge, in the network namespace of a process.

    Args:
        pid: That process.
    """

    def __init__(self, pid: int) -> None:
        self._inside = _inside(pid)
        self._cards: dict[int, int] = {}
        self._ip(
            "link set lo up",
            f"link add bridge address {hardware_of(1)} type bridge forward_delay 0 mcast_snooping 0",
            f"addr add {address_of(1)}/24 dev bridge",
            f"addr add {address6_of(1)}/64 dev bridge nodad",
            "link set bridge up",
        )
        run([*self._inside, "nft", "--file", "-"], text=_RULES)

    def plug(self, number: int, pid: int) -> None:
        """Lay a cable from a free port to a new network card, eth0, of a host."""
        self._ip(f"link add p{number} type veth peer name eth0 netns {pid}")
        self._ip(f"link set p{number} master bridge up")
        batch = [
            f"link set eth0 address {hardware_of(number)}",
            "link set lo up",
            f"addr add {address_of(number)}/24 dev eth0",
            f"addr add {address6_of(number)}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {address_of(1)}",
        ]
        run([*_inside(pid), "ip", "-batch", "-"], text="\n".join(batch))
        self._cards[number] = pid
        self._wait_carries(number)

    def unplug(self, number: int) -> None:
        """Take a host's cable away, with the card at its other end; harmless where the kernel has done so already.

        It does where the last process of the host has ended, some time later.
        """
        try:
            self._ip(f"link del p{number}")
        except RuntimeError as error:
            if "Cannot find device" not in str(error):
                raise

    def set_link(self, number: int, *, is_up: bool) -> None:
        """Pull the cable out of the port, or put it back."""
        self._ip(f"link set p{number} {'up' if is_up else 'down'}")
        if is_up:
            self._wait_carries(number)

    def set_dark(self, number: int, *, is_dark: bool) -> None:
        """Drop every packet of a host silently, or no longer."""
        self._change("dark", f'"p{number}"', is_in=is_dark)

    def set_cut(self, source: int, target: int, *, is_cut: bool) -> None:
        """Drop packets from one host to another silently, or no longer. The way back stays open."""
        self._change("cut", f"{hardware_of(source)} . {hardware_of(target)}", is_in=is_cut)

    def silence_resolver(self) -> None:
        """Let queries for names go unanswered; before, they are refused at once, for nobody serves them."""
        run([*self._inside, "nft", "add rule inet hub in udp dport 53 drop"])

    def heal(self) -> None:
        """Take away all darkness and every cut. Cables stay as they are."""
        run([*self._inside, "nft", "flush set bridge switch dark; flush set bridge switch cut"])

    def _wait_carries(self, number: int) -> None:
        """Wait for what the kernel does a moment after a link comes up: until then packets are lost."""
        card = [*_inside(self._cards[number]), "ip", "-o", "link", "show", "eth0"]
        port = [*self._inside, "ip", "-o", "-d", "link", "show", f"p{number}"]
        wait_until(lambda: "LOWER_UP" in run(card), what="network card up")
        wait_until(lambda: " state forwarding " in run(port), what="port forwarding")

    def _change(self, name: str, element: str, *, is_in: bool) -> None:
        # Adding what is there is no error; so that removing what is not is none either, it is added first.
        change = f"add element bridge switch {name} {{ {element} }}"
        if not is_in:
            change += f"; delete element bridge switch {name} {{ {element} }}"
        run([*self._inside, "nft", change])

    def _ip(self, *lines: str) -> None:
        run([*self._inside, "ip", "-batch", "-"], text="\n".join(lines))
