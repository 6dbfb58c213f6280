"""A Slurm cluster for tests: a real controller and real nodes, each on a virtual host, without systemd. Needs root.

    with slurm_cluster(3) as slurm:
        job = slurm.submit("job.sbatch", "--steps=10")
        assert slurm.wait_end(job).state == "COMPLETED"

The controller and munged, which vouches for users, run on the hub. All daemons stay in the foreground, as programs of
their host, so they end with it. A node that fails is a host whose power is taken away. What Slurm does about time is
set short: a node that is silent is down after some seconds, and a requeued job may start again as soon.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.hosts import VirtualHosts, virtual_hosts
from tests.support.system import starter
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.hosts import HostProcess

ROOT = Path(__file__).parents[2]
#: Seconds until a silent node is down. Its jobs end then, or are requeued.
NODE_TIMEOUT = 8
#: Seconds that a job's processes have between SIGTERM and SIGKILL.
KILL_WAIT = 10
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=hub({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdSpoolDir={directory}/spool/%n
StateSaveLocation={directory}/state
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/ended
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/{scheduler}
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={node_timeout}
InactiveLimit=0
KillWait={kill_wait}
Waittime=0
MessageTimeout=3
TCPTimeout=3
JobRequeue=1
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
"""
#: The machine may have fewer: nodes say what they are told to.
_CPUS = 4


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended, once.

    Attributes:
        state: Slurm's word for it, such as COMPLETED, CANCELLED, NODE_FAIL.
        exit_code: The batch script's.
        signal: What killed the script, 0 for nothing.
    """

    state: str
    exit_code: int
    signal: int


class SlurmCluster:
    """A running cluster.

    Args:
        hosts: Its nodes, and the hub for the controller.
        directory: For its files; other users can reach it.
        scheduler: Slurm's: `builtin` starts jobs at once, `backfill` knows heterogeneous jobs.
        switches: The nodes below each switch, as in topology.conf; none for a network without switches.
        kill_wait: Seconds between SIGTERM and SIGKILL.
        grace: Seconds that a job has when one of the partition `urgent` takes its nodes; none for no such partition.

    Attributes:
        hosts: Its nodes.
    """

    def __init__(
        self,
        hosts: VirtualHosts,
        directory: Path,
        scheduler: str = "builtin",
        switches: Sequence[str] = (),
        kill_wait: int = KILL_WAIT,
        grace: int | None = None,
    ) -> None:
        self.hosts = hosts
        self._scheduler = scheduler
        self._switches = switches
        self._kill_wait = kill_wait
        self._grace = grace
        self._directory = directory
        self._env = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons: dict[str, HostProcess] = {}

    def start(self) -> None:
        """Start all daemons and wait until every node is ready for work."""
        self._write_configuration()
        self._start_munge()
        self._daemons["hub"] = self.hosts.hub.start(["slurmctld", "-D", "-i"], env=self._env, merge=True)
        for host in self.hosts:
            self.start_node(host.name)
        self.wait_nodes(len(self.hosts))

    def start_node(self, name: str) -> None:
        """Start a node's daemon, as a host's boot does."""
        (host,) = [host for host in self.hosts if host.name == name]
        self._daemons[name] = host.start(["slurmd", "-D", "-N", name], env=self._env, merge=True)

    def wait_nodes(self, count: int, *, state: str = "idle") -> None:
        """Wait until so many nodes are in a state."""

        def has_come() -> bool:
            return len(set(self.run("sinfo", "-h", "-N", "-t", state, "-o", "%N").split())) == count

        try:
            wait_until(has_come, what=f"{count} nodes {state}")
        except AssertionError as error:
            message = f"{error}\n{self.logs()}"
            raise AssertionError(message) from error

    def run(self, *command: str | Path, env: Mapping[str, str | None] | None = None, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands on the hub and return what it printed."""
        process = self.hosts.hub.start(command, env={**self._env, **(env or {})}, cwd=cwd)
        if process.wait_exit():
            message = f"{command}: {process.stdout}{process.stderr}"
            raise RuntimeError(message)
        return process.stdout

    def submit(
        self, *arguments: str | Path, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
    ) -> int:
        """Submit a batch script."""
        return int(self.run("sbatch", "--parsable", *arguments, env=env, cwd=cwd))

    def submit_script(
        self, directory: Path, body: str, *options: str, log: str = "job.log", env: Mapping[str, str] | None = None
    ) -> int:
        """Submit a batch script that runs, and writes its log, in a directory."""
        script = directory / f"{log}.sbatch"
        script.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        variables = {"PATH": programs, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        return self.submit(f"--output={log}", "--no-requeue", *options, script, env=variables, cwd=directory)

    def run_script(self, directory: Path, body: str, *options: str, script: str = "") -> tuple[int, str]:
        """Run a batch script to its end, beside a train.py; return its exit code and what all of it has written."""
        if script:
            (directory / "train.py").write_text(script, encoding="utf-8")
        log = directory / "job.log"
        try:
            ending = self.wait_end(self.submit_script(directory, body, *options))
        except BaseException:  # also that of the test's time limit
            sys.stderr.write(f"{log.read_text(encoding='utf-8') if log.exists() else ''}\n{self.logs()}\n")
            raise
        return ending.exit_code, log.read_text(encoding="utf-8")

    def cancel(self, job: int) -> None:
        """Cancel a job."""
        self.run("scancel", str(job))

    def endings(self, job: int) -> list[JobResult]:
        """Return how a job has ended so far: more than once if it was requeued."""
        ended = self._directory / "ended"
        lines = ended.read_text(encoding="utf-8").splitlines() if ended.exists() else []
        found = []
        for line in lines:
            words = dict(word.split("=", 1) for word in line.split() if "=" in word)
            # A job that lost a node and goes on is noted as RESIZING.
            if words["JobId"] == str(job) and words["JobState"] != "RESIZING":
                code, _, number = words.get("ExitCode", "0:0").partition(":")
                found.append(JobResult(words["JobState"], int(code), int(number)))
        return found

    def wait_end(self, job: int, *, count: int = 1, deadline: float = 2 * DEADLINE) -> JobResult:
        """Wait until a job has ended so many times, and return the last."""
        try:
            return wait_until(lambda: self.endings(job)[count - 1 :], deadline=deadline, what=f"end of job {job}")[-1]
        except AssertionError as error:
            message = f"{error}\n{self.logs()}"
            raise AssertionError(message) from error

    def wait_cleared(self, job: int) -> None:
        """Wait until nothing of a job that has ended runs any more, by Slurm's account."""
        wait_until(lambda: not self.run("squeue", "-h", "-j", str(job)), what=f"all of job {job} gone")

    def processes(self) -> list[int]:
        """Return the pids of what runs on the nodes, Slurm's own daemons left out."""
        daemons = {daemon.pid for daemon in self._daemons.values() if daemon.process.poll() is None}
        return [pid for host in self.hosts for pid in host.processes() if pid not in daemons]

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for messages."""
        parts = [f"--- {name}\n{daemon.stdout[-2000:]}" for name, daemon in self._daemons.items()]
        return "\n".join(parts)

    def _write_configuration(self) -> None:
        for name in ("state", "spool", *(f"spool/{host.name}" for host in self.hosts)):
            (self._directory / name).mkdir()
        text = _CONFIGURATION.format(
            address=self.hosts.hub.address,
            directory=self._directory,
            node_timeout=NODE_TIMEOUT,
            kill_wait=self._kill_wait,
            scheduler=self._scheduler,
        )
        for host in self.hosts:
            text += f"NodeName={host.name} NodeAddr={host.address} CPUs={_CPUS} State=UNKNOWN\n"
        names = ",".join(host.name for host in self.hosts)
        text += f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP"
        if self._grace is not None:
            text += f" PriorityTier=1 PreemptMode=CANCEL GraceTime={self._grace}\n"
            text += f"PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=2\n"
            text += "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL"
        text += "\n"
        if self._switches:
            text += "TopologyPlugin=topology/tree\n"
            rows = [f"SwitchName=s{number} Nodes={nodes}" for number, nodes in enumerate(self._switches)]
            rows.append(f"SwitchName=top Switches=s[0-{len(rows) - 1}]")
            (self._directory / "topology.conf").write_text("\n".join(rows) + "\n", encoding="ascii")
        (self._directory / "slurm.conf").write_text(text, encoding="ascii")

    def _start_munge(self) -> None:
        directory = self._directory / "munge"
        directory.mkdir(mode=0o711)
        key = directory / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (directory, key):
            shutil.chown(path, "munge", "munge")
        # --force: a directory below /tmp is writable by others, which munged would not have.
        files = [f"--{name}={directory / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        munged = ["munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}", *files]
        self._daemons["munge"] = self.hosts.hub.start([*user, *munged], merge=True)
        wait_until((directory / "socket").exists, what="munge")


@starter
@contextlib.contextmanager
def slurm_cluster(
    count: int,
    *,
    scheduler: str = "builtin",
    switches: Sequence[str] = (),
    kill_wait: int = KILL_WAIT,
    grace: int | None = None,
) -> Iterator[SlurmCluster]:
    """Start a cluster, and remove it and all that it runs at the end."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, virtual_hosts(count, prefix="node") as hosts:
        directory = Path(name)
        directory.chmod(0o711)  # munged is another user
        cluster = SlurmCluster(hosts, directory, scheduler, switches, kill_wait, grace)
        cluster.start()
        yield cluster
