"""Watches one round for a hang: reads signs at each tick, takes looks, and brings both to `core.diagnosis.hang`.

Runs with --hang-timeout; without it, for a short time where the workers have done nothing for minutes. A look asks all
running workers for their stacks, their flight recorders for the number of collectives, and the GPUs' driver for the
processes whose GPUs compute. The agent reads the activity of the processes before it asks, since the answers take
processor time too. If a thread runs, the agent reads its state a few times more: a thread that polls soon sleeps again,
and a thread that computes does not. The time of a look is its beginning.

In a job of several nodes, a node whose own ranks are still for the timeout asks all nodes, and decides on all ranks
together. If another node's ranks are not still for that long, it asks again when they may be: at its next tick it would
be late. In a large job one node asks at a time, and only the deciding node tells of the hang.
"""

from __future__ import annotations

import os
from math import inf

from elastic_run.agent.driver.hang_signs import (
    MOMENT,
    MOMENTS,
    SignReader,
    add_failure,
    follow,
    make_look,
    sample_processes,
)
from elastic_run.agent.driver.worker_readings import ask_gpu_use
from elastic_run.core.failure import hang
from elastic_run.core.failure.hang import NOT_YET, count_wait, describe_rank, join_nodes
from elastic_run.core.job.node_status import HANG
from elastic_run.records import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elastic_run.agent.driver.hang_signs import ProcessSample
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.cluster.devices import GpuUse
    from elastic_run.core.failure.hang import JobStillness, Owner, Stillness
    from elastic_run.core.failure.stacks import Dump
    from elastic_run.loop import Timer

#: Seconds that workers get for their stacks; a verdict waits for them.
_WAIT_LIMIT = 1.5
#: Seconds that other nodes get to answer, and that a question takes at most.
_NODE_WAIT = 2.0
_LONGEST_QUESTION = 10.0
#: Seconds between two questions to the other nodes, at least and at most.
_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
#: Seconds that another node gets for its last look before it is asked.
_LOOK_TIME = 0.2
#: Seconds until the first look of a detection, and until its answers are there.
_FIRST_LOOK = 4.0
#: Nodes that one line names.
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class Hang:
    """A job that hangs.

    Args:
        seconds: For how long no rank has made progress.
        ranks: How long each rank has been still, by global rank.
        dumps: The stacks of this node's workers, by global rank.
        owners: The worker of each rank.
        ended: Ranks that have ended well, for which the others may wait.
        is_decided_here: Whether this node decides on the action: it has the lowest rank of those that run.
    """

    seconds: float
    ranks: Mapping[int, Stillness]
    dumps: Mapping[int, Dump]
    owners: Mapping[int, Owner]
    ended: tuple[int, ...] = ()
    is_decided_here: bool = True


class HangDetection:
    """The detection in one round.

    Args:
        parts: The parts of the agent.
        current: The round, whose workers run.
        timeout: Seconds without progress that are a hang; 0 for `auto`.
        on_hang: Called once for each hang.
        quiet_for: Seconds for which the workers have done nothing, if that is why the detection runs; else 0.
    """

    def __init__(
        self,
        parts: AgentParts,
        current: Round,
        *,
        timeout: float,
        on_hang: Callable[[Hang], None],
        quiet_for: float = 0.0,
    ) -> None:
        self._parts = parts
        self._loop = parts.loop
        self._round = current
        self._quiet_for, self._began_at = quiet_for, parts.loop.now()
        self._signs = SignReader(current, parts.context.heartbeats)
        self._job = parts.job if parts.job is not None and parts.job.has_others else None
        self._on_hang = on_hang
        self._watch = hang.HangWatch(timeout)
        self._is_closed = False
        self._has_said_without = False
        #: The look that goes on, when it began, and whether a tick was due meanwhile.
        self._look: _Look | None = None
        self._looks_at = 0.0
        self._is_tick_due = False
        self._dumps: Mapping[int, Dump] = {}
        self._gpu_memory: dict[str, Any] = {}
        #: The next question to the other nodes, and when this node was asked, or has asked, last.
        self._ask_at = 0.0
        self._asked_at = -inf
        self._asking: Timer | None = None
        self._has_lowest_rank = self._job is None
        self._timer: Timer
        self._tick()

    def close(self) -> None:
        """Watch no more."""
        self._is_closed = True
        self._signs.close()
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        if self._look is not None:
            self._look.close()

    def answer(self) -> dict[str, Any]:
        """Return the stillness of this node's ranks at the last look, for the node that asks."""
        self._asked_at = self._loop.now()
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        timeout = self._watch.timeout if self._watch.signs or self._is_closed else NOT_YET
        age = 0.0 if self._watch.looked_at is None else self._loop.now() - self._watch.looked_at
        workers = []
        if not self._is_closed:
            names, pids = self._round.global_ranks, self._round.workers.pids
            workers = [
                describe_rank(names[rank], still, pid=pids[rank], local_rank=rank)
                for rank, still in self._measure().items()
            ]
        return {"round": self._round.number, "timeout": timeout, "age": age, "workers": workers}

    def _measure(self) -> dict[int, Stillness]:
        """Return for how long each rank had been still at the last look; its place since then is unknown."""
        at = self._watch.looked_at
        return hang.measure(self._watch, self._loop.now() if at is None else at)

    def _tick(self) -> None:
        now = self._loop.now()
        if self._look is not None:  # stacks that are written and not yet read would be taken for output
            self._watch = replace(self._watch, ticked_at=now)
            self._is_tick_due = True
            self._timer = self._loop.call_later(self._watch.period, self._tick)
            return
        signs = self._signs.read()
        self._watch, wants_look = hang.tick(self._watch, now, signs)
        self._timer = self._loop.call_later(hang.count_pause(self._watch, now), self._tick)
        if wants_look and signs:
            self._looks_at = now
            self._look = _Look(self._parts, self._round, self._gpu_memory, self._conclude)
            self._look.follow(MOMENTS)
        elif self._job is not None:
            self._decide()

    def _conclude(
        self, dumps: Mapping[int, Dump], answers: Mapping[int, str], samples: Mapping[int, ProcessSample]
    ) -> None:
        self._look = None
        if self._is_closed:
            return
        alive = samples.keys() & dumps.keys() & self._round.workers.alive
        looks = {
            rank: add_failure(
                make_look(dumps[rank], samples[rank], answers.get(rank, "")), self._round, rank, dumps[rank]
            )
            for rank in alive
        }
        self._dumps = dumps
        self._watch = hang.look(self._watch, self._looks_at, looks)
        self._decide()
        if self._is_tick_due and not self._is_closed:
            self._is_tick_due = False
            self._timer.cancel()
            self._tick()

    def _decide(self) -> None:
        """Tell of a hang if no rank here has made progress for the timeout, and none on the other nodes."""
        now = self._loop.now()
        over_for = hang.count_seconds(self._measure()) - self._watch.timeout
        if over_for < 0 or self._watch.told is not None or now < self._ask_at:
            return
        if self._job is None:
            self._report(join_nodes([self._describe_own()], expected=1, round_number=self._round.number))
            return
        wait = 0.0
        if self._job.is_large and not self._has_lowest_rank:
            wait = count_wait(self._job.group_rank, over_for=over_for, unasked_for=now - self._asked_at)
        if wait > 0:
            self._ask_later(wait)
        else:
            self._asked_at = now
            self._ask_at = now + _LONGEST_QUESTION
            self._job.gather_status(HANG, _NODE_WAIT, self._decide_job)

    def _ask_later(self, seconds: float) -> None:
        self._ask_at = self._loop.now() + seconds
        self._asking = self._loop.call_at(self._ask_at, self._decide)

    def _describe_own(self) -> dict[str, Any]:
        return {"host": os.uname().nodename, "pid": os.getpid(), **self._describe()}

    def _decide_job(self, documents: Sequence[dict[str, Any]]) -> None:
        """Decide on all nodes' ranks; the nodes' answers came as of their last looks, this node's is made anew."""
        if self._is_closed or self._watch.told is not None or self._job is None:
            return
        own = self._describe_own()
        key = own["host"], own["pid"]
        others = [node for node in documents if self._job.is_member(node) and (node["host"], node["pid"]) != key]
        found = join_nodes([own, *others], expected=self._job.nodes, round_number=self._round.number)
        if found.without and not self._has_said_without and not self._quiet_for:
            self._has_said_without = True
            self._parts.say(f"hangs are not detected: {', '.join(found.without[:_MOST_NAMES])} has no --hang-timeout")
        self._has_lowest_rank = min(found.ranks, default=-1) in self._round.global_ranks.values()
        is_hang = found.seconds >= found.timeout > 0
        if is_hang and (self._has_lowest_rank or not self._job.is_large):
            self._report(found)
        elif not is_hang:
            # A node whose last look is overdue is asked more and more rarely.
            pause = max(found.left + _LOOK_TIME, -found.left, _PAUSE)
            self._ask_later(min(pause, _LONGEST_PAUSE))

    def _report(self, found: JobStillness) -> None:
        self._watch = hang.tell(self._watch)
        names = self._round.global_ranks
        dumps = {names[rank]: dump for rank, dump in self._dumps.items()}
        world_size = self._parts.context.group.workers[0].world_size
        ended = tuple(rank for rank in range(world_size) if rank not in found.ranks)
        self._on_hang(Hang(found.seconds, self._extend(found), dumps, found.owners, ended, self._has_lowest_rank))

    def _extend(self, found: JobStillness) -> Mapping[int, Stillness]:
        """Return the ranks' stillness with the time before this detection, if none has moved since."""
        is_unmoved = self._loop.now() - self._began_at - found.seconds < _FIRST_LOOK
        before = self._quiet_for if is_unmoved else 0.0
        return {rank: replace(still, same=still.same + before) for rank, still in found.ranks.items()}


class _Look:
    """The questions of one look; calls when all of them are answered, or are not waited for any longer."""

    def __init__(
        self,
        parts: AgentParts,
        current: Round,
        gpu_memory: dict[str, Any],
        on_done: Callable[[Mapping[int, Dump], Mapping[int, str], Mapping[int, ProcessSample]], None],
    ) -> None:
        self._samples = sample_processes(current)
        self._round, self._gpu_memory, self._on_done = current, gpu_memory, on_done
        self._loop, self._recorder = parts.loop, parts.context.flight_recorder
        self._dumps: Mapping[int, Dump] | None = None
        self._answers: Mapping[int, str] | None = {} if self._recorder is None else None
        self._busy: frozenset[int] | None = None
        self._pids = {rank: current.workers.pids[rank] for rank in self._samples}
        self._timer: Timer | None = None

    def close(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    def follow(self, moments: int) -> None:
        """Ask when each thread that runs has slept or computes, or after so many moments more."""
        if moments and any(sample.is_undecided for sample in self._samples.values()):
            began_at = self._loop.now()
            self._timer = self._loop.call_later(MOMENT, lambda: self._take_moment(moments, began_at))
        else:
            self._ask()

    def _take_moment(self, moments: int, began_at: float) -> None:
        seconds = self._loop.now() - began_at
        self._samples = {rank: follow(sample, self._pids[rank], seconds) for rank, sample in self._samples.items()}
        self.follow(moments - 1)

    def _ask(self) -> None:
        ask_gpu_use(self._loop, self._gpu_memory, self._take_gpu_use)
        pids = {rank: self._round.workers.pids[rank] for rank in self._round.workers.alive}
        self._round.listen_for_stacks().ask(pids, _WAIT_LIMIT, self._take_dumps, spares=True)

    def _take_answers(self, answers: Mapping[int, str]) -> None:
        self._answers = answers
        self._conclude()

    def _take_dumps(self, dumps: Mapping[int, Dump]) -> None:
        self._dumps = dumps
        if self._recorder is not None:  # not before: its thread must not run while its stack is read
            self._recorder.count(self._loop, self._take_answers)
        self._conclude()

    def _take_gpu_use(self, found: Mapping[int, GpuUse]) -> None:
        self._busy = frozenset(pid for pid, use in found.items() if use.computes)
        self._conclude()

    def _conclude(self) -> None:
        if self._dumps is None or self._answers is None or self._busy is None:
            return
        samples = {
            rank: replace(sample, is_gpu_busy=self._pids.get(rank) in self._busy)
            for rank, sample in self._samples.items()
        }
        self._on_done(self._dumps, self._answers, samples)
