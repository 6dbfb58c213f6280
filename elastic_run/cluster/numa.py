"""Which CPUs each worker is bound to, so that it stays near its GPU.

The names and the meaning of the modes are those of torch.numa.binding: worker N belongs to GPU N, or to the Nth device
of another accelerator, as since torch 2.15. torch asks CUDA for the PCI addresses and runs workers under numactl; we
read /sys and the agent sets the affinity itself. Only devices that packages add to torch are asked of torch. Everything
below `worker_affinities` is a pure function over a file tree.
"""

from __future__ import annotations

import os
import sys
from enum import Enum

from elastic_run.cluster.devices import Device, visible_gpus, visible_xpus
from elastic_run.cluster.limits import ROOT, available_cpus, list_names, read_text
from elastic_run.cluster.torch_devices import TorchUnavailableError, addresses_by_torch
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

__all__ = ["AffinityMode", "NumaError", "NumaOptions", "worker_affinities"]


class NumaError(ValueError, RuntimeError):
    """The workers can't be bound as asked for; torch raises a ValueError or a RuntimeError."""


class AffinityMode(str, Enum):
    """The CPUs that a worker is bound to."""

    NODE = "node"
    """All CPUs of its GPU's NUMA node."""
    SOCKET = "socket"
    """All CPUs of all NUMA nodes of that node's socket."""
    EXCLUSIVE = "exclusive"
    """A share of the node's cores that no other GPU of the node gets."""
    CORE_COMPLEX = "core-complex"
    """The cores of the node that share one last-level cache; a different cache for each GPU while there are enough."""


@dataclass(frozen=True)
class NumaOptions:
    """How workers are bound."""

    affinity_mode: AffinityMode  # The CPUs that a worker is bound to
    should_fall_back_if_binding_fails: bool = False  # Whether workers run unbound then, instead of an error


def worker_affinities(
    options: NumaOptions,
    count: int,
    *,
    environ: Mapping[str, str] | None = None,
    root: str = ROOT,
    python: str = "",
) -> dict[int, frozenset[int]]:
    """Return the CPUs for each worker of this node, by local rank, or raise NumaError.

    `python` is the interpreter in which torch is asked for devices that packages add to it; "" where there is none.
    """
    try:
        gpu_nodes = find_gpu_nodes(os.environ if environ is None else environ, count, root=root, python=python)
        machine = Machine(gpu_nodes, available_cpus(), root=root)
        return {rank: machine.cpus_near(rank, options.affinity_mode) for rank in range(count)}
    except NumaError as error:
        if options.should_fall_back_if_binding_fails:
            return {}
        message = f"{options.affinity_mode.value!r} is impossible here: {error}"
        raise NumaError(message) from None


def find_gpu_nodes(environ: Mapping[str, str], least: int, *, root: str = ROOT, python: str = "") -> list[int]:
    """Return the NUMA node of each visible GPU; NumaError where a GPU's place is not known, or there are too few."""
    nodes = []
    gpus = visible_gpus(environ, root=root) or visible_xpus(environ, root=root)
    if not gpus:
        try:
            gpus = [Device(address) for address in addresses_by_torch(environ, python, sys.path)]
        except TorchUnavailableError as error:
            message = f"torch can't say where its devices are: {error}"
            raise NumaError(message) from None
    for index, gpu in enumerate(gpus):
        text = read_text(os.path.join(root, "sys/bus/pci/devices", gpu.pci_address, "numa_node")).strip()
        if not gpu.pci_address or not text:
            message = f"the system doesn't say on which NUMA node GPU {index} is"
            raise NumaError(message)
        nodes.append(max(int(text), 0))  # -1: there is one node only
    if len(nodes) < least:
        message = f"each worker needs a GPU: workers {least}, visible GPUs {len(nodes)}"
        raise NumaError(message)
    return nodes


class Machine:
    """The CPUs of a machine that may be used, and the GPUs near them, by their NUMA nodes."""

    def __init__(self, gpu_nodes: Sequence[int], allowed: AbstractSet[int], *, root: str = ROOT) -> None:
        self._gpu_nodes = gpu_nodes
        self._allowed = allowed
        self._system = os.path.join(root, "sys/devices/system")

    def cpus_near(self, gpu: int, mode: AffinityMode) -> frozenset[int]:
        """Choose the CPUs for the worker of a GPU; NumaError if there is none, or too few for all GPUs."""
        choose = {
            AffinityMode.NODE: lambda gpu: self._cpus_of_node(self._gpu_nodes[gpu]),
            AffinityMode.SOCKET: self._socket,
            AffinityMode.EXCLUSIVE: self._share,
            AffinityMode.CORE_COMPLEX: self._core_complex,
        }[mode]
        cpus = choose(gpu)
        if not cpus:
            message = f"this process may use no CPU near GPU {gpu} (NUMA node {self._gpu_nodes[gpu]})"
            raise NumaError(message)
        return cpus

    def _socket(self, gpu: int) -> frozenset[int]:
        # By all CPUs of a node, not only those allowed: with torch a node without an allowed one is an error.
        wanted = self._socket_of_node(self._gpu_nodes[gpu])
        nodes = _parse_ranges(read_text(os.path.join(self._system, "node/possible")))
        on_socket = (self._cpus_of_node(node) for node in nodes if self._socket_of_node(node) == wanted)
        return frozenset().union(*on_socket)

    def _share(self, gpu: int) -> frozenset[int]:
        """Deal the node's cores out; the first GPUs get one more where it doesn't come out even."""
        cores = self._group(self._cpus_of_node(self._gpu_nodes[gpu]), self._core_of_cpu)
        place, neighbours = self._place_on_node(gpu)
        if len(cores) < neighbours:
            message = f"{neighbours} GPUs share the {len(cores)} cores of NUMA node {self._gpu_nodes[gpu]}"
            raise NumaError(message)
        size, extra = divmod(len(cores), neighbours)
        start = place * size + min(place, extra)
        return frozenset().union(*cores[start : start + size + (place < extra)])

    def _core_complex(self, gpu: int) -> frozenset[int]:
        """The caches with most allowed CPUs come first."""
        cpus = self._cpus_of_node(self._gpu_nodes[gpu])
        groups = sorted(self._group(cpus, self._cache_of_cpu), key=lambda cpus: (-len(cpus), min(cpus)))
        place, _ = self._place_on_node(gpu)
        return groups[place % len(groups)] if groups else frozenset()

    def _place_on_node(self, gpu: int) -> tuple[int, int]:
        """Return which of its node's GPUs it is, and how many they are."""
        neighbours = [other for other, node in enumerate(self._gpu_nodes) if node == self._gpu_nodes[gpu]]
        return neighbours.index(gpu), len(neighbours)

    def _group(self, cpus: AbstractSet[int], key: Callable[[int], frozenset[int]]) -> list[frozenset[int]]:
        """Put together the CPUs that belong to one thing; the things in the order of their lowest CPU."""
        groups: dict[int, set[int]] = {}
        for cpu in sorted(cpus):
            groups.setdefault(min(key(cpu) or {cpu}), set()).add(cpu)
        return [frozenset(groups[lowest]) for lowest in sorted(groups)]

    def _all_cpus_of_node(self, node: int) -> frozenset[int]:
        return _parse_ranges(read_text(os.path.join(self._system, f"node/node{node}/cpulist")))

    def _cpus_of_node(self, node: int) -> frozenset[int]:
        return self._all_cpus_of_node(node) & self._allowed

    def _socket_of_node(self, node: int) -> str | None:
        cpus = self._all_cpus_of_node(node)
        if not cpus:  # memory without CPUs
            return None
        return read_text(os.path.join(self._system, f"cpu/cpu{min(cpus)}/topology/physical_package_id")).strip()

    def _core_of_cpu(self, cpu: int) -> frozenset[int]:
        return _parse_ranges(read_text(os.path.join(self._system, f"cpu/cpu{cpu}/topology/thread_siblings_list")))

    def _cache_of_cpu(self, cpu: int) -> frozenset[int]:
        """Return the CPUs that share the last-level cache with this one."""
        directory = os.path.join(self._system, f"cpu/cpu{cpu}/cache")
        names = (name for name in list_names(directory) if name.startswith("index") and name[5:].isdecimal())
        caches = [os.path.join(directory, name) for name in names]
        data = [cache for cache in caches if read_text(os.path.join(cache, "type")).strip() in {"Unified", "Data"}]
        last = max(data, key=lambda cache: int(read_text(os.path.join(cache, "level")) or 0), default="")
        return _parse_ranges(read_text(os.path.join(last, "shared_cpu_list"))) if last else frozenset()


def _parse_ranges(text: str) -> frozenset[int]:
    """Read the kernel's notation for sets of numbers, as in ``0-2,4``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
