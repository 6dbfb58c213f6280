"""Faults that overlap: the next one begins when its time has come, whether or not the job has recovered from the last.

One fault at a time hits a node, since a node that is off can't be hit; another node is hit instead. A fault that ends
an agent starts the next agent itself. A node that loses its power takes the seat record of its agent along, so nobody
can prove this agent's death. If the store can move, and a second of three agents ended before the job has formed a
round without the first, the job would wait for more than half of its seats without end (docs/architecture.md). So such
a fault waits for that round. What must be true is asserted when all faults are over: no agent ended that was not ended,
and what the story asserts then.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.chaos.faults import ENDS_AGENT, inflict
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.etcd import EtcdCluster
    from tests.chaos.faults import Fault
    from tests.chaos.job import ManyNodeJob

#: Kinds that only do harm: they wait for nothing that a job among other faults does late.
KINDS = (
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


class Storm:
    """Faults that overlap.

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
        """Let faults happen, one every so many seconds.

        Args:
            faults: What happens.
            every: Seconds from the begin of one to the begin of the next.

        Raises:
            AssertionError: An agent ended that no fault had ended, or a fault could not be undone.
        """
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
