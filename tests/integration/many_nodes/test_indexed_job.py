"""An indexed Job of Kubernetes, played on virtual hosts: pods with names, whose Service comes late."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os
os.write(1, "trained {RANK} of {WORLD_SIZE} on ".format(**os.environ).encode() + os.uname().nodename.encode() + b"\\n")
"""
_DOMAIN = "mesh.default.svc.cluster.local"


class Pods:
    """Three pods of the Job `train`, each with a hosts file of its own, as the kubelet writes it."""

    def __init__(self, hosts: VirtualHosts, directory: Path) -> None:
        self._hosts = hosts
        self._directory = directory
        (directory / "train.py").write_text(SCRIPT, encoding="utf-8")

    def start(self, *arguments: str) -> list[HostProcess]:
        """Start each pod's launcher; so far a pod knows its own name only."""
        return [self._start(index, host, arguments) for index, host in enumerate(self._hosts)]

    def _start(self, index: int, host: VirtualHost, arguments: tuple[str, ...]) -> HostProcess:
        self._hosts_file(host).write_text(f"127.0.0.1 localhost\n{_line(host)}\n", encoding="ascii")
        host.run("mount", "--bind", self._hosts_file(host), "/etc/hosts")
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {"PATH": programs, "PYTHONPATH": str(ROOT), "JOB_COMPLETION_INDEX": str(index), "PET_NNODES": "3"}
        command = [sys.executable, "-m", "elastic_run", *arguments, "train.py"]
        return host.start(command, env=env, cwd=self._directory, merge=True)

    def publish(self) -> None:
        """Let all names be known everywhere, as a headless Service does when its pods have addresses."""
        lines = "".join(f"{_line(host)}\n" for host in self._hosts)
        for host in self._hosts:  # in place: the mount holds the file, not its name
            with self._hosts_file(host).open("a", encoding="ascii") as file:
                file.write(lines)

    def _hosts_file(self, host: VirtualHost) -> Path:
        return self._directory / f"hosts.{host.name}"


def _line(host: VirtualHost) -> str:
    return f"{host.address} {host.name}.{_DOMAIN} {host.name}"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    """Boot three hosts under the names that the Job's pods have."""
    with virtual_hosts(3, prefix="train-") as hosts:
        yield Pods(hosts, tmp_path)


def test_pods_whose_service_comes_late_are_one_job(pods: Pods) -> None:
    """Names are looked up again until they are known; ranks follow the pods' indexes, and one pod says what follows."""
    launchers = pods.start()
    wait_until(lambda: "0.mesh.default" in launchers[2].stdout.partition("waiting")[2], what="a pod that waits")
    pods.publish()
    assert [launcher.wait_exit() for launcher in launchers] == [0, 0, 0], [one.stdout for one in launchers]
    trained = [re.findall(r"trained (.*)", launcher.stdout) for launcher in launchers]
    assert trained == [[f"{index} of 3 on train-{index}"] for index in range(3)]
    told = [launcher.stdout.count("from the Kubernetes Job: --rdzv-backend=c10d --rdzv-") for launcher in launchers]
    assert told == [1, 0, 0]
