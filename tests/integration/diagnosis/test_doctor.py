"""`elastic-run doctor` on virtual hosts: it finds what was broken there, that alone, and names the mend."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.hosts import virtual_hosts
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts


ROOT = Path(__file__).parents[3]
#: Drops what comes in: nothing answers any more, and no sender is told.
_DROP = (
    "nft add table inet t; nft 'add chain inet t c { type filter hook input priority 0; }'; "
    "nft add rule inet t c %s drop"
)
_SERVE = """
python -c 'import socket, time; s = socket.create_server(("", 29400)); time.sleep(99)' > log 2>&1 &
until ss -tln | grep -q :29400; do :; done"""
#: A program of this name in the directory stands in for NVIDIA's.
_NVIDIA_SMI = "printf '#!/bin/bash\\n%s\\n' > nvidia-smi; chmod +x nvidia-smi; export PATH=$PWD:$PATH"
_HELD = 'case $1 in *apps*) echo "GPU-1, 1, 70000, python";; *) echo "0, GPU-1, 70500, 81559";; esac'
_MISMATCH = "echo Failed to initialize NVML: Driver/library version mismatch; exit 18"
_CGROUPS = "mkdir -p groups/pids groups/memory groups/cpu; mount --bind groups /sys/fs/cgroup"


class Fault(NamedTuple):
    """A fault, and what the doctor has to say of it.

    Attributes:
        name: For the test's name.
        plant: What a shell on the host does before it starts the doctor.
        what: In the finding.
        remedy: In its mend.
        arguments: Of the doctor.
        is_problem: Whether it is a problem, not a warning.
    """

    name: str
    plant: str
    what: str
    remedy: str
    arguments: str = ""
    is_problem: bool = True


FAULTS = [
    Fault("unknown-name", "", "host nohost has no address", "/etc/hosts", "--rdzv-endpoint=nohost:29400"),
    Fault(
        "own-name",
        "hostname box",
        "own name box has no address",
        "GLOO_SOCKET_IFNAME",
        is_problem=False,
    ),
    Fault(
        "port-in-use",
        _SERVE,
        r"port 29400 of h0, this host, is in use by pid \d+ \(python\)",
        "another port",
        "--rdzv-endpoint=h0:29400",
    ),
    Fault("refused", "", "port 29400 of h1 refuses connections", "on that host", "--rdzv-endpoint=h1:29400"),
    Fault(
        "silent-port",
        _DROP % "tcp sport 29400",
        "port 29400 of h1 does not answer in 3.0 s",
        "open TCP port 29400 in the firewall",
        "--rdzv-endpoint=h1:29400",
    ),
    Fault("small-shm", "mount -t tmpfs -o size=64m shm /dev/shm", "/dev/shm is small", "--shm-size=8g"),
    Fault(
        "full-shm",
        "mount -t tmpfs -o size=200m shm /dev/shm; head -c 190m /dev/zero > /dev/shm/left",
        "/dev/shm is full",
        "ls -la /dev/shm",
    ),
    Fault("open-files", "ulimit -S -n 256", "only 256 open files are allowed", "ulimit -n "),
    Fault("open-files-hard", "ulimit -n 256", "only 256 open files are allowed", "raise the hard limit to 1024"),
    Fault(
        "read-only",
        "mkdir logs; mount -t tmpfs -o ro logs logs",
        "the directory .*/logs/run can't be written: Read-only file system",
        "name another directory",
        "--log-dir=logs/run",
    ),
    Fault(
        "full-disk",
        "mkdir logs; mount -t tmpfs -o size=1m logs logs; head -c 1m /dev/zero > logs/left",
        "the directory .*/logs can't be written: No space left on device",
        "name another directory",
        "--log-dir=logs",
    ),
    Fault("other-environment", "export VIRTUAL_ENV=/opt/other", "VIRTUAL_ENV is /opt/other, but", "pip install"),
    Fault("hidden-module", "touch torch.py", "torch.py in this directory hides", "mv torch.py"),
    Fault(
        "held-gpu",
        _NVIDIA_SMI % _HELD + "; export PYTHON_EXEC=$(type -p python)",
        r"memory of 1 GPU is in use \(0: 70500 of",
        "kill PID",
    ),
    Fault("driver-mismatch", _NVIDIA_SMI % _MISMATCH, "driver and its libraries have different", "restart this host"),
    Fault("wrong-gpu", "export CUDA_VISIBLE_DEVICES=3", "names GPU 3, which this host does not have", "unset CUDA"),
    Fault(
        "few-processes",
        f"{_CGROUPS}; echo 100 | tee groups/pids.max > groups/pids/pids.max; "
        "echo 60 | tee groups/pids.current > groups/pids/pids.current",
        "only 40 more processes or threads may be started",
        "--pids-limit",
    ),
    Fault(
        "little-memory",
        f"{_CGROUPS}; echo 2147483648 | tee groups/memory.max > groups/memory/memory.limit_in_bytes; "
        "echo 2097152000 | tee groups/memory.current > groups/memory/memory.usage_in_bytes",
        "only 48 MiB of memory are left",
        "resources.limits.memory",
    ),
    Fault("too-much-to-keep", "", "needs 900000.0 GB of memory, and", "raise the limit", "--keep-state=900TB"),
    Fault(
        "no-interface",
        "export GLOO_SOCKET_IFNAME=ib0",
        "GLOO_SOCKET_IFNAME names ib0, an interface that this host does not have",
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    Fault(
        "interface-down",
        "ip link add br0 type bridge; export NCCL_SOCKET_IFNAME=br",
        "NCCL_SOCKET_IFNAME names br, an interface that is down",
        "unset NCCL_SOCKET_IFNAME",
    ),
    Fault("typing-error", "export PET_NODES=3", "PET_NODES is not a variable", "PET_NNODES"),
    Fault("leftovers", "export RANK=0 WORLD_SIZE=8", "RANK is set", "unset RANK WORLD_SIZE", is_problem=False),
    Fault("threads", "export OMP_NUM_THREADS=auto", "OMP_NUM_THREADS='auto' is not a number", "unset OMP_NUM"),
]


@pytest.fixture
def hosts() -> Iterator[VirtualHosts]:
    """Boot two hosts for one test, which breaks the first one."""
    with virtual_hosts(2) as booted:
        yield booted


def examine(hosts: VirtualHosts, directory: Path, arguments: str, plant: str = "") -> tuple[int, str, str]:
    """Break the first host, and return the doctor's exit code there, its report and its standard error."""
    command = f"{plant or ':'}; exec {sys.executable} -m elastic_run doctor {arguments}"
    temporary = directory / "tmp"
    temporary.mkdir()
    env = {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(temporary),
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    process = hosts[0].start(["bash", "-c", command], env=env, cwd=directory)
    return process.wait_exit(deadline=60) or 0, process.stdout, process.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_with_its_mend(hosts: VirtualHosts, tmp_path: Path, fault: Fault) -> None:
    """Each fault is one finding that names it and the mend; there is no other, and the exit code tells problems."""
    code, out, err = examine(hosts, tmp_path, f"{fault.arguments} --json", fault.plant)
    findings = json.loads(out)["findings"]
    assert len(findings) == 1, (findings, err)
    (found,) = findings
    assert re.search(fault.what, found["what"]), found
    assert fault.remedy in found["remedy"], found
    assert (found["severity"], code) == (("problem", 1) if fault.is_problem else ("warning", 0))


@pytest.mark.timeout(120)
def test_a_healthy_host_has_no_finding(hosts: VirtualHosts, tmp_path: Path) -> None:
    """Nothing is broken: no problem, exit code 0, and nothing is left behind."""
    code, out, err = examine(hosts, tmp_path, f"--rdzv-endpoint=h0:29400 --log-dir={tmp_path}/logs")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "no problems, no warnings"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["tmp"]


@pytest.mark.timeout(120)
def test_a_report_that_cannot_be_written_is_one_line(hosts: VirtualHosts, tmp_path: Path) -> None:
    """On a full disk the doctor has no traceback."""
    code, _, err = examine(hosts, tmp_path, "> /dev/full")
    assert (code, err) == (2, "elastic-run: error: doctor: standard output can't be written: No space left on device\n")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seconds", ["0", "-1", "x"])
def test_a_wrong_timeout_is_refused_by_its_name(hosts: VirtualHosts, tmp_path: Path, seconds: str) -> None:
    """The line names the doctor's own flag."""
    code, _, err = examine(hosts, tmp_path, f"--nnodes=2 --rdzv-endpoint=h0:29400 --timeout={seconds}")
    assert (code, err) == (
        2,
        f"elastic-run: error: doctor: --timeout: '{seconds}' is not a number of seconds from 1 up\n",
    )


# --- of several nodes: they connect, and name what is wrong between them ----------------------------------------------
@pytest.fixture
def three_hosts() -> Iterator[VirtualHosts]:
    """Boot three hosts for one test."""
    with virtual_hosts(3) as booted:
        yield booted


def start(three_hosts: VirtualHosts, *arguments: str, plants: Sequence[str] = ("", "", "")) -> list[HostProcess]:
    """Start the doctor on each host for which there is a plant, after its shell has broken something."""
    command = f"exec {sys.executable} -m elastic_run doctor --nnodes=3 --rdzv-endpoint=h0:29400 {' '.join(arguments)}"
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shells = zip(three_hosts, plants, strict=False)
    return [host.start(["bash", "-c", f"{plant or ':'}; {command}"], env=env) for host, plant in shells]


def read_codes(doctors: Sequence[HostProcess]) -> list[int | None]:
    """Wait for all doctors, and return their exit codes."""
    return [doctor.wait_exit(deadline=180) for doctor in doctors]


def read_findings(doctors: Sequence[HostProcess]) -> list[dict[str, str]]:
    """Return the findings, which the node with rank 0 has printed."""
    (text,) = [doctor.stdout for doctor in doctors if doctor.stdout]
    findings: list[dict[str, str]] = json.loads(text)["findings"]
    return findings


@pytest.mark.timeout(200)
def test_healthy_nodes_have_no_finding(three_hosts: VirtualHosts) -> None:
    """The first node prints what was measured for all, the others say where that stands; all end with 0."""
    doctors = start(three_hosts)
    assert read_codes(doctors) == [0, 0, 0], [doctor.stdout + doctor.stderr for doctor in doctors]
    (first,) = [doctor for doctor in doctors if doctor.stdout]
    others = [doctor for doctor in doctors if doctor is not first]
    hosts_line, printer = first.stdout.splitlines()[0], first.stdout.split(",")[0].split()[-1]
    assert sorted(hosts_line.removeprefix("elastic-run doctor on ").split(", ")) == ["h0", "h1", "h2"]
    assert "\nno problems, " in first.stdout, first.stdout  # a busy machine may have a slow link
    assert all(text in first.stdout for text in ("pairs 3", "MB/s", "all-reduce of 4 MB")), first.stdout
    assert all(f"are printed by the doctor on {printer}" in doctor.stderr for doctor in others)


@pytest.mark.timeout(200)
def test_a_pair_that_is_cut_is_named(three_hosts: VirtualHosts) -> None:
    """Packets of one node to another get lost, so neither can connect to the other; all doctors end with 1."""
    three_hosts.cut(three_hosts[1], three_hosts[2])
    doctors = start(three_hosts, "--json")
    assert read_codes(doctors) == [1, 1, 1]
    (found,) = read_findings(doctors)
    # The node with the lower rank comes first, and ranks go by arrival.
    assert found["what"] in {"h1 and h2 can't reach each other", "h2 and h1 can't reach each other"}


@pytest.mark.timeout(200)
def test_other_versions_and_findings_of_one_node_have_its_name(three_hosts: VirtualHosts, tmp_path: Path) -> None:
    """What a node has found on itself is printed by the first node too."""
    metadata = tmp_path / "torch-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n", encoding="utf-8")
    other = f"export PYTHONPATH={tmp_path}:$PYTHONPATH; mount -t tmpfs -o size=64m shm /dev/shm"
    doctors = start(three_hosts, "--json", plants=["", other, ""])
    assert read_codes(doctors) == [1, 1, 1]
    findings = [found["what"] for found in read_findings(doctors)]
    assert findings[0].startswith("torch is not the same on all nodes: h1 1.2.3, but 2."), findings
    assert findings[1].startswith("h1: /dev/shm is small"), findings
    assert len(findings) == 2


@pytest.mark.timeout(200)
def test_nodes_that_do_not_meet_are_a_problem(three_hosts: VirtualHosts) -> None:
    """The third node is missing: the others say so after the timeout, with what they have found on themselves."""
    doctors = start(three_hosts, "--timeout=5", plants=["", "export OMP_NUM_THREADS=x"])
    assert read_codes(doctors) == [1, 1]
    assert "3 nodes did not come together at h0:29400 (--timeout=5)" in doctors[0].stdout
    assert "OMP_NUM_THREADS='x' is not a number" in doctors[1].stdout


def find_worker(host: VirtualHost) -> int | None:
    """Return the pid of the doctor's worker on a host, once it runs."""
    for pid in host.processes():
        with contextlib.suppress(OSError):
            if b"doctor_nodes" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.mark.timeout(200)
def test_a_doctor_that_is_killed_ends_the_others_at_once(three_hosts: VirtualHosts) -> None:
    """Nobody waits for another node, and the finding says that one was lost, not that none came."""
    doctors = start(three_hosts)
    wait_until(lambda: find_worker(three_hosts[1]), deadline=60, what="the nodes have met")
    doctors[1].kill()
    begun = time.monotonic()
    assert read_codes([doctors[0], doctors[2]]) == [1, 1]
    assert time.monotonic() - begun < stretched(10)
    for doctor in (doctors[0], doctors[2]):
        assert "a node was lost while the nodes examined the network" in doctor.stdout, doctor.stdout
        assert "lost: h1" in " ".join(doctor.stderr.split()), doctor.stderr


@pytest.mark.timeout(200)
def test_a_killed_worker_is_not_taken_for_nodes_that_did_not_meet(three_hosts: VirtualHosts) -> None:
    """The finding says that the check between the nodes was ended; all doctors end with 1."""
    doctors = start(three_hosts)
    pid = wait_until(lambda: find_worker(three_hosts[1]), deadline=60, what="the nodes have met")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert read_codes(doctors) == [1, 1, 1]
    assert all("have met, but the check between them did not end" in doctor.stdout for doctor in doctors)


@pytest.mark.timeout(200)
def test_a_torch_that_cannot_be_imported_is_named(three_hosts: VirtualHosts, tmp_path: Path) -> None:
    """A broken installation of torch is a finding with its error, not a hang."""
    metadata = tmp_path / "torch-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n", encoding="utf-8")
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')", encoding="utf-8")
    doctors = start(three_hosts, "--json", plants=[f"export PYTHONPATH={tmp_path}:$PYTHONPATH"] * 3)
    assert read_codes(doctors) == [1, 1, 1]
    (found,) = [finding for finding in read_findings(doctors) if "all-reduce" in finding["what"]]
    assert "ImportError: libtorch.so: no such file" in found["evidence"], found


@pytest.mark.timeout(200)
def test_no_directory_for_temporary_files_is_a_finding(three_hosts: VirtualHosts) -> None:
    """Where nothing can be written the doctor says so instead of a traceback."""
    plant = "for d in /tmp /var/tmp /dev/shm; do mount --bind $d $d && mount -o remount,bind,ro $d; done; cd /sys"
    (doctor,) = start(three_hosts, plants=[plant])
    assert read_codes([doctor]) == [1]
    assert "the nodes can't be examined together" in doctor.stdout, doctor.stdout + doctor.stderr
    assert "export TMPDIR=DIR" in doctor.stdout
