"""Tells the user that the job hangs, and performs --hang-action.

The places of the ranks are told at once. The finding of the flight recorder follows when its dumps are written, seconds
later; the loop goes on in between. Then the workers are stopped if the user wants that. If a rank has failed and does
not end, there is no hang: the node of this rank lets it count as failed, and the user's policy for failures follows.
"""

from __future__ import annotations

import threading
import time

from elastic_run import contract
from elastic_run.core.agent import messages
from elastic_run.core.diagnosis.stacks import FAILED, rank_suspicion
from elastic_run.core.failure.root_cause import STDERR_TAIL_LINES, ExceptionText, WorkerEnd
from elastic_run.report import stack_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elastic_run.agent.driver.context import AgentContext
    from elastic_run.agent.driver.hang_detection import Hang
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.messages import Event
    from elastic_run.core.diagnosis.stacks import Dump
    from elastic_run.core.failure.diagnose import RecorderFinding
    from elastic_run.loop import Loop

__all__ = ["HangReaction"]


class HangReaction:
    """The reaction to one hang.

    Args:
        context: The workers and the user's settings.
        loop: The agent's loop.
        say: Tells the user a line.
        write: Writes stacks into a file, and returns its path or "".
        stop: Stops the round if it still runs: takes an end for the worker that the others wait for, which replaces
            the real one, and the event that stops the round.
        fail: Lets a worker count as failed that has failed and does not end; takes its local rank.
        is_running: Whether a round still runs: it may end while the dumps are awaited.
    """

    def __init__(
        self,
        context: AgentContext,
        loop: Loop,
        *,
        say: Callable[[str], None],
        write: Callable[[Mapping[int, Dump]], str],
        stop: Callable[[WorkerEnd, Event], None],
        fail: Callable[[Round, int], None],
        is_running: Callable[[Round], bool],
    ) -> None:
        self._context = context
        self._loop = loop
        self._say = say
        self._write = write
        self._stop = stop
        self._fail = fail
        self._is_running = is_running

    def react(self, current: Round, found: Hang) -> None:
        """Tell the user of a hang, and begin the action."""
        for line in stack_lines.hang_verdict(found.ranks, found.ended):
            self._say(line)
        path = self._write(found.dumps)
        recorder = self._context.flight_recorder
        if recorder is None:
            self._conclude(current, found, path, None)
            return
        recorder.collect(self._loop, lambda: self._explain(current, found, path))

    def _explain(self, current: Round, found: Hang, path: str) -> None:
        """Read the dumps in a thread: dumps of many ranks take longer than the loop may be blocked."""
        recorder, group = self._context.flight_recorder, self._context.group
        is_whole_job = group.workers[0].world_size == len(group.workers)

        def explain() -> None:
            finding = None
            try:
                finding = recorder.explain(is_whole_job=is_whole_job) if recorder is not None else None
            except OSError:
                pass
            finally:  # whatever the analysis does: the user has asked for the action
                self._loop.call_soon_threadsafe(lambda: self._conclude(current, found, path, finding))

        threading.Thread(target=explain, name="read dumps", daemon=True).start()

    def _conclude(self, current: Round, found: Hang, path: str, finding: RecorderFinding | None) -> None:
        if not self._is_running(current):
            return
        settings = self._context.options.agent_config
        action = settings.hang_action if settings.hang_timeout is not None else stack_lines.NOT_ASKED
        if finding is not None and finding.text:
            self._say(stack_lines.hang_recorder(finding.text))
        accused = () if finding is None else finding.ranks
        rank = stack_lines.find_odd_rank(found.ranks, accused)
        has_failed = rank_suspicion(found.ranks[rank].place) == FAILED
        self._say(stack_lines.hang_closing(path, action, failed=rank if has_failed else None))
        if action in ("report", stack_lines.NOT_ASKED):
            return
        if has_failed:  # the node of this rank has found the same
            for local_rank in current.uncaught:
                if current.global_ranks[local_rank] == rank:
                    self._fail(current, local_rank)
            return
        if not found.is_decided_here:
            return
        detail = stack_lines.hang_detail(found.ranks, found.ended, finding)
        event: Event = messages.WorkersHung(current.number)
        if action == "fail":
            event = messages.RoundFailed(current.number, verdict="hung", detail="--hang-action=fail ends the job")
        self._stop(self._make_end(current, found, rank, detail), event)

    def _make_end(self, current: Round, found: Hang, rank: int, detail: str) -> WorkerEnd:
        """Make the end of the rank that the others wait for."""
        owner = found.owners[rank]
        is_own = rank in {worker.global_rank for worker in self._context.group.workers}
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
