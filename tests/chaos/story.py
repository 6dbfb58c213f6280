"""A job's life among faults, told from its begin to its end: the driver of the chaos tests.

    start on all nodes -> train -> (fault -> heal -> all nodes train together again)* -> end well -> audit

With `every` the faults overlap (`storm`): the next one waits for nothing, and all nodes train together again after the
last.

What must be true is asserted on the way: no agent ends that was not ended; after each fault all nodes come together and
write checkpoints, in the life of before where no worker may notice the fault; each fault has left a trace in what the
agents wrote; in the end every agent ends with 0, the loss is lower, nothing lives on any host, and each sample in the
model is in the books of exactly one rank.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.etcd import EtcdCluster
from tests.chaos.faults import ENDS_AGENT, LONGEST, UNNOTICED, Fault, draw_faults, inflict
from tests.chaos.job import PORT, ManyNodeJob, Plan
from tests.chaos.storm import KINDS, RECOVERY, Storm
from tests.support.hosts import VirtualHosts, virtual_hosts
from tests.support.launch import ELASTIC_RUN
from tests.support.system import starter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.chaos.accounts import Progress

#: Where the agents meet: in an etcd on the hub, in a store on the first node, or that with the others as successors.
STORES = ("etcd-v3", "etcd", "c10d", "successors")
_NODES = 3
#: Seconds from the word that it is enough to the end of all agents.
_ENDING = 60.0
#: How an agent says that another node is gone.
_LOSS = r"elastic-run: .*(lost|left|died|gone|silent)"
#: What agents must have written since a fault began, one of these; without an entry a fault may pass unnoticed.
TRACES = {
    "kill-worker": r"killed by SIGKILL",
    "kill-agent": _LOSS,
    "kill-agent-and-guardian": _LOSS,
    "stop-guardian-and-kill-agent": _LOSS,
    "signal-agent": r"elastic-run: SIGUSR[12] .*(no worker handles it|passed on)",
    "escape": r"killed by SIGKILL",
    "terminate-agent": r"SIGTERM",
    "terminate-agent-in-the-dark": r"SIGTERM",
    "power-off": _LOSS,
    "fill-store": r"elastic-run: refused a message at port",
}
#: Faults that an agent tells its user of only once.
_TOLD_ONCE = {"fill-store"}


@dataclass(frozen=True, slots=True)
class Story:
    """What will happen.

    Attributes:
        seed: Decides on the faults.
        count: How many there are.
        store: One of `STORES`.
        only: The kinds of faults; all when empty.
        every: Seconds from fault to fault, which then overlap; None to wait until the job has recovered.
        longest: Seconds that a fault lasts at most.
        launcher: The launcher's command.
    """

    seed: int
    count: int
    store: str = "c10d"
    only: Sequence[str] = ()
    every: float | None = None
    longest: float = LONGEST
    launcher: Sequence[str] = ELASTIC_RUN

    def command(self) -> str:
        """Return the command that tells this story again."""
        only = f" --only {','.join(self.only)}" if self.only else ""
        pace = "" if self.every is None else f" --every {self.every:g} --longest {self.longest:g}"
        return f"python -m tests.chaos --seed {self.seed} --faults {self.count} --store {self.store}{only}{pace}"

    @property
    def store_node(self) -> int | None:
        """The node that has the store and whose end would end the job, if there is one."""
        return 0 if self.store == "c10d" else None

    def faults(self) -> Sequence[Fault]:
        """Return the faults, always the same."""
        return draw_faults(
            random.Random(self.seed),  # noqa: S311 - it must be the same again
            self.count,
            nodes=_NODES,
            has_etcd=self.store.startswith("etcd"),
            store_node=self.store_node,
            only=self.only or (() if self.every is None else KINDS),
            longest=self.longest,
        )


@starter
def tell(story: Story, directory: Path, *, say: Callable[[str], None] = lambda _: None) -> None:
    """Let it happen.

    Args:
        story: What happens.
        directory: For the job's checkpoint, books and logs.
        say: Told each event, a line.

    Raises:
        AssertionError: Something was not as it must be.
    """
    with virtual_hosts(_NODES) as hosts:
        for host in hosts:
            host.clock.install()
        etcd = EtcdCluster(hosts.hub, directory / "etcd") if story.store.startswith("etcd") else None
        job = ManyNodeJob(hosts, _plan(story, hosts, etcd), directory)
        try:
            if story.every is None:
                _go_through(story.faults(), job, etcd, say)
            else:
                _go_through_storm(story, job, etcd, say)
        finally:
            (directory / "transcript").write_text(job.transcript(lines=100_000), encoding="utf-8")
            job.close()


def _plan(story: Story, hosts: VirtualHosts, etcd: EtcdCluster | None) -> Plan:
    endpoints = [f"{host.name}:{PORT}" for host in hosts]
    if etcd:
        return Plan(story.store, etcd.endpoints, launcher=story.launcher)
    return Plan("c10d", ",".join(endpoints) if story.store == "successors" else endpoints[0], launcher=story.launcher)


def _go_through(
    faults: Sequence[Fault], job: ManyNodeJob, etcd: EtcdCluster | None, say: Callable[[str], None]
) -> None:
    first = job.wait_progress(deadline=RECOVERY)
    say(_describe(first))
    now = first
    for number, fault in enumerate(faults, 1):
        say(f"fault {number} of {len(faults)}: {fault}")
        written = [len(node.output) for node in job.nodes]
        inflict(fault, job, etcd)
        if codes := job.restart_agents(job.nodes[fault.node] if fault.name in ENDS_AGENT else None):
            say(f"agent started again, exit code {codes}")
        before, now = now, job.wait_progress(deadline=RECOVERY)
        say(_describe(now))
        assert now.life == before.life or fault.name not in UNNOTICED, f"{fault}\n{job.transcript()}"
        _assert_traces(fault, job, written)
    last = job.progress()
    job.finish(deadline=_ENDING)
    assert last is not None
    assert last.loss < 0.7 * first.loss, f"loss {first.loss} -> {last.loss}"
    say(f"loss {first.loss:.3f} -> {last.loss:.3f} in {len(last.ancestry)} lives, every sample accounted for")


def _go_through_storm(story: Story, job: ManyNodeJob, etcd: EtcdCluster | None, say: Callable[[str], None]) -> None:
    first = job.wait_progress(deadline=RECOVERY)
    say(_describe(first))
    Storm(job, etcd, store_node=story.store_node, say=say).blow(story.faults(), story.every or 0.0)
    last = job.wait_progress(deadline=RECOVERY)
    say(_describe(last))
    job.finish(deadline=_ENDING)
    say(f"loss {first.loss:.3f} -> {last.loss:.3f} in {len(last.ancestry)} lives, every sample accounted for")


def _assert_traces(fault: Fault, job: ManyNodeJob, written: Sequence[int]) -> None:
    pattern = TRACES.get(fault.name)
    begins = [0] * len(written) if fault.name in _TOLD_ONCE else written
    news = "".join(node.output[begin:] for node, begin in zip(job.nodes, begins, strict=True))
    assert pattern is None or re.search(pattern, news), f"no trace of {fault} in\n{news}"


def _describe(progress: Progress) -> str:
    return f"{progress.ranks} ranks at step {progress.step}, loss {progress.loss:.3f}, life {len(progress.ancestry)}"
