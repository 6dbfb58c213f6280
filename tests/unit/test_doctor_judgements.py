"""The doctor's judgements: pure functions from what was read to findings."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from elastic_run.diagnosis.doctor import (
    control_groups,
    directories,
    gpus,
    interfaces,
    names,
    ports,
    python,
    resource_limits,
    scheduler,
    shared_memory,
    variables,
)
from elastic_run.diagnosis.doctor.checks import FAMILIES, run_checks
from elastic_run.diagnosis.doctor.control_groups import GroupLimits
from elastic_run.diagnosis.doctor.finding import Finding, Subject, problem
from elastic_run.diagnosis.doctor.interfaces import Interface
from elastic_run.diagnosis.doctor.names import Lookup
from elastic_run.diagnosis.doctor.node_reports import NodeReport, describe_network, judge_node_reports
from elastic_run.diagnosis.doctor.ports import PortState
from elastic_run.diagnosis.doctor.report import render_report
from elastic_run.diagnosis.doctor.resource_limits import Limits
from elastic_run.records import replace

if TYPE_CHECKING:
    from pathlib import Path

_UP, _DOWN = Interface("eth0", is_up=True), Interface("ib0", is_up=False)
_LO = Interface("lo", is_up=True)
_NO_PID = 2**22 + 1


def texts(findings: list[Finding]) -> list[str]:
    """Return each finding as its severity and sentence."""
    return [f"{finding.severity}: {finding.what}" for finding in findings]


def test_a_slow_look_up_is_told_with_its_seconds() -> None:
    """A name that a second name server knows after the first one was silent stalls each start."""
    (found,) = names.judge_endpoint(Lookup("node1", ("10.0.0.1",), 5.02))
    assert (found.what, "/etc/resolv.conf" in found.remedy) == ("the look-up of node1 takes 5.0 s", True)


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
    found = names.judge_own_name(Lookup("node0", ("127.0.1.1",), 0.0), is_alone=is_alone, interface=interface)
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
    (found,) = names.judge_own_name(lookup, is_alone=is_alone, interface=interface)
    assert (found.severity, found.evidence) == (severity, "no name server answers")


def test_a_port_that_nobody_serves_yet_is_in_order_where_nodes_meet() -> None:
    """The nodes are started one after another, and one of them will serve the port."""
    refused = PortState("node0", 29400, is_own=False, failure="nobody listens")
    assert ports.judge(refused, 3.0, meets=True) == []
    assert len(ports.judge(refused, 3.0, meets=False)) == 1


def test_a_privileged_port_names_the_allowed_ones() -> None:
    """A user can't open port 80."""
    (found,) = ports.judge(PortState("node0", 80, is_own=True, failure=errno.EACCES), 3.0, meets=False)
    assert "Permission denied" in found.what
    assert "from 1024 to 32767" in found.remedy


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), []),
        (
            Limits(files=64, most_files=4096),
            ["problem: only 64 open files are allowed: jobs die of 'Too many open files'"],
        ),
        (Limits(processes=1000, running=900), ["problem: only 100 more processes or threads are allowed"]),
        (Limits(files=1024, most_files=1024, processes=1512, running=1000), []),
        (Limits(locked=65536), []),
        (Limits(locked=64 << 20, has_infiniband=True), []),
        (
            Limits(locked=65536, has_infiniband=True),
            ["problem: only 64 KiB of memory may be locked: NCCL can't use InfiniBand"],
        ),
        (
            Limits(core=resource.RLIM_INFINITY),
            ["warning: core files have no limit: each crashed worker writes its whole memory to a disk"],
        ),
        (Limits(core=resource.RLIM_INFINITY, core_pattern="|/usr/lib/systemd/systemd-coredump"), []),
    ],
)
def test_limits(limits: Limits, expected: list[str]) -> None:
    """Each limit that is too low is a problem, if something needs it."""
    assert texts(resource_limits.judge(limits)) == expected


def test_how_much_shared_memory_is_little() -> None:
    """Less than 128 MiB in all, such as docker's default, or less than 64 MiB of it free."""
    sizes = [(128 << 20, 64 << 20), (127 << 20, 127 << 20), (1 << 30, 63 << 20)]
    found = [texts(shared_memory.judge("/dev/shm", size, free)) for size, free in sizes]
    assert [[text.partition(": DataLoader")[0] for text in each] for each in found] == [
        [],
        ["problem: /dev/shm is small"],
        ["problem: /dev/shm is full"],
    ]


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        (GroupLimits(cpus=0.5, available=8), 1),
        (GroupLimits(cpus=1.5, available=8), 0),
        (GroupLimits(memory=1 << 30, memory_left=1 << 20), 1),
        (GroupLimits(processes_left=10), 1),
        (GroupLimits(kills=3), 1),
    ],
)
def test_control_groups(limits: GroupLimits, count: int) -> None:
    """A limit that leaves too little is a finding."""
    assert len(control_groups.judge(limits)) == count


@pytest.mark.parametrize(
    ("line", "group", "files"),
    [
        ("4:memory:/a/b\n8:pids:/\n", "memory/a", ("limit_in_bytes", "usage_in_bytes", "oom_control")),
        ("0::/a/b\n", "a", ("max", "current", "events")),
    ],
    ids=["version-1", "version-2"],
)
def test_control_groups_of_both_versions_are_read(
    tmp_path: Path, line: str, group: str, files: tuple[str, str, str]
) -> None:
    """The lowest limit of the group and those above it counts, in version 1 and 2."""
    directory = tmp_path / "sys/fs/cgroup" / group
    directory.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line, encoding="ascii")
    for name, text in zip(files, ("1073741824\n", "1063256064\n", "low 0\noom_kill 2\n"), strict=True):
        (directory / f"memory.{name}").write_text(text, encoding="ascii")
    assert texts(control_groups.check(Subject({}, "h", root=str(tmp_path)))) == [
        "problem: only 10 MiB of memory are left: the kernel kills workers without a message",
        "warning: the kernel has killed 2 processes of this container because its memory was full",
    ]


def test_the_group_of_another_controller_does_not_count(tmp_path: Path) -> None:
    """Version 1 has a tree for each controller: a limit of memory lies at the path of that controller's line only."""
    directory = tmp_path / "sys/fs/cgroup/memory/other"
    directory.mkdir(parents=True)
    for name in ("limit_in_bytes", "usage_in_bytes"):
        (directory / f"memory.{name}").write_text("1073741824\n", encoding="ascii")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("8:cpuset:/other\n4:memory:/a\n", encoding="ascii")
    assert control_groups.check(Subject({}, "h", root=str(tmp_path))) == []


@pytest.mark.parametrize(
    ("value", "count"),
    [("eth", 0), ("=eth", 1), ("=eth0", 0), ("ib,eth", 0), ("ib", 1), ("^lo,docker", 0), ("", 0), ("en", 1)],
)
def test_nccl_takes_prefixes_and_whole_names(value: str, count: int) -> None:
    """NCCL_SOCKET_IFNAME has a grammar of its own."""
    assert len(interfaces.judge_nccl(value, [_LO, _UP, _DOWN])) == count


def test_a_host_without_network_can_be_the_only_one() -> None:
    """With other nodes it is a problem, and the mend names the interface that is down."""
    assert interfaces.judge_network([_LO, _DOWN], is_alone=True) == []
    (found,) = interfaces.judge_network([_LO, _DOWN], is_alone=False)
    assert "ip link set ib0 up" in found.remedy


def test_a_hanging_driver_is_found_in_the_failure_of_nvidia_smi() -> None:
    """The remedy is not the same for a hang, a mismatch and another failure."""
    failures = ("no answer in 15 s", "Failed to initialize NVML: Driver/library version mismatch", "No devices")
    assert len({gpus.judge_failure(failure).remedy for failure in failures}) == 3


@pytest.mark.parametrize(
    ("mask", "count"), [(None, 0), ("0,1", 0), ("", 1), ("1,2", 1), ("GPU-b", 0), ("GPU-x", 1), ("MIG-GPU-a/1/0", 0)]
)
def test_masks_of_gpus(mask: str | None, count: int) -> None:
    """CUDA_VISIBLE_DEVICES has numbers, names that begin as GPUs', and parts of GPUs."""
    found = gpus.parse_gpus("0, GPU-aa, 0, 81559\n1, GPU-bb, [N/A], 81559\n")
    assert len(gpus.judge_mask({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}, found)) == count


def test_an_active_environment_that_workers_would_not_use_is_told() -> None:
    """Unless PYTHON_EXEC says which Python the workers run: then neither the environment nor its torch matters."""
    other = python.Interpreter("/usr/bin/python3", "/usr", "VIRTUAL_ENV", "/venv")
    assert texts(python.judge(other)) == [
        "problem: VIRTUAL_ENV is /venv, but workers would run /usr/bin/python3",
        "warning: torch is not installed for /usr/bin/python3",
    ]
    assert python.judge(replace(other, worker_python=sys.executable)) == []
    (found,) = python.judge(replace(other, worker_python="/gone/python"))
    assert found.what == "PYTHON_EXEC is /gone/python, which can't be executed"


def test_processes_on_a_gpu_are_named() -> None:
    """With their users, where they can be seen; nvidia-smi's name may have commas; other lines are passed over."""
    text = f"GPU-a, {_NO_PID}, 300, python train.py, fast\nGPU-a, [N/A], 300, x\nno running processes found\n"
    found = gpus.parse_processes(f"{text}GPU-b, {os.getpid()}, 7, [Not Found]\n")
    me = psutil.Process()
    assert found == {
        "GPU-a": [f"process {_NO_PID} (python train.py, fast, 300 MiB)"],
        "GPU-b": [f"process {os.getpid()} ({me.name()} of {me.username()}, 7 MiB)"],
    }


def test_what_a_failed_write_means() -> None:
    """Read-only, full, over quota and denied each have their sentence."""
    numbers = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES)
    found = [directories.judge_failure("/logs", OSError(number, "reason")).what for number in numbers]
    assert found == [
        f"the directory /logs {text}" for text in ("is read-only", "is full", "is over your quota", "cannot be written")
    ]


def test_how_much_room_is_little() -> None:
    """Below 1 GiB is a warning; below 64 MiB, or with few files to be had, a problem."""
    room = [(1024 << 20, 100), (1023 << 20, 100), (64 << 20, 100), (63 << 20, 100), (1024 << 20, 99)]
    found = [texts(directories.judge_room("/logs", free, files)) for free, files in room]
    warns = ["warning: the file system of /logs is almost full"]
    fails = [
        "problem: the file system of /logs is full",
        "problem: the file system of /logs is full: it has room for 99 more files",
    ]
    assert found == [[], warns, warns, fails[:1], fails[1:]]


def test_many_launchers_of_a_step_and_idle_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of Slurm that agree may still describe another job than is meant, or be left over from an ended one."""
    monkeypatch.setattr("elastic_run.cluster.slurm.read_running_step", lambda: None)
    step = {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a[1-2]"}
    (found,) = scheduler.judge_slurm({**step, "SLURM_STEP_NUM_TASKS": "8"}, "a1")
    assert "srun --ntasks=2 --ntasks-per-node=1" in found.remedy
    batch = {"SLURM_JOB_ID": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a[1-2]"}
    assert texts(scheduler.judge_slurm(batch, "a1")) == [
        "warning: the Slurm job has 1 more nodes, which a launcher without srun does not use"
    ]
    assert scheduler.judge_slurm({**step, "SLURM_STEP_NUM_TASKS": "2"}, "a1") == []
    monkeypatch.setattr("elastic_run.cluster.slurm.read_running_step", lambda: "")
    assert texts(scheduler.judge_slurm({**step, "SLURM_STEP_NUM_TASKS": "2"}, "a1")) == [
        "warning: the variables of a Slurm step are left over: this process does not run in it, and they are not used"
    ]


@pytest.mark.parametrize(
    ("index", "nodes", "host", "count"),
    [
        ("1", "2", "job-1", 0),
        ("1", "", "job-1", 1),
        ("2", "1:2", "job-2", 1),
        ("x", "2", "job-1", 1),
        ("1" * 6000, "2", "job-1", 1),
        ("1", "1" * 6000, "job-1", 0),
        ("1", "2", "my", 1),
    ],
)
def test_pods(index: str, nodes: str, host: str, count: int) -> None:
    """A pod needs its index, its name and the number of pods."""
    environ = {"JOB_COMPLETION_INDEX": index, **({"PET_NNODES": nodes} if nodes else {})}
    assert len(scheduler.judge_kubernetes(environ, host)) == count


def test_variables_of_debugging_and_proxies_are_warnings() -> None:
    """They may be meant so."""
    found = variables.judge_settings({"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "0", "OMP_NUM_THREADS": "4,2"})
    assert variables.judge_settings({"OMP_NUM_THREADS": "4"}) == []
    assert texts(variables.judge_settings({"OMP_NUM_THREADS": "all"})) == [
        "problem: OMP_NUM_THREADS='all' is not a number: each worker starts a thread per CPU"
    ]
    found += variables.judge_proxy({"https_proxy": "http://p:3128", "no_proxy": ".local"}, ["n0", "n1.local"])
    assert [finding.severity for finding in found] == ["warning", "warning"]
    assert found[1].remedy == "export no_proxy=.local,n0"


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


def test_the_report_is_for_one_screen() -> None:
    """However much is wrong, the report has at most 40 lines, and says how much there is more."""
    text = render_report(["h0"], [problem("what", "evidence", "remedy")] * 30, {"torch": "2.13"})
    assert len(text.splitlines()) < 40
    assert text.splitlines()[-2:] == ["and 21 more (--json has all)", "30 problems, no warnings"]
    assert len(FAMILIES) == 12


def report(host: str, *, failures: dict[int, str] | None = None, heard: str = "", **more: Any) -> NodeReport:
    """Return the report of a healthy node, but for what is given."""
    ranks = frozenset(map(int, heard))
    return NodeReport(host, failures=failures or {}, heard=ranks, **{"rate": 1e9, "reduction": 0.1, **more})


def test_a_pair_is_named_with_what_is_known_of_its_directions() -> None:
    """Datagrams tell the direction; without them the connections do, if one of the two fails."""
    silent = "no answer"
    lost = [report("a", failures={1: silent}, heard="1"), report("b", failures={0: silent}, heard="")]
    assert texts(judge_node_reports(lost)) == ["problem: packets from a to b get lost"]
    refused = [report("a", failures={1: "nobody listens"}, heard="1"), report("b", heard="0")]
    assert texts(judge_node_reports(refused)) == ["problem: a can't connect to b"]
    apart = [report("a", failures={1: silent}), report("b", failures={0: silent})]
    assert texts(judge_node_reports(apart)) == ["problem: a and b can't reach each other"]


def test_a_node_that_reaches_no_other_is_named_once() -> None:
    """Not each of its pairs; and of many pairs the first ones are named."""
    lonely = [report("a", failures={2: "no answer"}), report("b", failures={2: "no answer"}), report("c")]
    (found,) = judge_node_reports(lonely)
    assert found.what == "c and the other nodes can't reach each other, though all of them have met"
    many = [report(str(rank), failures={rank + 1 - 2 * (rank % 2): "no answer"}) for rank in range(12)]
    assert texts(judge_node_reports(many))[-1] == "problem: 2 more pairs can't reach each other"


def test_nodes_that_differ_are_named() -> None:
    """Versions, clocks, rates and a failed all-reduce; what several have found on themselves stands once."""
    own = (problem("/dev/shm is full", "e", "r"),)
    nodes = [
        report("a", facts={"torch": "2.13", "Python": "3.12"}, findings=own, clock=100.0),
        report("b", facts={"torch": "2.12", "Python": "3.12"}, findings=own, clock=50.0, reduction="timeout"),
        report("c", facts={"torch": "2.13", "Python": "3.11"}, clock=100.0, rate=1e8),
    ]
    assert texts(judge_node_reports(nodes)) == [
        "problem: torch is not the same on all nodes: b 2.12, but 2.13 on 2",
        "problem: Python is not the same on all nodes: c 3.11, but 3.12 on 2",
        "problem: an all-reduce of all nodes fails on b",
        "problem: a, b: /dev/shm is full",
        "warning: the clocks of b and c are 50 s apart: logs can't be compared",
        "warning: c sends 100 MB/s to a, less than half of the others",
    ]
    assert describe_network(nodes) == {"pairs": "3", "MB/s": "100 to 1000", "all-reduce of 4 MB": "100 ms"}


def test_half_the_rate_of_the_others_is_not_less_than_half() -> None:
    """The doctor warns only of a rate below half of the others' rate."""
    rates = [report("a"), report("b"), report("c", rate=5e8)]
    assert judge_node_reports(rates) == []
    (found,) = judge_node_reports([*rates[:2], report("c", rate=4.9e8)])
    assert found.what.startswith("c sends 490 MB/s to a")


def test_a_host_that_starts_no_thread_gets_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes that is reached is one finding, with its remedy, and no traceback."""

    def refuse(_: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    (found,) = run_checks(Subject({}, "h"), families={"names": lambda _: [], "ports": lambda _: []})
    assert (found.evidence, "ulimit -u" in found.remedy) == ("can't start new thread", True)


@pytest.mark.parametrize(
    ("silent", "severities"),
    [([], []), (["10.0.0.1"], ["warning"]), (["10.0.0.1", "10.0.0.2"], ["problem"])],
)
def test_name_servers_that_are_silent(silent: list[str], severities: list[str]) -> None:
    """A silent one stalls look-ups; a host whose name servers are all silent knows no names."""
    found = names.judge_servers(["10.0.0.1", "10.0.0.2"], silent, 2.0)
    assert [finding.severity for finding in found] == severities


def test_a_line_of_resolv_conf_without_an_address_is_passed_over() -> None:
    """Only whole lines name servers, whatever else stands in the file."""
    assert list(names._list_servers("nameserver\nsearch x\n\nnameserver 10.0.0.2\n#nameserver 1\n")) == ["10.0.0.2"]


def test_a_proxy_matters_only_for_hosts_that_are_not_exempt() -> None:
    """Nothing is found without a proxy, without an endpoint, or if each endpoint is exempt."""
    proxy = {"http_proxy": "http://p:3128"}
    assert variables.judge_proxy({}, ["etcd.example.org"]) == []
    assert variables.judge_proxy(proxy, []) == []
    assert variables.judge_proxy({**proxy, "no_proxy": "x, .example.org"}, ["etcd.example.org"]) == []
    assert len(variables.judge_proxy(proxy, ["etcd.example.org"])) == 1
