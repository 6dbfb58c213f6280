"""Watches one round for a rank that the others wait for: asks the recorders at intervals, tells the user, and why.

- Runs where torch's flight recorder is on. `core.failure.slow_rank` decides.
- In a job of several nodes, the agent of the first node asks all nodes. A node answers at once with what its workers
  have told at the question before, and asks them anew: so an answer takes no longer than its way.
- The node of the slow rank looks for the reason in the kernel's counters of its ranks, over the last minute. On a busy
  machine, a comparison over seconds would find chance.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from statistics import median

from elastic_run.cluster import devices
from elastic_run.cluster.limits import list_names, read_throttled
from elastic_run.core.config import FEW_NODES
from elastic_run.core.failure import slow_rank
from elastic_run.core.job.node_status import SLOW, WAITS
from elastic_run.multiprocessing.fork_exec import read_proc
from elastic_run.records import dataclass
from elastic_run.report import lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from elastic_run.agent.driver import AgentParts
    from elastic_run.agent.driver.flight_recorder import FlightRecorder, RecorderQuestion
    from elastic_run.agent.driver.round import Round
    from elastic_run.cluster.devices import GpuClock
    from elastic_run.core.failure.slow_rank import Calls

    Document = dict[str, Any]

#: Seconds between two questions, and the same in a large job. An answer holds up a worker for 20 ms.
PERIOD, _LONG_PERIOD = 15.0, 30.0
#: Seconds in which a slow rank is slow, and seconds of which the shares tell.
SPAN, RECENT = 300.0, 60.0
#: Collectives in the answer of a node at most, and in those of all nodes.
_MOST_CALLS = 4096
_MOST_IN_ALL = 65536
#: Seconds that other nodes get to answer, also where the GPUs' driver takes its time.
_NODE_WAIT = 2.0
#: A reason counts if it explains this part of the others' wait. A GPU is slow below this part of the other GPUs' clock,
#: or of the highest clock.
_EXPLAINED = 0.5
_SLOW_CLOCK = 0.9
#: Positions in /proc/PID/task/TID/schedstat.
_RUN, _WAITED = 0, 1


class SlowRankWatch:
    """The watch in one round; on the node that decides it asks, and on the others it answers."""

    def __init__(self, context: AgentParts, current: Round, recorder: FlightRecorder) -> None:
        self._context, self._loop = context, context.loop
        self._round, self._recorder = current, recorder
        self._job = context.job if context.job is not None and context.job.nodes > 1 else None
        self._nodes = 1 if self._job is None else self._job.nodes
        self._watch = slow_rank.SlowRanks(SPAN, RECENT)
        self._answers: list[dict[int, Sequence[Document]]] = []  # What this node's workers have told, by global rank
        self._question: RecorderQuestion | None = None
        self._readings: list[Reading] = []  # Of the last minute
        self._written_at = self._loop.now()
        self._is_closed = False
        self._period = PERIOD if self._nodes <= FEW_NODES else _LONG_PERIOD
        self._timer = self._loop.call_later(self._period, self._ask) if context.group.group_rank in (0, None) else None

    def close(self) -> None:
        """Watch no more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    @property
    def shares(self) -> dict[int, float]:
        """The share of the last minute in which the others waited for each rank, where this node knows it."""
        return {} if self._is_closed else slow_rank.count_shares(self._watch, self._loop.now())

    # --- the questions ---------------------------------------------------------------------------------------------
    def _ask(self) -> None:
        self._timer = self._loop.call_later(self._period, self._ask)
        if self._job is None:
            self._collect(lambda: self._add(slow_rank.join_ranks(self._answers, self._watch.counted), 0.0))
            return
        asked_at = self._loop.now()
        most = min(_MOST_CALLS, _MOST_IN_ALL // self._nodes)
        self._job.gather_status(f"{WAITS} {most}", _NODE_WAIT, lambda nodes: self._add_nodes(nodes, asked_at))

    def _collect(self, on_done: Callable[[], None] = lambda: None) -> None:
        def take(answers: Mapping[int, str]) -> None:
            ranks, self._question = self._round.global_ranks, None
            self._answers = [*self._answers[1 - slow_rank.ANSWERS :], {}]
            for local, answer in answers.items():
                with suppress(ValueError):  # a worker that was killed has sent a part of its answer
                    self._answers[-1][ranks[local]] = json.loads(answer)
            if not self._is_closed:
                on_done()

        most = round(RECENT / self._period)
        self._readings = [*self._readings[1 - most :], read_counters(self._round.alive_pids.values())]
        if self._question is None:  # a worker that gets little of the processors takes long
            self._question = self._recorder.list_calls(self._loop, take)

    def answer(self, words: str) -> list[Document]:
        """Return what this node's workers have told last, for the node that asks, and ask them anew."""
        most = int(words) if words.isdecimal() else 0
        # The recorders' clock is the wall clock; the answer has ages.
        told = slow_rank.describe_calls(slow_rank.join_ranks(self._answers, {}), time.time(), min(most, _MOST_CALLS))
        self._collect()
        return told

    def _add_nodes(self, nodes: Sequence[Document], asked_at: float) -> None:
        if self._is_closed or self._job is None:
            return
        now = self._loop.now()
        members = [node for node in nodes if self._job.is_member(node)]
        at = (asked_at + now) / 2  # each node has answered between these two moments
        self._add([each for node in members for each in slow_rank.read_calls(node["groups"], at)], now - asked_at)

    def _add(self, calls: Sequence[Calls], error: float) -> None:
        now = self._loop.now()
        self._watch = slow_rank.add(self._watch, calls, now, error)
        if now - self._written_at >= RECENT - self._period / 2:
            self._written_at = now
            self._context.events.waits_measured(self.shares)
        slow = slow_rank.find_slow(self._watch, now)
        self._watch = slow_rank.tell(self._watch, slow)
        for rank, share in slow.items():
            self._ask_reason(rank, share)

    # --- the line --------------------------------------------------------------------------------------------------
    def _ask_reason(self, rank: int, share: float) -> None:
        def tell(nodes: Sequence[Document]) -> None:
            found = [(node["host"], own["reason"]) for node in nodes for own in node["workers"] if own["rank"] == rank]
            host, reason = found[0] if found else ("", "")
            if self._context.is_running(self._round.number):
                line = lines.slow_rank(rank, host, share, reason)
                self._context.say(line)
                self._context.events.slow_rank_found(rank, share, line)

        if self._job is None:
            self.explain(f"{rank} {share:.0%}", lambda workers: tell([{"host": "", "workers": workers}]))
        else:
            self._job.gather_status(f"{SLOW} {rank} {share:.0%}", _NODE_WAIT, tell)

    def explain(self, words: str, deliver: Callable[[list[Document]], None]) -> None:
        """Deliver the reason why a rank is slow: "" if none is found, an empty list if the rank is on another node."""
        rank, percent = (int(word) if word.isdecimal() else -1 for word in words.rstrip("%").partition(" ")[::2])
        pids = {self._round.global_ranks[local]: pid for local, pid in self._round.alive_pids.items()}
        if rank not in pids or not self._readings or self._is_closed:
            deliver([])
            return
        first = self._readings[0]

        def look() -> None:
            reason = ""
            try:
                reason = find_reason(rank, percent / 100, pids, first)
            finally:
                self._loop.call_soon_threadsafe(lambda: deliver([{"rank": rank, "reason": reason}]))

        # In a thread: the GPUs' driver may take long.
        threading.Thread(target=look, name="slow rank", daemon=True).start()


# --- the reason -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Reading:
    """What the kernel has counted of processes until a moment."""

    at: float
    throttled: float  # Seconds for which a quota has held up all of them
    threads: Mapping[str, Sequence[int]]  # By /proc's file of each thread: nanoseconds on a processor, and waiting


def read_counters(pids: Iterable[int]) -> Reading:
    """Read the counters of all threads of some processes."""
    names = (f"{pid}/task/{task}/schedstat" for pid in pids for task in list_names(f"/proc/{pid}/task"))
    threads = {name: [int(field) for field in fields] for name in names if (fields := read_proc(name).split())}
    return Reading(time.monotonic(), read_throttled(), threads)


def find_reason(rank: int, share: float, pids: Mapping[int, int], first: Reading) -> str:
    """Compare a rank with the other ranks of its node since a reading; return why it costs that share of the time."""
    clocks = devices.read_gpu_clocks() if devices.has_library() else {}
    if pids[rank] in clocks and (said := _describe_gpu(clocks[pids[rank]], clocks.values())):
        return said
    last, least = read_counters(pids.values()), _EXPLAINED * share
    if (held := (last.throttled - first.throttled) / (last.at - first.at)) >= least:
        return f"its control group gets no processor {100 * held:.0f} % of the time (cpu.max)"
    run, waited = ({each: _find_most(first, last, pid, of) for each, pid in pids.items()} for of in (_RUN, _WAITED))
    others = [each for each in pids if each != rank]
    if waited[rank] - max((waited[each] for each in others), default=0.0) >= least:
        return f"it waits for a processor {100 * waited[rank]:.0f} % of the time{_describe_place(rank, pids)}"
    usual = median(run[each] for each in others) if others else 1.0
    if run[rank] - usual >= least:
        return f"it computes {100 * run[rank]:.0f} % of the time, the other ranks of its node {100 * usual:.0f} %"
    return ""


def _describe_gpu(own: GpuClock, clocks: Iterable[GpuClock]) -> str:
    """Return a clause about a GPU that is slower than the other GPUs of the node, or than it can be."""
    others = [each.clock for each in clocks if each.index != own.index]
    if not own.reasons or own.clock >= _SLOW_CLOCK * (median(others) if others else own.highest):
        return ""
    return f"GPU {own.index} runs at {own.clock:,} of {own.highest:,} MHz ({', '.join(own.reasons)})"


def _find_most(first: Reading, last: Reading, pid: int, of: int) -> float:
    """Return the part of the time of the thread with most; the main thread may wait for another one."""
    names = [name for name in first.threads.keys() & last.threads.keys() if name.startswith(f"{pid}/")]
    most = max((last.threads[name][of] - first.threads[name][of] for name in names), default=0)
    return most / 1e9 / (last.at - first.at)


def _describe_place(rank: int, pids: Mapping[int, int]) -> str:
    """Return a clause about what gives a rank less of the processors than others."""
    try:
        nice = {each: os.getpriority(os.PRIO_PROCESS, pid) for each, pid in pids.items()}
        processors = sorted(os.sched_getaffinity(pids[rank]))
    except OSError:  # a worker has ended just now
        return ""
    if nice[rank] > min(nice.values()):
        return f" (nice {nice[rank]})"
    return "" if len(processors) > 1 else f" (it may use processor {processors[0]} only)"
