"""Virtual hosts: several machines on this one, for tests of what happens to machines and cables. Needs root.

    with virtual_hosts(3) as hosts:
        server = hosts[0].start(["python3", "server.py"])
        hosts[0].poweroff()

- A host is a set of namespaces: network, pid, mount, hostname, IPC, monotonic clock. It has its own pids, /dev/shm,
  /etc/hosts and uptime; it shares the files, as nodes of a cluster share their home directories.
- Its first process waits for the end of a pipe that only this process holds. So hosts end with the test run however
  that ends, and the kernel takes the rest with them: processes, cards, bridge, rules. Nothing has a name outside.
- The first process ignores SIGCHLD, so the kernel reaps what it adopts.
- The hub is the name server of all hosts and refuses each question. Linux would drop all but a few refusals a second,
  and a look-up whose refusal is dropped takes 5 s; so a host may send any number of them.
- Nothing here sleeps: each verb returns when what it says has been done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.launch import Launched, clean_environment
from tests.support.processes import children_of, descendants_of, is_gone, kill_processes
from tests.support.switch import Switch, address6_of, address_of
from tests.support.system import require_marker, starter
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Number of the first host; the hub, where the switch is, has number 1.
_FIRST = 10
#: Seconds by which the monotonic clock of each host is ahead of the one before: hosts were not booted together.
_UPTIME_STEP = 100_000
_LIBC = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
#: Run as the first process of a host: $1 is its name, $2 and $3 become its /etc/hosts and /etc/resolv.conf.
_BOOT = """
echo "$1" > /proc/sys/kernel/hostname
echo 0 > /proc/sys/net/ipv4/icmp_ratelimit
mount -t tmpfs -o mode=1777 shm /dev/shm
mount --bind "$2" /etc/hosts
mount --bind "$3" /etc/resolv.conf
echo up
exec env --ignore-signal=CHLD cat
"""
_CLOCK_SOURCE = Path(__file__).with_name("wall_clock.c")
_NANOSECONDS = struct.Struct("=q")


def _enter_network(descriptor: int) -> None:
    if _LIBC.setns(descriptor, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class VirtualHost:
    """One host, booted.

    Args:
        name: Its hostname.
        number: Its place in the network; 1 is the hub, which holds the switch.
        files: A directory with the files that become its /etc/hosts and /etc/resolv.conf, and its clock.

    Attributes:
        first_pid: The pid, as this machine sees it, of the process that is 1 on the host.
        clock: Its time of day.
    """

    def __init__(self, name: str, number: int, files: Path) -> None:
        self.name = name
        self.number = number
        self.address = address_of(number)
        self.address6 = address6_of(number)
        self.clock = HostClock(files / f"clock-{name}")
        self._files = files
        self._switch: Switch | None = None
        self._frame: subprocess.Popen[bytes] | None = None
        self.first_pid = 0
        self._started: list[HostProcess] = []
        self._start_first_process()

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def is_on(self) -> bool:
        """Whether the host is running."""
        return self._frame is not None

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | str | None = None,
        merge: bool = False,
    ) -> HostProcess:
        """Start a program on the host."""
        environment = {**self.clock.environment(), **(env or {})}
        process = HostProcess(self.first_pid, command, env=environment, cwd=cwd, merge=merge)
        self._started.append(process)
        return process

    def run(self, *command: str | Path, deadline: float = DEADLINE) -> str:
        """Run a program on the host to its end and return what it printed."""
        process = self.start(command)
        if code := process.wait_exit(deadline=deadline):
            message = f"{self.name}: {' '.join(map(str, command))}: exit {code}: {process.stdout}{process.stderr}"
            raise RuntimeError(message)
        return process.stdout

    @contextlib.contextmanager
    def on_network(self) -> Iterator[None]:
        """Let this thread, and threads it starts, be on the host's network: what they connect and bind stays there."""
        target_path = Path(f"/proc/{self.first_pid}/ns/net")
        with Path("/proc/thread-self/ns/net").open("rb") as own, target_path.open("rb") as target:
            _enter_network(target.fileno())
            try:
                yield
            finally:
                _enter_network(own.fileno())

    def processes(self) -> list[int]:
        """Return the pids, as this machine sees them, of all that lives on the host but its first process."""
        if not self.is_on:
            return []
        here = Path(f"/proc/{self.first_pid}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.first_pid:
                with contextlib.suppress(OSError):
                    if (entry / "ns" / "pid").readlink() == here and not is_gone(int(entry.name)):
                        found.append(int(entry.name))
        return sorted(found)

    def connect(self, switch: Switch) -> None:
        """Plug the host's network card into the switch."""
        self._switch = switch
        switch.plug(self.number, self.first_pid)

    def link_down(self) -> None:
        """Pull the network cable: no FIN and no RST reaches anybody."""
        self._wired().set_link(self.number, is_up=False)

    def link_up(self) -> None:
        """Put the network cable back."""
        self._wired().set_link(self.number, is_up=True)

    def go_dark(self) -> None:
        """Drop all that the host sends and would receive, silently, with its link up."""
        self._wired().set_dark(self.number, is_dark=True)

    def come_to_light(self) -> None:
        """End `go_dark`."""
        self._wired().set_dark(self.number, is_dark=False)

    def poweroff(self) -> None:
        """Take the power away: the link goes first, so nobody hears of it, then every process at once."""
        self.link_down()
        self._end_first_process()
        self._wired().unplug(self.number)

    def boot(self) -> None:
        """Start the host after `poweroff`: same name and addresses, no process."""
        self._start_first_process()
        self.connect(self._wired())

    def close(self) -> None:
        """End the host and all on it; harmless when it is off."""
        self._end_first_process()
        for process in self._started:
            process.close()

    def _wired(self) -> Switch:
        assert self._switch is not None, f"{self.name} is not on the network"
        return self._switch

    def _start_first_process(self) -> None:
        assert self._frame is None, f"{self.name} is on"
        uptime = str(self.number * _UPTIME_STEP)
        namespaces = ["--uts", "--ipc", "--net", "--pid", "--mount", "--mount-proc", "--time"]
        command = ["unshare", *namespaces, "--monotonic", uptime, "--boottime", uptime, "--fork", "--kill-child=KILL"]
        files = map(str, (self._files / "hosts", self._files / "resolv.conf"))
        frame = subprocess.Popen(
            [*command, "sh", "-c", _BOOT, "boot", self.name, *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
            start_new_session=True,  # Ctrl-C is the test run's
        )
        assert frame.stdout is not None
        with frame.stdout:
            answer = frame.stdout.readline().decode()
        if answer != "up\n":
            frame.kill()
            frame.communicate()
            message = f"host {self.name} did not come up (virtual hosts need root): {answer}"
            raise RuntimeError(message)
        self._frame = frame
        (self.first_pid,) = children_of(frame.pid)

    def _end_first_process(self) -> None:
        if self._frame is None:
            return
        os.kill(self.first_pid, signal.SIGKILL)
        assert self._frame.stdin is not None
        self._frame.stdin.close()
        # unshare waits for the first process, which the kernel lets go when everything else on the host is dead.
        self._frame.wait(DEADLINE)
        self._frame = None


class VirtualHosts(list[VirtualHost]):
    """The hosts of a test, on one switch.

    Attributes:
        hub: A host more, at which the switch stands; for what is not under test, such as a scheduler's controller.
        switch: The network.
    """

    def __init__(self, count: int, files: Path, *, prefix: str = "h") -> None:
        super().__init__()
        self._files = files
        names = {f"{prefix}{index}": _FIRST + index for index in range(count)}
        self._write_files({"hub": 1, **names})
        self.hub = VirtualHost("hub", 1, files)
        try:
            self.switch = Switch(self.hub.first_pid)
            for name, number in names.items():
                host = VirtualHost(name, number, files)
                self.append(host)
                host.connect(self.switch)
        except BaseException:
            self.close()
            raise

    def cut(self, source: VirtualHost, target: VirtualHost) -> None:
        """Drop what one host sends to another, silently. The way back stays open."""
        self.switch.set_cut(source.number, target.number, is_cut=True)

    def mend(self, source: VirtualHost, target: VirtualHost) -> None:
        """End `cut`."""
        self.switch.set_cut(source.number, target.number, is_cut=False)

    def silent_drop(self, one: VirtualHost, other: VirtualHost) -> None:
        """Drop all between two hosts, silently, either way."""
        self.cut(one, other)
        self.cut(other, one)

    def heal(self) -> None:
        """End every cut, drop and darkness, and put all cables back."""
        self.switch.heal()
        for host in self:
            if host.is_on:
                host.link_up()

    def close(self) -> None:
        """Remove all of it."""
        for host in [*self, self.hub]:
            host.close()

    def _write_files(self, numbers: Mapping[str, int]) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address_of(number)} {name}" for name, number in numbers.items()]
        lines += [f"{address6_of(number)} {name}" for name, number in numbers.items()]
        (self._files / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")
        (self._files / "resolv.conf").write_text(f"nameserver {address_of(1)}\n", encoding="ascii")


@starter
@contextlib.contextmanager
def virtual_hosts(count: int, *, prefix: str = "h") -> Iterator[VirtualHosts]:
    """Boot hosts, and remove them and all that runs on them at the end."""
    require_marker("root, for virtual hosts")
    with tempfile.TemporaryDirectory(prefix="hosts-") as files:
        hosts = VirtualHosts(count, Path(files), prefix=prefix)
        try:
            yield hosts
        finally:
            hosts.close()


# --- clocks -----------------------------------------------------------------------------------------------------------
@functools.cache
def _clock_library() -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    """Compile the library, once; it lives as long as the test run."""
    directory = tempfile.TemporaryDirectory(prefix="wall-clock-")
    library = Path(directory.name) / "wall_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, _CLOCK_SOURCE, "-ldl", "-pthread"], check=True)
    return library, directory


class HostClock:
    """What a host's programs see as the time of day; a file holds the difference.

    The kernel gives hosts their own monotonic clock, and there is one wall clock for all. A preloaded library stands
    between programs and that clock (`wall_clock.c`). libfaketime does much the same; with it the monotonic sleeps of
    Python fail, and waits of C++ libraries take as much longer as the clock is ahead.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def install(self) -> None:
        """Let programs that are started from now on see this clock. It is right until it is set."""
        self._path.write_bytes(_NANOSECONDS.pack(0))

    def set(self, seconds: float) -> None:
        """Set the clock, for programs that run as well."""
        with self._path.open("r+b") as file:  # in place: programs have it mapped
            file.write(_NANOSECONDS.pack(round(seconds * 1e9)))

    def environment(self) -> dict[str, str]:
        """Return the variables with which a program sees this clock; none before it is installed."""
        if not self._path.exists():
            return {}
        return {"LD_PRELOAD": str(_clock_library()[0]), "WALL_CLOCK_FILE": str(self._path)}


# --- programs on hosts -----------------------------------------------------------------------------------------------
_ENTER = Path(__file__).with_name("enter_host.py")


class HostProcess(Launched):
    """A program on a virtual host. What `Launched` says of the program is true here of the program on its host.

    Args:
        first_pid: The pid, as this machine sees it, of the host's first process.
        command: The program and its arguments.
        env: Variables set on top of a clean environment; None takes one away.
        cwd: The working directory.
        merge: Whether stderr goes into stdout's pipe.
    """

    def __init__(
        self,
        first_pid: int,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str | None],
        cwd: Path | str | None = None,
        merge: bool = False,
    ) -> None:
        enter = [sys.executable, "-I", "-S", str(_ENTER), str(first_pid)]
        super().__init__([*enter, *map(str, command)], env=clean_environment(env), cwd=cwd, merge=merge)
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The program's pid as this machine sees it."""
        if self._pid is None:
            # It is the only child of the one that entered the host.
            found = wait_until(lambda: self._is_over() or children_of(self.process.pid))
            if found is True:
                raise ProcessLookupError(self.process.args)
            (self._pid,) = found
        return self._pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program alone; one that has ended gets none."""
        if not self._is_over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program, and it alone, with SIGKILL."""
        self.send(signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs and close the pipes; harmless when all is over."""
        if not self._is_over():
            kill_processes([*descendants_of(self.process.pid), self.process.pid])
            self.process.wait(DEADLINE)
        super().close()

    def _is_over(self) -> bool:
        return self.process.poll() is not None
