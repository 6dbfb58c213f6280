"""Virtual hosts with OpenSSH's server, and a machine from which --hosts starts jobs there. Needs root and sshd.

Hosts share the files, so one directory has the keys of all and the configuration of both sides.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.hosts import virtual_hosts
from tests.support.launch import ELASTIC_RUN
from tests.support.system import starter
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.hosts import HostProcess, VirtualHosts

_FILES = {
    "server": "HostKey $/host\nAuthorizedKeysFile $/key.pub\nStrictModes no\nPidFile none\nForceCommand $/shell\n",
    "client": "IdentityFile $/key\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n",
    # A login shell that is not silent.
    "shell": '#!/bin/sh\necho Welcome\necho noise >&2\neval "$SSH_ORIGINAL_COMMAND"\n',
}


class SshHosts:
    """Hosts with sshd; `start` runs the command on the hub, which is no host of the job."""

    def __init__(self, hosts: VirtualHosts, files: Path) -> None:
        self.hosts = hosts
        self.names = [host.name for host in hosts]
        self.options = ("-F", str(files / "client"))
        #: Where jobs are started: a name that is not easy to write in a shell.
        self.directory = files / 'it\'s a "dir"' / "job"
        self.directory.mkdir(parents=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", files / name], check=True)
        for name, text in _FILES.items():
            (files / name).write_text(text.replace("$/", f"{files}/"), encoding="ascii")
        (files / "shell").chmod(0o755)
        for server in [host.start(["/usr/sbin/sshd", "-D", "-e", "-f", files / "server"]) for host in hosts]:
            server.wait_line("Server listening on 0.0.0.0")
        self._own = {pid for host in hosts for pid in host.processes()}

    def start(
        self, *words: str | Path, hosts: str = "", env: Mapping[str, str] | None = None, program: Sequence[str] = ()
    ) -> HostProcess:
        """Start a job, by default on all hosts."""
        options = (f"--hosts={hosts or ','.join(self.names)}", f"--ssh-options={shlex.join(self.options)}")
        return self.hosts.hub.start([*(program or ELASTIC_RUN), *options, *words], env=env, cwd=self.directory)

    def wait_empty(self, deadline: float) -> None:
        """Wait until nothing but the servers is left on the hosts."""
        wait_until(lambda: {pid for host in self.hosts for pid in host.processes()} <= self._own, deadline=deadline)


@starter
@contextlib.contextmanager
def ssh_hosts(count: int, directory: Path) -> Iterator[SshHosts]:
    """Boot hosts with sshd, and remove them at the end."""
    with virtual_hosts(count) as hosts:
        yield SshHosts(hosts, directory)
