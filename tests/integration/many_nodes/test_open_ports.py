"""The table of open ports in docs/security.md: every mode is started, and what listens is compared with it."""

from __future__ import annotations

import contextlib
import ipaddress
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import virtual_hosts
from tests.support.local_rendezvous import COPIED, copied
from tests.support.wait import DeadlinePassedError, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from tests.support.hosts import HostProcess, VirtualHost, VirtualHosts

    Names: TypeAlias = Mapping[int, tuple[str, str]]
    Rows: TypeAlias = "Mapping[str, Counter[Row]]"

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
PORT = 29411
#: State of a listening socket in /proc/net/tcp.
LISTEN = "0A"
WAITING = "print('here I am', flush=True)\nimport signal\nsignal.pause()\n"
#: Workers that serve their store by themselves: the one of rank 0 has to open it.
SERVING = (
    """
import os
from torch.distributed import TCPStore
if os.environ["RANK"] == "0":
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 1, is_master=True)
"""
    + WAITING
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table, or what was seen: which process listens, where."""

    process: str
    address: str
    port: str


def read_table() -> dict[str, dict[str, Counter[Row]]]:
    """Return the rows by mode and node."""
    lines = PAGE.read_text(encoding="utf-8").partition("## Open ports")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    table: dict[str, dict[str, Counter[Row]]] = {}
    mode = ""
    for first, node, process, address, port, _ in cells[2:]:
        mode = first or mode
        rows = table.setdefault(mode, {}).setdefault(node, Counter())
        if address != "none":
            rows[Row(process, address, port)] += 1
    return table


TABLE = read_table()


# --- what listens on a host ------------------------------------------------------------------------------------------
def find_listening(host: VirtualHost) -> list[tuple[int, str, int]]:
    """Return process, address and port of each TCP socket that listens on a host; process 0 if it has just ended."""
    holders, found = find_holders(), []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{host.first_pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN:
                address, _, port = words[1].partition(":")
                found.append((holders.get(f"socket:[{words[9]}]", 0), read_address(address), int(port, 16)))
    return found


def find_holders() -> dict[str, int]:
    """Return a process for each open file of this machine, without those that are closed meanwhile."""
    holders = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    holders[str(entry.readlink())] = int(process.name)
    return holders


def read_address(text: str) -> str:
    """Return an address of /proc/net/tcp, which has words of the machine's byte order, as users write it."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


#: By the number of a fixed port: the table's words for the address that it is open at, and for the port.
ENDPOINT = {PORT: ("endpoint", "endpoint's")}
DEFAULT = {29400: ("this node", "29400")}
MASTER = {PORT: ("`--master-addr`", "`--master-port`")}


def describe(host: VirtualHost, agent: HostProcess, names: Names) -> Counter[Row]:
    """Return what listens on a host, in the words of the table."""
    rows: Counter[Row] = Counter()
    listening = find_listening(host)
    for pid, address, port in listening:
        if address == "::1" and port not in names and (pid, "127.0.0.1", port) in listening:
            continue  # the page says below the table when this address is open as well
        address_name, port_name = names.get(port, ("this node", "any"))
        words = {host.address: address_name, "0.0.0.0": "all", "::": "all"}  # noqa: S104 - compared
        rows[Row(name_process(pid, agent), words.get(address, address), port_name)] += 1
    return rows


def name_process(pid: int, agent: HostProcess) -> str:
    """Return the table's word for a process."""
    if pid == agent.pid:
        return "launcher"
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    if command.startswith(b"etcd\0"):
        return "etcd"
    return "worker" if b"worker.py" in command else "launcher's child"


# --- the modes -------------------------------------------------------------------------------------------------------
class Bed:
    """Two hosts, and the agents that were started there.

    Args:
        hosts: The hosts.
        directory: For workers' programs.
    """

    def __init__(self, hosts: VirtualHosts, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self.agents: dict[int, HostProcess] = {}

    def start(self, index: int, *flags: str, worker: str = WAITING) -> HostProcess:
        """Start an agent on a host, with one worker."""
        path = self.directory / "worker.py"
        path.write_text(worker, encoding="utf-8")
        return self.execute(index, [sys.executable, "-m", "elastic_run", *flags, str(path)])

    def execute(self, index: int, command: list[str]) -> HostProcess:
        """Start a command on a host."""
        environment = {**COPIED, "OMP_NUM_THREADS": "1"}
        self.agents[index] = self.hosts[index].start(command, env=environment)
        return self.agents[index]

    def start_all(self, *flags: str) -> None:
        """Start the same command on both hosts, the first one first."""
        for index in range(len(self.hosts)):
            self.start(index, *flags)

    def check(self, rows: Mapping[str, Counter[Row]], nodes: Sequence[str], names: Names) -> None:
        """Compare what listens on each host, once its workers run, with the rows of the table for that node."""
        for index, node in enumerate(nodes):
            agent, host = self.agents[index], self.hosts[index]
            agent.wait_line("^here I am$")
            # A store of the round before may close, and a child may come up, a moment later.
            with contextlib.suppress(DeadlinePassedError):
                wait_until(lambda: describe(host, agent, names) == rows[node], deadline=5.0)  # noqa: B023 - in the loop
            assert describe(host, agent, names) == rows[node], node
        assert set(rows) == set(nodes)


def meet(endpoint: str, *conf: str, nodes: str = "2") -> tuple[str, ...]:
    """Return the flags of a c10d job whose nodes meet at an endpoint."""
    settings = ",".join(("last_call_timeout=0", *conf))
    return (
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=j",
        f"--rdzv-conf={settings}",
        f"--nnodes={nodes}",
    )


# ruff: noqa: D103 - the mode is what MODES says


def start_one(bed: Bed, rows: Rows) -> None:
    bed.start(0, "--standalone")
    bed.check(rows, ["it"], {})


def start_one_with_rank0(bed: Bed, rows: Rows) -> None:
    bed.start(0, "--worker-store=rank0", worker=SERVING)
    bed.check(rows, ["it"], {})


def start_one_with_health_port(bed: Bed, rows: Rows) -> None:
    bed.start(0, f"--health-port={PORT}")
    bed.check(rows, ["it"], {PORT: ("all", "`--health-port`")})


def start_one_with_metrics_port(bed: Bed, rows: Rows) -> None:
    bed.start(0, f"--metrics-port={PORT}")
    bed.check(rows, ["it"], {PORT: ("all", "`--metrics-port`")})


def start_without_endpoint(bed: Bed, rows: Rows) -> None:
    first = bed.start(0, "--nnodes=2")
    bed.execute(1, copied(first))
    bed.check(rows, ["first", "others"], DEFAULT)


def start_c10d(bed: Bed, rows: Rows) -> None:
    bed.start_all(*meet(f"{bed.hosts[0].address}:{PORT}"))
    bed.check(rows, ["the endpoint's", "others"], ENDPOINT)


def start_c10d_with_rank0(bed: Bed, rows: Rows) -> None:
    place = (*meet(f"{bed.hosts[0].address}:{PORT}"), "--worker-store=rank0")
    for rank in range(2):
        bed.start(rank, *place, f"--node-rank={rank}", worker=SERVING)
    bed.check(rows, ["the endpoint's, with rank 0", "others"], ENDPOINT)


def start_at_localhost(bed: Bed, rows: Rows) -> None:
    bed.start(0, *meet(f"localhost:{PORT}", nodes="1:2"))
    bed.check(rows, ["it"], ENDPOINT)


def start_at_no_interface(bed: Bed, rows: Rows) -> None:
    bed.start(0, *meet(f"203.0.113.7:{PORT}", "is_host=true", nodes="1:2"))
    bed.check(rows, ["with `is_host=true`"], ENDPOINT)


def start_at_several(bed: Bed, rows: Rows) -> None:
    bed.start_all(*meet(",".join(f"{host.address}:{PORT}" for host in bed.hosts)))
    bed.check(rows, ["each of an endpoint"] * 2, ENDPOINT)


def start_with_file(bed: Bed, rows: Rows) -> None:
    bed.start_all(*meet(str(bed.directory / "store"), "store_type=file"))
    bed.check(rows, ["each", "each"], {})


def start_static(bed: Bed, rows: Rows) -> None:
    for rank in range(2):
        place = (f"--master-addr={bed.hosts[0].address}", f"--master-port={PORT}", f"--node-rank={rank}")
        bed.start(rank, "--nnodes=2", *place)
    bed.check(rows, ["rank 0's", "others"], MASTER)


def start_with_etcd(bed: Bed, rows: Rows) -> None:
    hub = bed.hosts.hub
    url = f"http://{hub.address}:2379"
    etcd = hub.start(
        [
            "etcd",
            f"--data-dir={bed.directory / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
        ]
    )
    place = (
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={hub.address}:2379",
        "--rdzv-id=j",
        "--rdzv-conf=last_call_timeout=0",
    )
    bed.start_all(*place, "--nnodes=2")
    bed.check(rows, ["each", "each"], {})
    assert etcd.process.poll() is None


MODES: Mapping[str, Callable[[Bed, Rows], None]] = {
    "one node, `--standalone`": start_one,
    "one node, `--worker-store=rank0`": start_one_with_rank0,
    "one node, `--health-port`": start_one_with_health_port,
    "one node, `--metrics-port`": start_one_with_metrics_port,
    "no endpoint": start_without_endpoint,
    "c10d": start_c10d,
    "c10d, endpoint `localhost`": start_at_localhost,
    "c10d, endpoint of no interface here": start_at_no_interface,
    "c10d, several endpoints": start_at_several,
    "c10d, `--worker-store=rank0`": start_c10d_with_rank0,
    "c10d, `store_type=file`": start_with_file,
    "etcd, etcd-v2, etcd-v3": start_with_etcd,
    "static": start_static,
}


@pytest.mark.parametrize("mode", TABLE)
def test_what_listens_is_what_the_table_says(mode: str, tmp_path: Path) -> None:
    """In each mode of the table the processes of a job listen where it says, and nowhere else."""
    with virtual_hosts(2) as hosts:
        MODES[mode](Bed(hosts, tmp_path), TABLE[mode])


def test_no_mode_is_missing() -> None:
    """Each mode that is started here has its rows in the table."""
    assert set(TABLE) == set(MODES)
