"""The test bed itself: each verb does to real sockets and processes what its name says, and nothing is left of it."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import VirtualHost, VirtualHosts, virtual_hosts
from tests.support.processes import is_gone

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.system

PORT = 4000
#: Seconds without an answer that count as silence. On this network an answer takes less than a millisecond.
SILENCE = 0.3
#: An argument, ::, makes it serve IPv6 as well.
SERVER = f"""
import socket, sys
family = socket.AF_INET6 if sys.argv[1:] else socket.AF_INET
with socket.create_server(("".join(sys.argv[1:]), {PORT}), family=family) as listener:
    print("ready", flush=True)
    while True:
        peer, _ = listener.accept()
        while line := peer.recv(100):
            peer.sendall(line)
"""


@pytest.fixture
def hosts() -> Iterator[VirtualHosts]:
    """Give two hosts."""
    with virtual_hosts(2) as booted:
        yield booted


@contextlib.contextmanager
def connection(source: VirtualHost, target: VirtualHost) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give both ends of an open connection from one host to another."""
    with target.on_network():
        listener = socket.create_server(("", PORT))
    with listener, dial(source, target) as near, listener.accept()[0] as far:
        near.settimeout(SILENCE)
        far.settimeout(SILENCE)
        yield near, far


def dial(source: VirtualHost, target: VirtualHost) -> socket.socket:
    """Connect from one host to another."""
    with source.on_network():
        return socket.create_connection((target.address, PORT), timeout=SILENCE)


def datagram_socket(host: VirtualHost) -> socket.socket:
    """Open a socket for datagrams on a host."""
    with host.on_network():
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((host.address, PORT))
        opened.settimeout(SILENCE)
        return opened


def is_heard(sender: socket.socket, receiver: socket.socket) -> bool:
    """Tell whether what one end sends now arrives at the other within the time that counts as silence."""
    sender.sendall(b"anybody there?")
    try:
        return bool(receiver.recv(100))
    except TimeoutError:
        return False


@pytest.mark.parametrize("verb", ["dark", "drop"])
def test_a_silent_drop_is_neither_refused_nor_reset(hosts: VirtualHosts, verb: str) -> None:
    """Open connections go silent either way, new ones get no answer; healed, all is as before."""
    with connection(hosts[1], hosts[0]) as (near, far):
        if verb == "dark":
            hosts[0].go_dark()
        else:
            hosts.silent_drop(hosts[1], hosts[0])
        assert not is_heard(near, far)
        assert not is_heard(far, near)
        with pytest.raises(TimeoutError):
            dial(hosts[1], hosts[0])
        hosts.heal()
        far.settimeout(20)
        assert far.recv(100)


def test_a_cut_is_one_way(hosts: VirtualHosts) -> None:
    """Datagrams in one direction are lost, those in the other arrive."""
    with datagram_socket(hosts[0]) as one, datagram_socket(hosts[1]) as other:
        hosts.cut(hosts[0], hosts[1])
        one.sendto(b"lost", (hosts[1].address, PORT))
        other.sendto(b"back", (hosts[0].address, PORT))
        assert one.recv(100) == b"back"
        hosts.mend(hosts[0], hosts[1])
        one.sendto(b"found", (hosts[1].address, PORT))
        assert other.recv(100) == b"found"


def test_power_off_takes_everything_and_tells_nobody(hosts: VirtualHosts) -> None:
    """Peers hear nothing, no process is left; after the next boot the old connection is reset."""
    server = hosts[0].start(["python3", "-c", SERVER])
    server.wait_line("ready")
    orphan = hosts[0].run("sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo")
    assert orphan
    with dial(hosts[1], hosts[0]) as near:
        assert is_heard(near, near)
        pids = hosts[0].processes()
        assert len(pids) == 2
        hosts[0].poweroff()
        assert all(is_gone(pid) for pid in pids)
        assert server.wait_exit() == -signal.SIGKILL
        assert not is_heard(near, near)
        hosts[0].boot()
        near.settimeout(20)
        with pytest.raises(ConnectionResetError):
            near.recv(100)
    with pytest.raises(ConnectionRefusedError):
        dial(hosts[1], hosts[0])


def test_a_clock_is_set_while_a_program_runs(hosts: VirtualHosts) -> None:
    """The time of day jumps for the programs of one host; time that has passed does not, nor do others' clocks."""
    hosts[0].clock.install()
    program = """
import time
first, start = time.time(), time.monotonic()
print("ready", flush=True)
while abs(time.time() - first) < 800: time.sleep(0.05)
print("jumped", round((time.time() - first) / 900), time.monotonic() - start < 60)
"""
    job = hosts[0].start([sys.executable, "-c", program])
    job.wait_line("ready")
    hosts[0].clock.set(-900)
    job.wait_line("jumped -1 True")
    assert job.wait_exit() == 0


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_resolver_may_refuse_or_say_nothing(hosts: VirtualHosts, is_silent: bool) -> None:
    """An unknown name fails at once, or when the look-up's time is over."""
    if is_silent:
        hosts.switch.silence_resolver()
    program = """
import socket, time
start = time.monotonic()
try: socket.getaddrinfo("nobody.invalid", 1)
except OSError: print("silent" if time.monotonic() - start > 0.9 else "refused")
"""
    job = hosts[0].start([sys.executable, "-c", program], env={"RES_OPTIONS": "timeout:1 attempts:1"})
    assert job.wait_exit() == 0
    assert job.stdout == ("silent\n" if is_silent else "refused\n")
