"""--hosts: what a job on three hosts takes to start beyond ssh's own connections. Needs root and sshd.

The hosts are namespaces of this machine, so they share its processors, which real hosts do not.
"""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from benchmarks.figures import Bar, alone
from tests.support.ssh import ssh_hosts

if TYPE_CHECKING:
    from benchmarks.figures import Figure
    from benchmarks.installation import Effort, Installation
    from tests.support.ssh import SshHosts

_HOSTS = 3


def measure(installation: Installation, effort: Effort) -> list[Figure]:
    """Measure the start, in turns with connections that run `true`."""
    directory = installation.directory / "ssh"
    directory.mkdir()
    with ssh_hosts(_HOSTS, directory) as ssh:
        start_job(ssh, installation)  # the page cache is warm
        pairs = [(start_job(ssh, installation), connect(ssh)) for _ in range(2 * effort.pairs)]
    alone_ms = sorted(connected for _, connected in pairs)[len(pairs) // 2]
    return [
        alone(
            [started - connected for started, connected in pairs],
            benchmark="hosts",
            name=f"--hosts with {_HOSTS} hosts, to the first line of the last worker, beyond ssh's connections",
            unit="ms",
            bar=Bar(300.0),
            note=f"{_HOSTS} connections side by side take {alone_ms:.0f} ms",
        )
    ]


def start_job(ssh: SshHosts, installation: Installation) -> float:
    """Return the milliseconds from the start of the command to the first line of the last worker."""
    begin = time.monotonic()
    job = ssh.start(installation.worker("first_line"), program=installation.elastic_run)
    job.wait_lines(r"\] \d+", count=_HOSTS)
    took = time.monotonic() - begin
    job.wait_exit()
    return took * 1e3


def connect(ssh: SshHosts) -> float:
    """Return the milliseconds of the same connections side by side."""
    begin = time.monotonic()
    command = shlex.join(("ssh", *ssh.options))
    ssh.hosts.hub.start(
        ["sh", "-c", f"for host in {' '.join(ssh.names)}; do {command} $host true & done; wait"]
    ).wait_exit()
    return (time.monotonic() - begin) * 1e3
