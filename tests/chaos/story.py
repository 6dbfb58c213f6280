"""A job's life among faults, told from its begin to its end: the driver of the chaos tests.

    start on all nodes -> train -> (fault -> heal -> all nodes train together again)* -> end well -> audit

With `every` the faults overlap (`Storm`): the next one waits for nothing, and all nodes train together again after the
last.

What must be true is asserted on the way: no agent ends that was not ended; after each fault all nodes come together and
write checkpoints, in the life of before where no worker may notice the fault; each fault has left a trace in what the
agents wrote; in the end every agent ends with 0, the loss is lower, nothing lives on any host, and each sample in the
model is in the books of exactly one rank.
"""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.chaos.etcd import EtcdCluster
from tests.chaos.faults import ENDS_AGENT, LONGEST, UNNOTICED, Fault, draw_faults, inflict
from tests.chaos.job import PORT, ManyNodeJob, Plan
from tests.support.hosts import VirtualHosts, virtual_hosts
from tests.support.launch import ELASTIC_RUN
from tests.support.system import starter
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.chaos.job import Progress

#: Where the agents meet: in an etcd on the hub, in a store on the first node, or that with the others as successors.
STORES = ("etcd-v3", "etcd", "c10d", "successors")
_NODES = 3
#: Kinds that only do harm: they wait for nothing that a job among other faults does late.
_OVERLAPPING = (
    "kill-agent",
    "kill-agent-and-guardian",
    "terminate-agent",
    "terminate-agent-in-the-dark",
    "stop-agent",
    "power-off",
    "pull-cable",
    "go-dark",
    "cut-one-way",
    "cut-from-hub",
    "kill-store-leader",
    "set-clock",
    "signal-agent",
)
#: Seconds after a fault until all nodes have trained together again. Every worker imports torch, on few processors.
RECOVERY = 120.0
#: Stands for the store among what is hit.
_STORE = None
#: Seconds that a guardian may live on after its agent: it tells the death at every endpoint.
_LAST_WORDS = 20.0
#: Seconds beyond its own length that a fault may take, on processors that are busy.
_SLACK = 60.0
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
            only=self.only or (() if self.every is None else _OVERLAPPING),
            longest=self.longest,
        )


@starter
def tell(story: Story, directory: Path, *, say: Callable[[str], None] = lambda _: None) -> None:
    """Let it happen."""
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


# --- faults that overlap ----------------------------------------------------------------------------------------------
class Storm:
    """Faults that overlap: the next one begins when its time has come, recovered or not.

    One fault at a time hits a node, since a node that is off can't be hit; another node is hit instead. A fault that
    ends an agent starts the next agent itself. A node that loses its power takes the seat record of its agent along, so
    nobody can prove this agent's death. If the store can move, and a second of three agents ended before the job has
    formed a round without the first, the job would wait for more than half of its seats without end
    (docs/architecture.md). So such a fault waits for that round.

    Args:
        job: The job.
        etcd: Its store, where that is an etcd.
        store_node: The node that has the store and whose end would end the job, if there is one.
        say: Told each event, a line.
    """

    def __init__(
        self, job: ManyNodeJob, etcd: EtcdCluster | None, *, store_node: int | None, say: Callable[[str], None]
    ) -> None:
        self._job = job
        self._etcd = etcd
        self._store_node = store_node
        self._say = say
        self._lock = threading.Lock()
        self._hit: set[int | None] = set()
        self._wrong: list[str] = []
        #: How often the job had started from its checkpoint when a node lost its power; None after a further start.
        self._lives: int | None = None

    def blow(self, faults: Sequence[Fault], every: float) -> None:
        """Let faults happen, one every so many seconds."""
        self._job.orphan_deadline = _LAST_WORDS
        threads = []
        start = time.monotonic()
        for number, fault in enumerate(faults):
            time.sleep(max(0.0, start + number * every - time.monotonic()))  # the pace of the faults is the test
            if fault.name in ENDS_AGENT:
                self._wait_for_round()
            where = self._find_node(fault)
            if where is None:
                self._say(f"fault {number + 1} of {len(faults)}: {fault.name} finds every node hit")
                continue
            self._say(f"fault {number + 1} of {len(faults)}: {where}")
            if where.name == "power-off" and self._can_store_move:
                self._lives = self._count_lives()
            thread = threading.Thread(target=self._let_happen, args=(where,), name=str(where))
            thread.start()
            threads.append(thread)
            assert not self._wrong, "\n".join([*self._wrong, self._job.transcript()])
        for thread in threads:
            thread.join(_SLACK)
        over = [thread.name for thread in threads if thread.is_alive()]
        assert not over, f"never over: {over}\n{self._job.transcript()}"
        assert not self._wrong, "\n".join([*self._wrong, self._job.transcript()])

    @property
    def _can_store_move(self) -> bool:
        return self._etcd is None and self._store_node is None

    def _count_lives(self) -> int:
        progress = self._job.progress()
        return 0 if progress is None else len(progress.ancestry)

    def _wait_for_round(self) -> None:
        """Wait until a round is formed, and trains, that does not need the seat of a node without power."""
        if (lives := self._lives) is not None:
            wait_until(lambda: self._count_lives() > lives, deadline=RECOVERY, what="a round without the dark node")
            self._lives = None

    def _find_node(self, fault: Fault) -> Fault | None:
        """Return the fault at a node that no other fault hits now, and note it; None where there is none."""
        count = len(self._job.nodes)
        candidates = [(fault.node + step) % count for step in range(count)]
        with self._lock:
            if fault.name == "kill-store-leader":
                return fault if self._note_store() else None
            for number in candidates:
                is_host = number == self._store_node and fault.name in ENDS_AGENT
                if number not in self._hit and not is_host:
                    self._hit.add(number)
                    other = fault.other if fault.other != number else (number + 1) % count
                    return replace(fault, node=number, other=other)
        return None

    def _note_store(self) -> bool:
        """One member of etcd at a time: it must keep a majority of its own."""
        is_free = _STORE not in self._hit
        self._hit.add(_STORE)
        return is_free

    def _let_happen(self, fault: Fault) -> None:
        try:
            inflict(fault, self._job, self._etcd)
            if fault.name in ENDS_AGENT:
                code = self._job.start_again(self._job.nodes[fault.node])
                self._say(f"{self._job.nodes[fault.node].host}: agent started again, exit code {code}")
            elif fault.name != "kill-store-leader":
                self._assert_running(fault)
        except Exception as error:  # noqa: BLE001 - told by the thread that waits
            self._wrong.append(f"{fault}: {type(error).__name__}: {error}")
        with self._lock:
            # A fault of the store hits no node: the node that was drawn with it may be hit by another fault.
            self._hit.remove(_STORE if fault.name == "kill-store-leader" else fault.node)

    def _assert_running(self, fault: Fault) -> None:
        node = self._job.nodes[fault.node]
        assert node.is_running, (
            f"elastic-run ended on {node.host} during {fault}, exit code {node.agent.process.poll()}"
        )
