"""Watches one round for a hang: reads signs at each tick, takes looks, asks the other nodes, tells the user, and acts.

- Runs with --hang-timeout; without it, for a short time where the workers have done nothing for minutes (`watches`).
  `core.failure.hang` decides.
- A look reads the activity of the processes first, and asks afterwards: the answers take processor time too.
- In a job of several nodes, a node whose own ranks are still for the timeout asks all nodes, and decides on all ranks
  together; in a large job one node asks at a time, and only the deciding node tells of the hang.
- If a rank has failed and does not end, there is no hang: its node lets it count as failed.
"""

from __future__ import annotations

import os
import threading
import time
from math import inf

from elastic_run import contract
from elastic_run.agent.driver.worker_readings import (
    MOMENT,
    MOMENTS,
    ProcessSample,
    SignReader,
    ask_gpu_use,
    follow,
    make_look,
    sample_processes,
)
from elastic_run.core.agent import messages
from elastic_run.core.config import FEW_NODES
from elastic_run.core.failure import hang
from elastic_run.core.failure.hang import place_failed, place_last_words
from elastic_run.core.failure.root_cause import STDERR_TAIL_LINES, ExceptionText, WorkerEnd
from elastic_run.core.failure.stacks import FAILED, rank_suspicion
from elastic_run.core.job.node_status import HANG
from elastic_run.records import replace
from elastic_run.report import stack_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from elastic_run.agent.driver import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.cluster.devices import GpuUse
    from elastic_run.core.agent.messages import Event
    from elastic_run.core.failure.hang import JobStillness, Look, Stillness
    from elastic_run.core.failure.job_result import RecorderFinding
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


class HangDetection:
    """The detection in one round; a timeout of 0 is `auto`, `quiet_for` the seconds for which a round was quiet."""

    def __init__(
        self,
        context: AgentParts,
        current: Round,
        *,
        timeout: float,
        quiet_for: float = 0.0,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._loop = context.loop
        self._round = current
        self._quiet_for, self._began_at = quiet_for, self._loop.now()
        self._signs = SignReader(current, context.heartbeats)
        self._job = context.job if context.job is not None and context.job.nodes > 1 else None
        #: Whether too many nodes are in the round for all of them to ask all others.
        self._is_large = self._job is not None and self._job.nodes > FEW_NODES
        self._on_hang = on_hang
        self._watch = hang.HangWatch(timeout)
        self._is_closed = False
        self._has_said_without = False
        #: The samples of the look that goes on, when it began, and whether a tick was due meanwhile.
        self._samples: dict[int, ProcessSample] | None = None
        self._looks_at = 0.0
        self._is_tick_due = False
        self._dumps: Mapping[int, Dump] = {}
        #: The next question to the other nodes, and when this node was asked, or has asked, last.
        self._ask_at = 0.0
        self._asked_at = -inf
        self._has_lowest_rank = self._job is None
        self._timers: dict[str, Timer] = {}
        self._tick()

    def close(self) -> None:
        """Watch no more."""
        self._is_closed = True
        self._signs.close()
        for timer in self._timers.values():
            timer.cancel()

    def answer(self) -> dict[str, Any]:
        """Return the stillness of this node's ranks at the last look, for the node that asks."""
        self._asked_at = self._loop.now()
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        timeout = self._watch.timeout if self._watch.signs or self._is_closed else hang.NOT_YET
        age = 0.0 if self._watch.looked_at is None else self._loop.now() - self._watch.looked_at
        workers = []
        if not self._is_closed:
            names, pids = self._round.global_ranks, self._round.workers.pids
            workers = [
                hang.describe_rank(names[rank], still, pid=pids[rank], local_rank=rank)
                for rank, still in self._measure().items()
            ]
        return {"round": self._round.number, "timeout": timeout, "age": age, "workers": workers}

    def _measure(self) -> dict[int, Stillness]:
        """Return for how long each rank had been still at the last look; its place since then is unknown."""
        at = self._watch.looked_at
        return hang.measure(self._watch, self._loop.now() if at is None else at)

    # --- ticks and looks -------------------------------------------------------------------------------------------
    def _tick(self) -> None:
        now = self._loop.now()
        if self._samples is not None:  # stacks that are written and not yet read would be taken for output
            self._watch = replace(self._watch, ticked_at=now)
            self._is_tick_due = True
            self._timers["tick"] = self._loop.call_later(self._watch.period, self._tick)
            return
        signs = self._signs.read()
        self._watch, wants_look = hang.tick(self._watch, now, signs)
        self._timers["tick"] = self._loop.call_later(hang.count_pause(self._watch, now), self._tick)
        if wants_look and signs:
            self._looks_at, self._samples = now, sample_processes(self._round)
            self._follow(self._samples, MOMENTS)
        elif self._job is not None:
            self._decide()

    def _follow(self, samples: Mapping[int, ProcessSample], moments: int) -> None:
        """Ask when each thread that runs has slept or computes, or after so many moments more."""
        if not moments or not any(sample.is_undecided for sample in samples.values()):
            ask_gpu_use(self._context, self._ask_stacks)
            return
        began_at, pids = self._loop.now(), self._round.workers.pids

        def take_moment() -> None:
            seconds = self._loop.now() - began_at
            self._samples = {rank: follow(sample, pids[rank], seconds) for rank, sample in samples.items()}
            self._follow(self._samples, moments - 1)

        self._timers["moment"] = self._loop.call_later(MOMENT, take_moment)

    def _ask_stacks(self, use: Mapping[int, GpuUse]) -> None:
        if not self._is_closed:
            busy = frozenset(pid for pid, used in use.items() if used.computes)
            requests = self._round.listen_for_stacks()
            requests.ask(
                self._round.alive_pids, _WAIT_LIMIT, lambda dumps: self._ask_recorders(busy, dumps), spares=True
            )

    def _ask_recorders(self, busy: frozenset[int], dumps: Mapping[int, Dump]) -> None:
        # Not before: the recorder's thread must not run while its stack is read.
        if self._context.flight_recorder is None:
            self._conclude(busy, dumps, {})
        else:
            self._context.flight_recorder.count(self._loop, lambda answers: self._conclude(busy, dumps, answers))

    def _conclude(self, busy: frozenset[int], dumps: Mapping[int, Dump], answers: Mapping[int, str]) -> None:
        samples, self._samples = self._samples or {}, None
        if self._is_closed:
            return
        self._dumps = dumps
        pids, alive = self._round.workers.pids, samples.keys() & dumps.keys() & self._round.workers.alive
        looks = {
            rank: make_look(dumps[rank], samples[rank], answers.get(rank, ""), is_gpu_busy=pids[rank] in busy)
            for rank in alive
        }
        looks = {rank: self._add_failure(look, rank) for rank, look in looks.items()}
        self._watch = hang.look(self._watch, self._looks_at, looks)
        self._decide()
        if self._is_tick_due and not self._is_closed:
            self._is_tick_due = False
            self._timers["tick"].cancel()
            self._tick()

    def _add_failure(self, look: Look, rank: int) -> Look:
        """Return a look with the exception that has ended a local rank's main thread, or that is its last output."""
        told = self._round.uncaught.get(rank)
        if told is not None:
            return replace(look, place=place_failed(told, self._dumps[rank]))
        written = None if look.waits else self._round.find_last_words(rank)
        return look if written is None else replace(look, place=place_last_words(look.place, written))

    # --- the decision, of all nodes --------------------------------------------------------------------------------
    def _decide(self) -> None:
        """Tell of a hang if no rank here has made progress for the timeout, and none on the other nodes."""
        now = self._loop.now()
        over_for = hang.count_seconds(self._measure()) - self._watch.timeout
        if over_for < 0 or self._watch.told is not None or now < self._ask_at:
            return
        if self._job is None:
            self._tell(hang.join_nodes([self._describe_own()], expected=1, round_number=self._round.number))
            return
        wait = 0.0
        if self._is_large and not self._has_lowest_rank:
            rank = self._context.group.group_rank or 0
            wait = hang.count_wait(rank, over_for=over_for, unasked_for=now - self._asked_at)
        if wait > 0:
            self._ask_later(wait)
        else:
            self._asked_at = now
            self._ask_at = now + _LONGEST_QUESTION
            self._job.gather_status(HANG, _NODE_WAIT, self._decide_job)

    def _ask_later(self, seconds: float) -> None:
        self._ask_at = self._loop.now() + seconds
        self._timers["question"] = self._loop.call_at(self._ask_at, self._decide)

    def _describe_own(self) -> dict[str, Any]:
        return {"host": os.uname().nodename, "pid": os.getpid(), **self._describe()}

    def _decide_job(self, documents: Sequence[dict[str, Any]]) -> None:
        """Decide on all nodes' ranks; the nodes' answers came as of their last looks, this node's is made anew."""
        if self._is_closed or self._watch.told is not None or self._job is None:
            return
        own = self._describe_own()
        key = own["host"], own["pid"]
        others = [node for node in documents if self._job.is_member(node) and (node["host"], node["pid"]) != key]
        found = hang.join_nodes([own, *others], expected=self._job.nodes, round_number=self._round.number)
        if found.without and not self._has_said_without and not self._quiet_for:
            self._has_said_without = True
            names = ", ".join(found.without[:_MOST_NAMES])
            self._context.say(f"hangs are not detected: {names} has no --hang-timeout")
        self._has_lowest_rank = min(found.ranks, default=-1) in self._round.global_ranks.values()
        is_hang = found.seconds >= found.timeout > 0
        if is_hang and (self._has_lowest_rank or not self._is_large):
            self._tell(found)
        elif not is_hang:
            # A node whose last look is overdue is asked more and more rarely.
            pause = max(found.left + _LOOK_TIME, -found.left, _PAUSE)
            self._ask_later(min(pause, _LONGEST_PAUSE))

    # --- the reaction ----------------------------------------------------------------------------------------------
    def _tell(self, found: JobStillness) -> None:
        """Tell the user of the hang, write the stacks, and let the flight recorders write their dumps."""
        self._watch = hang.tell(self._watch)
        self._on_hang()
        workers, names = self._context.group.workers, self._round.global_ranks
        ended = tuple(rank for rank in range(workers[0].world_size) if rank not in found.ranks)
        # The time before this detection counts if no rank has moved since.
        is_unmoved = self._loop.now() - self._began_at - found.seconds < _FIRST_LOOK
        before = self._quiet_for if is_unmoved else 0.0
        ranks = {rank: replace(still, same=still.same + before) for rank, still in found.ranks.items()}
        found = replace(found, ranks=ranks)
        self._context.events.hang_found(found.seconds, ranks, ended, self._context.options.agent_config.hang_action)
        for line in stack_lines.hang_verdict(ranks, ended):
            self._context.say(line)
        path = self._round.write_stacks({names[rank]: dump for rank, dump in self._dumps.items()})
        recorder, is_whole_job = self._context.flight_recorder, workers[0].world_size == len(workers)
        if recorder is None:
            self._act(found, ended, path, None)
            return

        def explain() -> None:
            finding = None
            try:
                finding = recorder.explain(is_whole_job=is_whole_job)
            except OSError:
                pass
            finally:  # whatever the analysis does: the user has asked for the action
                self._loop.call_soon_threadsafe(lambda: self._act(found, ended, path, finding))

        # In a thread: dumps of many ranks take longer than the loop may be blocked.
        thread = threading.Thread(target=explain, name="read dumps", daemon=True)
        recorder.collect(self._loop, thread.start)

    def _act(self, found: JobStillness, ended: tuple[int, ...], path: str, finding: RecorderFinding | None) -> None:
        """Tell of the finding, and perform --hang-action."""
        current, say = self._round, self._context.say
        if not self._context.is_running(current.number):  # it has ended while the dumps were awaited
            return
        settings = self._context.options.agent_config
        action = settings.hang_action if settings.hang_timeout is not None else stack_lines.NOT_ASKED
        if finding is not None and finding.text:
            say(stack_lines.hang_recorder(finding.text))
        rank = stack_lines.find_odd_rank(found.ranks, () if finding is None else finding.ranks)
        has_failed = rank_suspicion(found.ranks[rank].place) == FAILED
        say(stack_lines.hang_closing(path, action, failed=rank if has_failed else None))
        if action in ("report", stack_lines.NOT_ASKED):
            return
        if has_failed:  # the node of this rank has found the same
            for local_rank in [each for each in current.uncaught if current.global_ranks[each] == rank]:
                current.fail_alive(local_rank)
        elif self._has_lowest_rank:
            event: Event = messages.WorkersHung(current.number)
            if action == "fail":
                event = messages.RoundFailed(current.number, verdict="hung", detail="--hang-action=fail ends the job")
            detail = stack_lines.hang_detail(found.ranks, ended, finding)
            self._context.history.blamed = self._make_end(rank, found.owners[rank], detail)
            self._context.feed(event)

    def _make_end(self, rank: int, owner: hang.Owner, detail: str) -> WorkerEnd:
        """Make the end of the rank that the others wait for; it replaces the real one."""
        current = self._round
        is_own = rank in current.global_ranks.values()
        said = current.output.tail(owner.local_rank, is_thorough=False) if is_own else b""
        return WorkerEnd(
            rank=rank,
            local_rank=owner.local_rank,
            role=self._context.group.spec.role,
            host=owner.host,
            pid=owner.pid,
            exitcode=contract.EXIT_HUNG,
            ended_at=time.time(),
            uptime=current.uptime,
            restart_count=current.restart_count,
            exception=ExceptionText(contract.HANG, detail),
            stderr_tail=tuple(said.decode(errors="replace").splitlines()[-STDERR_TAIL_LINES:]),
        )
