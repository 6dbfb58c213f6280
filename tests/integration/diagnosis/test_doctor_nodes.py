"""`elastic-run doctor --nnodes=3` on virtual hosts: the nodes connect, and name what is wrong between them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts

pytestmark = pytest.mark.timeout(200)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hosts() -> Iterator[VirtualHosts]:
    """Boot three hosts for one test."""
    with virtual_hosts(3) as booted:
        yield booted


def start(hosts: VirtualHosts, *arguments: str, plants: Sequence[str] = ("", "", "")) -> list[HostProcess]:
    """Start the doctor on each host for which there is a plant, after its shell has broken something."""
    command = f"exec {sys.executable} -m elastic_run doctor --nnodes=3 --rdzv-endpoint=h0:29400 {' '.join(arguments)}"
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shells = zip(hosts, plants, strict=False)
    return [host.start(["bash", "-c", f"{plant or ':'}; {command}"], env=env) for host, plant in shells]


def read_codes(doctors: Sequence[HostProcess]) -> list[int | None]:
    """Wait for all doctors, and return their exit codes."""
    return [doctor.wait_exit(deadline=180) for doctor in doctors]


def read_findings(doctors: Sequence[HostProcess]) -> list[dict[str, str]]:
    """Return the findings, which the node with rank 0 has printed."""
    (text,) = [doctor.stdout for doctor in doctors if doctor.stdout]
    findings: list[dict[str, str]] = json.loads(text)["findings"]
    return findings


def test_healthy_nodes_have_no_finding(hosts: VirtualHosts) -> None:
    """The first node prints what was measured for all, the others say where that stands; all end with 0."""
    doctors = start(hosts)
    assert read_codes(doctors) == [0, 0, 0], [doctor.stdout + doctor.stderr for doctor in doctors]
    (first,) = [doctor for doctor in doctors if doctor.stdout]
    others = [doctor for doctor in doctors if doctor is not first]
    hosts_line, printer = first.stdout.splitlines()[0], first.stdout.split(",")[0].split()[-1]
    assert sorted(hosts_line.removeprefix("elastic-run doctor on ").split(", ")) == ["h0", "h1", "h2"]
    assert "\nno problems, " in first.stdout, first.stdout  # a busy machine may have a slow link
    assert all(text in first.stdout for text in ("pairs 3", "MB/s", "all-reduce of 4 MB")), first.stdout
    assert all(f"are printed by the doctor on {printer}" in doctor.stderr for doctor in others)


def test_a_lost_direction_is_named(hosts: VirtualHosts) -> None:
    """Packets of one node to another get lost; the pair and the direction are named, and all doctors end with 1."""
    hosts.cut(hosts[1], hosts[2])
    doctors = start(hosts, "--json")
    assert read_codes(doctors) == [1, 1, 1]
    (found,) = read_findings(doctors)
    assert found["what"] == "packets from h1 to h2 get lost"
    assert found["evidence"] == "those from h2 to h1 arrive"


def test_other_versions_and_findings_of_one_node_have_its_name(hosts: VirtualHosts, tmp_path: Path) -> None:
    """What a node has found on itself is printed by the first node too."""
    metadata = tmp_path / "torch-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n", encoding="utf-8")
    other = f"export PYTHONPATH={tmp_path}:$PYTHONPATH; mount -t tmpfs -o size=64m shm /dev/shm"
    doctors = start(hosts, "--json", plants=["", other, ""])
    assert read_codes(doctors) == [1, 1, 1]
    findings = [found["what"] for found in read_findings(doctors)]
    assert findings[0].startswith("torch is not the same on all nodes: h1 1.2.3, but 2."), findings
    assert findings[1].startswith("h1: /dev/shm is small"), findings
    assert len(findings) == 2


def test_nodes_that_do_not_meet_are_a_problem(hosts: VirtualHosts) -> None:
    """The third node is missing: the others say so after the timeout, with what they have found on themselves."""
    doctors = start(hosts, "--timeout=5", plants=["", "export OMP_NUM_THREADS=x"])
    assert read_codes(doctors) == [1, 1]
    assert "3 nodes did not come together at h0:29400 (--timeout=5)" in doctors[0].stdout
    assert "OMP_NUM_THREADS='x' is not a number" in doctors[1].stdout


def find_worker(host: VirtualHost) -> int | None:
    """Return the pid of the doctor's worker on a host, once it runs."""
    for pid in host.processes():
        with contextlib.suppress(OSError):
            if b"probe_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def test_a_doctor_that_is_killed_ends_the_others_at_once(hosts: VirtualHosts) -> None:
    """Nobody waits for another node, and the finding says that one was lost, not that none came."""
    doctors = start(hosts)
    wait_until(lambda: find_worker(hosts[1]), deadline=60, what="the nodes have met")
    doctors[1].kill()
    begun = time.monotonic()
    assert read_codes([doctors[0], doctors[2]]) == [1, 1]
    assert time.monotonic() - begun < stretched(10)
    for doctor in (doctors[0], doctors[2]):
        assert "a node was lost while the nodes examined the network" in doctor.stdout, doctor.stdout
        assert "lost: h1" in " ".join(doctor.stderr.split()), doctor.stderr


def test_a_killed_worker_is_not_taken_for_nodes_that_did_not_meet(hosts: VirtualHosts) -> None:
    """The finding says that the check between the nodes was ended; all doctors end with 1."""
    doctors = start(hosts)
    pid = wait_until(lambda: find_worker(hosts[1]), deadline=60, what="the nodes have met")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert read_codes(doctors) == [1, 1, 1]
    assert all("have met, but the check between them did not end" in doctor.stdout for doctor in doctors)


def test_a_torch_that_cannot_be_imported_is_named(hosts: VirtualHosts, tmp_path: Path) -> None:
    """A broken installation of torch is a finding with its error, not a hang."""
    metadata = tmp_path / "torch-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n", encoding="utf-8")
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')", encoding="utf-8")
    doctors = start(hosts, "--json", plants=[f"export PYTHONPATH={tmp_path}:$PYTHONPATH"] * 3)
    assert read_codes(doctors) == [1, 1, 1]
    (found,) = [finding for finding in read_findings(doctors) if "all-reduce" in finding["what"]]
    assert "ImportError: libtorch.so: no such file" in found["evidence"], found


def test_no_directory_for_temporary_files_is_a_finding(hosts: VirtualHosts) -> None:
    """Where nothing can be written the doctor says so instead of a traceback."""
    plant = "for d in /tmp /var/tmp /dev/shm; do mount --bind $d $d && mount -o remount,bind,ro $d; done; cd /sys"
    (doctor,) = start(hosts, plants=[plant])
    assert read_codes([doctor]) == [1]
    assert "the nodes can't be examined together" in doctor.stdout, doctor.stdout + doctor.stderr
    assert "export TMPDIR=DIR" in doctor.stdout
