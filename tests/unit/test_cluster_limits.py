"""What this process may use: CPUs, cores and memory, and CPUs near GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_run.cluster import limits, numa
from elastic_run.cluster.limits import memory_limit, read_oom_kills
from elastic_run.cluster.numa import AffinityMode, Machine, NumaError, NumaOptions
from elastic_run.core.failure.root_cause import OomKills
from elastic_run.run import config_from_args, parse_args


def write_tree(root: Path, files: dict[str, str]) -> str:
    """Write files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(root)


GROUPS = "proc/self/cgroup"
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"

LIMITS: list[tuple[str, dict[str, str], float | None]] = [
    ("no control groups", {}, None),
    ("v2 without a limit", {GROUPS: "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, None),
    ("v2 in a container", {GROUPS: "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1.5),
    ("v2 below", {GROUPS: "0::/a/b\n", f"{V2}/a/b/cpu.max": "400000 100000\n"}, 4.0),
    (
        "v2 limit of a parent is lower",
        {GROUPS: "0::/a/b\n", f"{V2}/a/cpu.max": "200000 100000\n", f"{V2}/a/b/cpu.max": "400000 100000\n"},
        2.0,
    ),
    ("v2 path outside of the container", {GROUPS: "0::/../../x\n", f"{V2}/cpu.max": "300000 100000\n"}, 3.0),
    ("v2 file is odd", {GROUPS: "0::/\n", f"{V2}/cpu.max": "what"}, None),
    (
        "v1",
        {GROUPS: "4:cpu,cpuacct:/j\n", f"{V1}/j/cpu.cfs_quota_us": "50000\n", f"{V1}/j/cpu.cfs_period_us": "100000"},
        0.5,
    ),
    (
        "v1 without a limit",
        {GROUPS: "4:cpu,cpuacct:/\n", f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000"},
        None,
    ),
    (
        "v1 in a container that shows the host's path",
        {
            GROUPS: "7:cpu,cpuacct:/docker/x\n3:memory:/m\n0::/\n",
            f"{V1}/cpu.cfs_quota_us": "200000\n",
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        2.0,
    ),
    ("v1 controller is not mounted", {GROUPS: "4:cpu,cpuacct:/j\n"}, None),
    ("v1 other controllers", {GROUPS: "4:memory:/j\nnonsense\n"}, None),
]


@pytest.mark.parametrize(("files", "limit"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
def test_the_lowest_limit_counts(files: dict[str, str], limit: float | None, tmp_path: Path) -> None:
    """The limit is the lowest of the group and all above it, in CPUs."""
    assert limits.cgroup_limit(root=write_tree(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("quota", "affinity", "expected"),
    [("50000", 8, 1), ("150000", 8, 2), ("200000", 8, 2), ("900000", 8, 8), ("max", 8, 8), ("800000", 3, 3)],
)
def test_the_count_is_the_lower_of_affinity_and_limit(
    quota: str, affinity: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a CPU counts as one, and there is always one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    root = write_tree(tmp_path, {GROUPS: "0::/\n", f"{V2}/cpu.max": f"{quota} 100000\n"})
    assert limits.cpu_count(root=root) == expected


@pytest.mark.parametrize(
    ("quota", "affinity", "expected"),
    [("150000", 8, 1), ("300000", 8, 3), ("50000", 8, 1), ("max", 8, 4), ("max", 3, 2), ("max", 1, 1)],
)
def test_two_threads_of_a_core_count_once(
    quota: str, affinity: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores count once, and only those whose time the control group grants in full."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu & ~1}-{cpu | 1}\n" for cpu in range(8)
    }
    root = write_tree(tmp_path, {GROUPS: "0::/\n", f"{V2}/cpu.max": f"{quota} 100000\n", **siblings})
    assert limits.core_count(root=root) == expected


def test_without_affinity_all_cpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system without affinity masks every CPU may be used."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert len(limits.available_cpus()) == os.cpu_count()


_V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job/step", {"sys/fs/cgroup/job/memory.max": "7000", "sys/fs/cgroup/job/step/memory.max": "max"}, 7000),
        ("0::/job", {"sys/fs/cgroup/memory.max": "max"}, None),
        ("4:memory:/job", {f"{_V1}/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:memory:/job\n0::/", {f"{_V1}/job/memory.limit_in_bytes": "5", f"{_V1}/memory.limit_in_bytes": "9"}, 5),
        ("3:cpu:/job", {f"{_V1}/job/memory.limit_in_bytes": "5"}, None),
    ],
)
def test_the_lowest_memory_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], limit: int | None) -> None:
    """Of the group and all those above it; the largest number, and no file, are no limit."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    assert memory_limit(root=str(tmp_path)) == limit


VMSTAT = {"proc/vmstat": "nr_free_pages 1\noom_kill 7\n"}
EVENTS = "low 0\noom 3\noom_kill 2\n"
CONTROL = {"sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}


@pytest.mark.parametrize(
    ("files", "group", "machine"),
    [
        ({}, None, None),
        (VMSTAT, None, 7),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": EVENTS}, 2, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": EVENTS, **VMSTAT}, 2, 7),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/memory.events": EVENTS}, 2, None),
        ({"proc/self/cgroup": "0::/\n"}, None, None),
        ({"proc/self/cgroup": "4:memory:/job\n"}, None, None),
        ({"proc/self/cgroup": "3:cpu:/\n4:memory:/job\n0::/\n", **CONTROL}, 2, None),
        ({"proc/self/cgroup": "garbage\n"}, None, None),
        ({"proc/vmstat": "nr_free_pages 1\n"}, None, None),
    ],
)
def test_counters_are_read_where_the_kernel_has_them(
    tmp_path: Path, files: dict[str, str], group: int | None, machine: int | None
) -> None:
    """Control groups of both versions, in a container or not, and the machine's counter."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    kills = read_oom_kills(root=str(tmp_path))
    assert (kills.group, kills.machine) == (group, machine)


def test_the_difference_of_two_readings_counts() -> None:
    """Kills before the job are not the job's."""
    difference = OomKills(5, 9).since(OomKills(3, None))
    assert (difference.group, difference.machine) == (2, None)
    assert OomKills(1, 1).since(OomKills(2, 1)).group == 0


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"proc/meminfo": "MemFree: 1 kB\nMemAvailable:    4000 kB\n"}, 4000 * 1024),
        ({"proc/meminfo": "MemAvailable: 4000 kB\n", GROUPS: "0::/\n", f"{V2}/memory.max": "max\n"}, 4000 * 1024),
        (
            {
                "proc/meminfo": "MemAvailable: 4000 kB\n",
                GROUPS: "0::/a\n",
                f"{V2}/a/memory.max": "1000000\n",
                f"{V2}/a/memory.current": "400000\n",
            },
            600000,
        ),
    ],
)
def test_the_memory_that_is_left(files: dict[str, str], left: int, tmp_path: Path) -> None:
    """The machine and each control group leave some memory; the least counts."""
    assert limits.available_memory(root=write_tree(tmp_path, files)) == left


# --- CPUs near GPUs, on machines drawn as file trees ------------------------------------------------------------------
NODE, SOCKET, EXCLUSIVE, CORE_COMPLEX = AffinityMode
ALL = frozenset(range(32))


def write(path: Path, text: str) -> None:
    """Write a file and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Draw two sockets of two nodes each; a node has four cores of two threads, a cache for each two cores.

    Node N has the cores' first threads 4N..4N+3 and the second ones 16+4N..16+4N+3.
    """
    top = tmp_path_factory.mktemp("machine")
    system = top / "sys/devices/system"
    write(system / "node/possible", "0-4")
    for node in range(4):
        write(system / f"node/node{node}/cpulist", f"{4 * node}-{4 * node + 3},{16 + 4 * node}-{16 + 4 * node + 3}")
    write(system / "node/node4/cpulist", "")  # memory only
    for cpu in range(32):
        core = cpu % 16
        pair = core // 2 * 2
        write(system / f"cpu/cpu{cpu}/topology/physical_package_id", str(core // 8))
        write(system / f"cpu/cpu{cpu}/topology/thread_siblings_list", f"{core},{core + 16}")
        caches = ((1, "Data", f"{core},{core + 16}"), (1, "Instruction", "0-31"))
        last = (3, "Unified", f"{pair}-{pair + 1},{pair + 16}-{pair + 17}")
        for index, (level, kind, shared) in enumerate((*caches, last)):
            cache = system / f"cpu/cpu{cpu}/cache/index{index}"
            write(cache / "level", str(level))
            write(cache / "type", kind)
            write(cache / "shared_cpu_list", shared)
        write(system / f"cpu/cpu{cpu}/cache/uevent", "")
    return str(top)


#: Mode, NUMA node of each GPU, allowed CPUs, GPU -> its CPUs.
TABLE: list[tuple[AffinityMode, list[int], frozenset[int], dict[int, set[int]]]] = [
    (NODE, [0, 1], ALL, {0: {0, 1, 2, 3, 16, 17, 18, 19}, 1: {4, 5, 6, 7, 20, 21, 22, 23}}),
    (NODE, [0], frozenset({2, 3, 4}), {0: {2, 3}}),
    (SOCKET, [0, 3], ALL, {0: {*range(8), *range(16, 24)}, 1: {*range(8, 16), *range(24, 32)}}),
    (SOCKET, [0], frozenset({1, 9}), {0: {1}}),
    (SOCKET, [0], frozenset({5}), {0: {5}}),
    (EXCLUSIVE, [0], ALL, {0: {0, 1, 2, 3, 16, 17, 18, 19}}),
    (EXCLUSIVE, [0, 0], ALL, {0: {0, 1, 16, 17}, 1: {2, 3, 18, 19}}),
    (EXCLUSIVE, [0, 1, 0, 0], ALL, {0: {0, 1, 16, 17}, 1: {4, 5, 6, 7, 20, 21, 22, 23}, 2: {2, 18}, 3: {3, 19}}),
    (EXCLUSIVE, [0, 0], frozenset({1, 18, 3}), {0: {1, 18}, 1: {3}}),
    (EXCLUSIVE, [0, 0], frozenset({1, 3}), {0: {1}, 1: {3}}),
    (CORE_COMPLEX, [0, 0], ALL, {0: {0, 1, 16, 17}, 1: {2, 3, 18, 19}}),
    (CORE_COMPLEX, [0, 0, 0], ALL, {2: {0, 1, 16, 17}}),
    (CORE_COMPLEX, [1, 0], ALL, {0: {4, 5, 20, 21}, 1: {0, 1, 16, 17}}),
    (CORE_COMPLEX, [0, 0], frozenset({0, 2, 3, 18}), {0: {2, 3, 18}, 1: {0}}),
]


@pytest.mark.parametrize(("mode", "gpu_nodes", "allowed", "expected"), TABLE)
def test_each_worker_gets_the_cpus_of_its_mode(
    mode: AffinityMode, gpu_nodes: list[int], allowed: frozenset[int], expected: dict[int, set[int]], root: str
) -> None:
    """The CPUs of node, socket, share and core complex, of those that may be used at all."""
    machine = Machine(gpu_nodes, allowed, root=root)
    assert {gpu: set(machine.cpus_near(gpu, mode)) for gpu in expected} == expected


@pytest.mark.parametrize(
    ("mode", "gpu_nodes", "allowed", "why"),
    [
        (NODE, [1], frozenset({0}), "may use no CPU near GPU 0 (NUMA node 1)"),
        (CORE_COMPLEX, [1], frozenset({0}), "may use no CPU near GPU 0 (NUMA node 1)"),
        (EXCLUSIVE, [0] * 5, ALL, "5 GPUs share the 4 cores of NUMA node 0"),
        (SOCKET, [2], frozenset({0}), "may use no CPU near GPU 0 (NUMA node 2)"),
        (NODE, [9], ALL, "may use no CPU near GPU 0 (NUMA node 9)"),
    ],
)
def test_what_cannot_be_is_refused(
    mode: AffinityMode, gpu_nodes: list[int], allowed: frozenset[int], why: str, root: str
) -> None:
    """A worker without a CPU near its GPU is an error that says so."""
    machine = Machine(gpu_nodes, allowed, root=root)
    with pytest.raises(NumaError) as raised:
        machine.cpus_near(0, mode)
    assert why in str(raised.value)


def add_gpus(top: Path, nodes: list[str], machine: str) -> str:
    """Draw NVIDIA GPUs at PCI addresses with NUMA nodes, in the machine's other half."""
    for index, node in enumerate(nodes):
        address = f"0000:{index + 1:02x}:00.0"
        write(top / f"proc/driver/nvidia/gpus/{address.upper()}/information", f"Device Minor: {index}")
        if node:
            write(top / f"sys/bus/pci/devices/{address}/numa_node", node)
    (top / "sys").mkdir(exist_ok=True)
    (top / "sys/devices").symlink_to(Path(machine) / "sys/devices")
    return str(top)


def test_workers_are_bound_near_the_gpus_that_they_see(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker N belongs to the Nth visible GPU, found by its PCI address; node -1 means the only one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    top = add_gpus(tmp_path, ["3", "-1", "1"], root)
    options = NumaOptions(NODE)
    bound = numa.worker_affinities(options, 2, environ={"CUDA_VISIBLE_DEVICES": "2,1"}, root=top)
    assert {rank: min(cpus) for rank, cpus in bound.items()} == {0: 4, 1: 0}


@pytest.mark.parametrize("kind", ["intel", "package"])
def test_workers_are_bound_near_other_accelerators(
    kind: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of Intel's is found in /sys, and torch knows the places of devices that a package adds to it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    add_gpus(tmp_path, [], root)
    for index, node in enumerate("31"):
        place = tmp_path / f"sys/bus/pci/devices/0000:0{index}:10.0"
        write(place / "numa_node", node)
        if kind == "intel":
            write(place / "vendor", "0x8086")
            (tmp_path / f"sys/class/drm/renderD12{index}").mkdir(parents=True)
            (tmp_path / f"sys/class/drm/renderD12{index}/device").symlink_to(place)
    known = ["0000:00:10.0", "0000:01:10.0"] if kind == "package" else []
    monkeypatch.setattr(numa, "addresses_by_torch", lambda *_: known)
    bound = numa.worker_affinities(NumaOptions(NODE), 2, environ={}, root=str(tmp_path))
    assert {rank: min(cpus) for rank, cpus in bound.items()} == {0: 12, 1: 4}


@pytest.mark.parametrize(
    ("nodes", "count", "why"),
    [
        (["0"], 2, "each worker needs a GPU: workers 2, visible GPUs 1"),
        ([], 1, "each worker needs a GPU: workers 1, visible GPUs 0"),
        (["0", ""], 2, "the system doesn't say on which NUMA node GPU 1 is"),
    ],
)
def test_impossible_binding_names_the_flag_or_falls_back(
    nodes: list[str], count: int, why: str, root: str, tmp_path: Path
) -> None:
    """Impossible binding is one line; with the option to fall back nobody is bound."""
    top = add_gpus(tmp_path, nodes, root)
    with pytest.raises(NumaError) as raised:
        numa.worker_affinities(NumaOptions(EXCLUSIVE), count, environ={}, root=top)
    assert str(raised.value) == f"'exclusive' is impossible here: {why}"
    fallback = NumaOptions(EXCLUSIVE, should_fall_back_if_binding_fails=True)
    assert numa.worker_affinities(fallback, count, environ={}, root=top) == {}


@pytest.mark.parametrize("mode", AffinityMode)
def test_the_flag_reaches_the_job(mode: AffinityMode) -> None:
    """`--numa-binding` is the job's binding, and without it there is none."""
    args = parse_args(["--numa-binding", mode.value, "train.py"])
    assert config_from_args(args)[0].numa_options == NumaOptions(mode)
    assert config_from_args(parse_args(["train.py"]))[0].numa_options is None
