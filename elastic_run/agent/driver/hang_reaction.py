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
from elastic_run.core.failure.root_cause import STDERR_TAIL_LINES, ExceptionText, WorkerEnd
from elastic_run.core.failure.stacks import FAILED, rank_suspicion
from elastic_run.report import stack_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.agent.driver.hang_detection import Hang
    from elastic_run.agent.driver.parts import AgentParts
    from elastic_run.agent.driver.round import Round
    from elastic_run.core.agent.messages import Event
    from elastic_run.core.failure.diagnose import RecorderFinding

__all__ = ["HangReaction"]


class HangReaction:
    """The reaction to one hang; `fail` lets a local rank count as failed that has failed and does not end."""

    def __init__(self, parts: AgentParts, current: Round, found: Hang, fail: Callable[[int], None]) -> None:
        self._parts = parts
        self._round = current
        self._found = found
        self._fail = fail

    def begin(self, path: str) -> None:
        """Tell the user of the hang, and begin the action; `path` is the file with the stacks, or ""."""
        for line in stack_lines.hang_verdict(self._found.ranks, self._found.ended):
            self._parts.say(line)
        recorder, workers = self._parts.context.flight_recorder, self._parts.context.group.workers
        if recorder is None:
            self._conclude(path, None)
            return
        is_whole_job = workers[0].world_size == len(workers)

        def explain() -> None:
            finding = None
            try:
                finding = recorder.explain(is_whole_job=is_whole_job)
            except OSError:
                pass
            finally:  # whatever the analysis does: the user has asked for the action
                self._parts.loop.call_soon_threadsafe(lambda: self._conclude(path, finding))

        # In a thread: dumps of many ranks take longer than the loop may be blocked.
        thread = threading.Thread(target=explain, name="read dumps", daemon=True)
        recorder.collect(self._parts.loop, thread.start)

    def _conclude(self, path: str, finding: RecorderFinding | None) -> None:
        current, found = self._round, self._found
        if not self._parts.is_running(current.number):  # it has ended while the dumps were awaited
            return
        settings = self._parts.context.options.agent_config
        action = settings.hang_action if settings.hang_timeout is not None else stack_lines.NOT_ASKED
        if finding is not None and finding.text:
            self._parts.say(stack_lines.hang_recorder(finding.text))
        rank = stack_lines.find_odd_rank(found.ranks, () if finding is None else finding.ranks)
        has_failed = rank_suspicion(found.ranks[rank].place) == FAILED
        self._parts.say(stack_lines.hang_closing(path, action, failed=rank if has_failed else None))
        if action in ("report", stack_lines.NOT_ASKED):
            return
        if has_failed:  # the node of this rank has found the same
            for local_rank in [rank_here for rank_here in current.uncaught if current.global_ranks[rank_here] == rank]:
                self._fail(local_rank)
        elif found.is_decided_here:
            event: Event = messages.WorkersHung(current.number)
            if action == "fail":
                event = messages.RoundFailed(current.number, verdict="hung", detail="--hang-action=fail ends the job")
            self._parts.history.blame(self._make_end(rank, stack_lines.hang_detail(found.ranks, found.ended, finding)))
            self._parts.feed(event)

    def _make_end(self, rank: int, detail: str) -> WorkerEnd:
        """Make the end of the rank that the others wait for; it replaces the real one."""
        current, owner, group = self._round, self._found.owners[rank], self._parts.context.group
        is_own = rank in {worker.global_rank for worker in group.workers}
        said = current.output.tail(owner.local_rank, is_thorough=False) if is_own else b""
        return WorkerEnd(
            rank=rank,
            local_rank=owner.local_rank,
            role=group.spec.role,
            host=owner.host,
            pid=owner.pid,
            exitcode=contract.EXIT_HUNG,
            ended_at=time.time(),
            uptime=current.uptime,
            restart_count=current.restart_count,
            exception=ExceptionText(contract.HANG, detail),
            stderr_tail=tuple(said.decode(errors="replace").splitlines()[-STDERR_TAIL_LINES:]),
        )
