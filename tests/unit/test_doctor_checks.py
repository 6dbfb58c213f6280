"""The doctor's checks: what the planted faults of the integration tests do not show."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from elastic_run.diagnosis import doctor_checks, doctor_host
from elastic_run.diagnosis.doctor_checks import FAMILIES, Lookup, check_ports, check_python, check_variables, run_checks
from elastic_run.diagnosis.doctor_host import check_directories, parse_gpus
from elastic_run.diagnosis.doctor_nodes import NodeReport, check_node_reports, describe_network
from elastic_run.diagnosis.doctor_report import Finding, Subject, problem, render_report

if TYPE_CHECKING:
    from pathlib import Path

_LOOPBACK = "127.0.0.1"
_INTERFACES = {"lo": True, "eth0": True, "ib0": False}
_NO_PID = 2**22 + 1


def texts(findings: list[Finding]) -> list[str]:
    """Return each finding as its severity and sentence."""
    return [f"{finding.severity}: {finding.what}" for finding in findings]


@pytest.mark.parametrize(
    ("is_alone", "interface", "severity"),
    [(True, "", None), (False, "", "warning"), (False, "eth0", None)],
)
def test_an_own_name_that_is_loopback_matters_between_nodes(
    is_alone: bool,
    interface: str,
    severity: str | None,
) -> None:
    """Gloo offers that address to others, unless a variable names the interface."""
    found = doctor_checks.check_own_name(Lookup("node0", ("127.0.1.1",), 0.0), is_alone=is_alone, interface=interface)
    assert [finding.severity for finding in found] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("is_alone", "interface", "severity"),
    [(True, "", "warning"), (False, "", "problem"), (False, "eth0", "warning")],
)
def test_an_own_name_without_an_address_is_told(
    is_alone: bool,
    interface: str,
    severity: str,
) -> None:
    """A job of several nodes fails because of it, unless a variable names the interface."""
    lookup = Lookup("node0", (), 5.0, "no name server answers")
    (found,) = doctor_checks.check_own_name(lookup, is_alone=is_alone, interface=interface)
    assert (found.severity, found.evidence) == (severity, "no name server answers")


def test_a_port_of_another_host_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that accepts the connection is in order."""
    monkeypatch.setattr(doctor_checks, "can_bind", lambda *_: False)
    with socket.create_server((_LOOPBACK, 0)) as server:
        subject = Subject({}, "h", endpoints=(server.getsockname(), ("nobody", -1)))
        assert check_ports(subject) == []
    (found,) = check_ports(subject)
    assert "refuses connections" in found.what


def test_nodes_that_meet_may_find_a_port_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes are started one after another, and one of them will serve the port; a single node waits for none."""
    monkeypatch.setattr(doctor_checks, "can_bind", lambda *_: False)
    with socket.create_server((_LOOPBACK, 0)) as server:
        endpoint = server.getsockname()
    assert [len(check_ports(Subject({}, "h", endpoints=(endpoint,), most_nodes=most))) for most in (1, 2)] == [1, 0]


@pytest.mark.parametrize(
    ("value", "count"),
    [("eth", 0), ("=eth", 1), ("=eth0", 0), ("ib,eth", 0), ("ib", 1), ("^lo,docker", 0), ("", 0), ("en", 1)],
)
def test_nccl_takes_prefixes_and_whole_names(value: str, count: int) -> None:
    """NCCL_SOCKET_IFNAME has a grammar of its own."""
    assert len(doctor_checks.check_nccl(value, _INTERFACES)) == count


def test_a_hanging_driver_is_found_in_the_failure_of_nvidia_smi() -> None:
    """The remedy is not the same for a hang, a mismatch and another failure."""
    failures = ("no answer in 15 s", "Failed to initialize NVML: Driver/library version mismatch", "No devices")
    assert len({doctor_host.check_smi_failure(failure).remedy for failure in failures}) == 3


@pytest.mark.parametrize(
    ("mask", "count"), [(None, 0), ("0,1", 0), ("", 1), ("1,2", 1), ("GPU-b", 0), ("GPU-x", 1), ("MIG-GPU-a/1/0", 0)]
)
def test_masks_of_gpus(mask: str | None, count: int) -> None:
    """CUDA_VISIBLE_DEVICES has numbers, names that begin as GPUs', and parts of GPUs."""
    found = parse_gpus("0, GPU-aa, 0, 81559\n1, GPU-bb, [N/A], 81559\n")
    assert len(doctor_host.check_mask({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}, found)) == count


def test_processes_on_a_gpu_are_named() -> None:
    """With their users, where they can be seen; nvidia-smi's name may have commas; other lines are passed over."""
    text = f"GPU-a, {_NO_PID}, 300, python train.py, fast\nGPU-a, [N/A], 300, x\nno running processes found\n"
    found = doctor_host.parse_processes(f"{text}GPU-b, {os.getpid()}, 7, [Not Found]\n")
    me = psutil.Process()
    assert found == {
        "GPU-a": [f"process {_NO_PID} (python train.py, fast, 300 MiB)"],
        "GPU-b": [f"process {os.getpid()} ({me.name()} of {me.username()}, 7 MiB)"],
    }


def test_the_directory_of_temporary_files_is_tried(tmp_path: Path) -> None:
    """TMPDIR names it; a file in its place is no directory."""
    assert check_directories(Subject({"TMPDIR": str(tmp_path / "made" / "later")}, "h")) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (found,) = check_directories(Subject({"TMPDIR": str(tmp_path / "file")}, "h"))
    assert found.what.endswith("can't be written: Not a directory")


def test_a_directory_with_little_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 1 GiB is a warning; below 64 MiB, or with few files to be had, a problem."""

    def check(mebibytes: int, files: int) -> list[str]:
        state = SimpleNamespace(f_bavail=mebibytes, f_frsize=1 << 20, f_files=1000, f_favail=files)
        monkeypatch.setattr(os, "statvfs", lambda _: state)
        found = check_directories(Subject({"TMPDIR": str(tmp_path)}, "h"))
        return [text.replace(str(tmp_path), "/tmp") for text in texts(found)]

    assert check(1024, 100) == []
    assert check(1023, 100) == check(64, 100) == ["warning: the file system of /tmp is almost full"]
    assert check(63, 100) == ["problem: the file system of /tmp is full"]
    assert check(1024, 99) == ["problem: the file system of /tmp is full: it has room for 99 more files"]


def test_with_another_python_for_workers_the_active_environment_does_not_matter() -> None:
    """Nor does the torch of this one; but it has to be there."""
    environ = {"VIRTUAL_ENV": "/venv", "PYTHON_EXEC": "/bin/sh"}
    assert check_python(Subject(environ, "h")) == []
    (found,) = check_python(Subject({**environ, "PYTHON_EXEC": "/gone/python"}, "h"))
    assert found.what == "PYTHON_EXEC is /gone/python, which can't be executed"


def test_all_variables_are_judged() -> None:
    """Leftovers, settings and names each have their finding."""
    environ = {"RANK": "0", "NCCL_P2P_DISABLE": "1", "PET_NNODE": "2"}
    subject = Subject(environ, "h", known_variables=frozenset({"PET_NNODES"}))
    found = check_variables(subject)
    assert [finding.what.split()[0].partition("=")[0] for finding in found] == list(environ)
    assert found[2].remedy == "did you mean PET_NNODES?"
    assert check_variables(Subject({}, "h")) == []


def test_settings_for_debugging_are_warnings() -> None:
    """They may be meant so."""
    environ = {"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "0", "OMP_NUM_THREADS": "4,2"}
    assert [found.severity for found in check_variables(Subject(environ, "h"))] == ["warning"]


def test_only_the_threads_of_this_user_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes is each user's own; a process that has just ended shows neither user nor threads."""
    other = os.getuid() + 1
    processes = [(os.getuid(), 3), (other, 40), (os.getuid(), None), (None, 500), (os.getuid(), 2)]
    shown = [
        SimpleNamespace(info={"uids": uid if uid is None else SimpleNamespace(real=uid), "num_threads": count})
        for uid, count in processes
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter(shown))
    assert doctor_host._count_running() == 5


def test_a_check_that_hangs_or_breaks_is_a_finding() -> None:
    """A network file system that does not answer stops neither the doctor nor the other checks."""
    end = threading.Event()

    def hang(_: Subject) -> list[Finding]:
        end.wait()
        return []

    def break_down(_: Subject) -> list[Finding]:
        message = "broken"
        raise RuntimeError(message)

    families = {"broken": break_down, "disks": hang, "names": lambda _: [problem("a", "b", "c")]}
    found = run_checks(Subject({}, "h"), families=families, deadline=0.2)
    end.set()
    assert texts(found) == [
        "problem: the check of disks hangs for more than 0 s",
        "problem: a",
        "warning: broken can't be checked: RuntimeError: broken",
    ]


def test_a_host_that_starts_no_thread_gets_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes that is reached is one finding, with its remedy, and no traceback."""

    def refuse(_: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (found,) = run_checks(Subject({}, "h"), families={"names": lambda _: [], "ports": lambda _: []})
    assert (found.evidence, "ulimit -u" in found.remedy) == ("can't start new thread", True)


def test_the_report_is_for_one_screen() -> None:
    """However much is wrong, the report has at most 40 lines, and says how much there is more."""
    text = render_report(["h0"], [problem("what", "evidence", "remedy")] * 30, {"torch": "2.13"})
    assert len(text.splitlines()) < 40
    assert text.splitlines()[-2:] == ["and 21 more (--json has all)", "30 problems, no warnings"]
    assert len(FAMILIES) == 10


def report(host: str, *, failures: dict[int, str] | None = None, **more: Any) -> NodeReport:
    """Return the report of a healthy node, but for what is given."""
    return NodeReport(host, failures=failures or {}, **{"rate": 1e9, "reduction": 0.1, **more})


def test_a_pair_is_named_with_what_is_known_of_its_directions() -> None:
    """If one of the two connections fails, that direction is named."""
    silent = "no answer"
    refused = [report("a", failures={1: "nobody listens"}), report("b")]
    assert texts(check_node_reports(refused)) == ["problem: a can't connect to b"]
    apart = [report("a", failures={1: silent}), report("b", failures={0: silent})]
    assert texts(check_node_reports(apart)) == ["problem: a and b can't reach each other"]


def test_a_node_that_reaches_no_other_is_named_once() -> None:
    """Not each of its pairs; and of many pairs the first ones are named."""
    lonely = [report("a", failures={2: "no answer"}), report("b", failures={2: "no answer"}), report("c")]
    (found,) = check_node_reports(lonely)
    assert found.what == "c and the other nodes can't reach each other, though all of them have met"
    many = [report(str(rank), failures={rank + 1 - 2 * (rank % 2): "no answer"}) for rank in range(12)]
    assert texts(check_node_reports(many))[-1] == "problem: 2 more pairs can't reach each other"


def test_nodes_that_differ_are_named() -> None:
    """Versions, clocks, rates and a failed all-reduce; what several have found on themselves stands once."""
    own = (problem("/dev/shm is full", "e", "r"),)
    nodes = [
        report("a", facts={"torch": "2.13", "Python": "3.12"}, findings=own, clock=100.0),
        report("b", facts={"torch": "2.12", "Python": "3.12"}, findings=own, clock=50.0, reduction="timeout"),
        report("c", facts={"torch": "2.13", "Python": "3.11"}, clock=100.0, rate=1e8),
    ]
    assert texts(check_node_reports(nodes)) == [
        "problem: torch is not the same on all nodes: b 2.12, but 2.13 on 2",
        "problem: Python is not the same on all nodes: c 3.11, but 3.12 on 2",
        "problem: an all-reduce of all nodes fails on b",
        "problem: a, b: /dev/shm is full",
        "warning: the clocks of b and c are 50 s apart: logs can't be compared",
        "warning: c sends 100 MB/s to a, less than half of the others",
    ]
    assert describe_network(nodes) == {"pairs": "3", "MB/s": "100 to 1000", "all-reduce of 4 MB": "100 ms"}
