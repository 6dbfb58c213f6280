"""Changes of the nodes into the job's state: which nodes are there, and what became of the round on each. Pure.

It decides nothing. A batch of changes is taken in at once, so that a thousand nodes that join don't copy the state a
thousand times.
"""

from __future__ import annotations

from types import MappingProxyType

from elastic_run.core.config import describe_difference
from elastic_run.core.failure.root_cause import LOST_RANK
from elastic_run.core.job import restart_policy as outcomes
from elastic_run.core.job.documents import IDLE, MOST_ERRORS, MOST_STUCK
from elastic_run.core.job.exclusion import find_exclusion
from elastic_run.core.job.round_ending import name_host, read_report
from elastic_run.core.job.state import (
    ACTIVE,
    BROKEN,
    REFUSED,
    REMEMBERED_GONE,
    RUNNING,
    SILENT,
    Closed,
    Gone,
    Job,
    Node,
    Refusal,
    Seat,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.documents import NodeState, RoleScript, Round, RoundEnd
    from elastic_run.core.job.state import Root

_CLAUSES = {
    outcomes.BY_SIGNAL: "was told to stop",
    outcomes.DIED: "its agent died",
    outcomes.UNKILLABLE: "has a process that can't be killed",
    outcomes.UNHEALTHY: "unhealthy",
}
#: Roles whose scripts are remembered.
_REMEMBERED_SCRIPTS = 64


class NodeChanges:
    """A job's state while a batch of changes of its nodes is taken in, at a moment."""

    def __init__(self, job: Job, now: float) -> None:
        self._job = job
        self._now = now
        self._nodes = dict(job.nodes)
        self._gone = dict(job.gone)
        self._seats = list(job.seats)
        self._order = job.order

    def close(self) -> Job:
        """Return the state after."""
        strangers = [name for name, gone in self._gone.items() if gone.was is None or not gone.was.is_member]
        for name in strangers[: max(0, len(strangers) - REMEMBERED_GONE)]:
            del self._gone[name]
        if not self._nodes and self._job.round is None:
            # The next node begins anew, with a configuration that may be better.
            self._set(config=None, scripts=())
            for name, gone in self._gone.items():
                if gone.reason == REFUSED:
                    self._gone[name] = replace(gone, is_told=True)
        return replace(
            self._job,
            order=self._order,
            nodes=MappingProxyType(self._nodes),
            gone=MappingProxyType(self._gone),
            seats=tuple(self._seats),
        )

    def adopt_round(self, started: Round) -> None:
        """Go on from a round that has started under another coordinator: its members have yet to come."""
        self._seats = [Seat() for _ in range(started.size)]
        self._nodes = {
            name: replace(node, rank=None, is_member=False, failing=None, outcome="", is_suspecting=False)
            for name, node in self._nodes.items()
        }
        self._gone = {name: forget_place(gone) for name, gone in self._gone.items()}
        self._set(
            phase=RUNNING,
            round=started,
            proposed=None,
            restart_count=max(self._job.restart_count, started.restart_count),
            since=self._now,
            short_since=None,
            min_reached_at=None,
            until=None,
            root=None,
            hidden=None,
            ending=None,
            halt=None,
        )

    # --- nodes that are there ----------------------------------------------------------------------------------------
    def read_state(self, state: NodeState) -> None:
        """Take in what a node is now."""
        if state.leaving:
            clause = _CLAUSES.get(state.leaving, state.leaving)
            detail = f"{clause}: {state.leaving_detail}" if state.leaving_detail else clause
            last = self._job.round
            if state.node not in self._nodes and last is not None and state.has_seat(last):
                self._nodes[state.node] = self._welcome(state)  # of a round of another coordinator: its seat is lost
            self._read_round(state)
            self._drop(state.node, state.leaving, detail)
            return
        if self._job.config is None:
            self._set(config=state.config, since=self._now)
        config = self._job.config or state.config
        misfit = describe_misfit(state, config, self._job.scripts)
        if misfit:
            self.refuse(state.node, misfit, describe_misfit(state, config, self._job.scripts, here="there"))
            return
        self._settle_script(state.node_info.role_script)
        if state.known_round > self._job.highest_round:
            self._set(highest_round=state.known_round)  # no round gets a number again of which a node has heard
        node = self._nodes.get(state.node) or self._welcome(state)
        exclusion = find_exclusion(self._job, config, node, self._now)
        if exclusion is not None and not node.is_excluded:
            self._set(refusals=(*self._job.refusals, Refusal(state.node, exclusion.reason, outcomes.EXCLUDED)))
        self._nodes[state.node] = replace(
            node,
            node_info=replace(state.node_info, script_file=None),  # it is kept once for its role
            store_address=state.store_address,
            has_other_config=state.config != config,
            is_away=False,
            is_excluded=node.is_excluded or exclusion is not None,
        )
        self._read_round(state)

    def refuse(self, name: str, detail: str, told: str) -> None:
        """Refuse a node: its user reads `detail`, those of the nodes that wait read what they are `told`."""
        if name not in self._gone or self._gone[name].reason != REFUSED:
            self._drop(name, REFUSED, told)
        self._forget_refusal(name)
        self._set(refusals=(*self._job.refusals, Refusal(name, detail)))

    def _welcome(self, state: NodeState) -> Node:
        """Return a node that is new, or that was silent for a while."""
        gone = self._gone.pop(state.node, None)
        if gone is not None and gone.was is not None:
            return replace(gone.was, is_member=False, arrived_at=self._now, failing=None, outcome="")
        # A node of a refused node's host has probably come in its place. Several nodes may have one host name, and the
        # others are still missing, so only the first one counts as replaced.
        refused = (one for one in self._gone.values() if one.reason == REFUSED and not one.is_told)
        replaced = next((one for one in refused if name_host(one) == state.node_info.host), None)
        if replaced is not None:
            self._gone[replaced.node] = replace(replaced, is_told=True)
        return Node(state.node, state.node_info, state.store_address, self._next_order(), arrived_at=self._now)

    def _settle_script(self, own: RoleScript) -> None:
        """Remember a role's script, instead of a former one that is another."""
        scripts = self._job.scripts
        known = _find_script(scripts, own.role)
        if own.script and (known is None or not _are_equal(known, own)):
            others = (other for other in scripts if other.role != own.role)
            self._set(scripts=(*others, own)[-_REMEMBERED_SCRIPTS:])

    # --- the round ---------------------------------------------------------------------------------------------------
    def _read_round(self, state: NodeState) -> None:
        """Take in what became of the round on a node."""
        node = self._nodes.get(state.node)
        if node is None:
            return
        last = self._job.round
        # A node that has accepted a newer proposal never starts this round.
        accepted = next((one for one in state.accepted[-1:] if one.round == last), None)
        has_started = last is not None and state.started == last
        if accepted is not None or has_started:
            node = self._take_seat(node, state.rank if accepted is None else accepted.rank)
        is_busy = state.phase != IDLE and not node.is_member
        if is_busy != node.is_busy:
            node = replace(node, is_busy=is_busy)
        # What a member that has yet to read its `start` says of its workers is of a round before.
        if has_started and node.is_member and not node.outcome:
            if state.is_failing:
                is_suspecting = state.is_secondary and (node.failing is None or node.is_suspecting)
                failing = self._next_order() if node.failing is None else node.failing
                node = replace(node, failing=failing, is_suspecting=is_suspecting)
            if state.ended is not None:
                node = self._read_end(node, state.ended)
        self._nodes[state.node] = node

    def _take_seat(self, node: Node, rank: int) -> Node:
        """Return a node in its seat of the last round: a seat has one holder for ever."""
        if not 0 <= rank < len(self._seats) or self._seats[rank].node not in ("", node.node):
            return replace(node, rank=None, is_member=False)
        seat = self._seats[rank]
        if seat.is_awaited or not seat.node:
            self._seats[rank] = replace(seat, node=node.node, is_awaited=False)
        is_member = self._job.phase in ACTIVE
        has_it = (node.rank, node.is_member) == (rank, is_member)
        return node if has_it else replace(node, rank=rank, is_member=is_member)

    def _read_end(self, node: Node, end: RoundEnd) -> Node:
        report = end.report or {}
        is_certain = node.failing is not None and not node.is_suspecting
        is_suspecting = end.outcome == outcomes.FAILED and not is_certain and report.get("severity") == LOST_RANK
        ends = end.ends
        if ends is not None:
            ends = replace(ends, stuck=ends.stuck[:MOST_STUCK], errors=ends.errors[:MOST_ERRORS])
        is_hidden = end.outcome == outcomes.STOPPED and end.report is not None
        if end.outcome in (outcomes.FAILED, outcomes.UNREACHABLE, outcomes.CANNOT_START) or is_hidden:
            root = read_report(node.node, end, node.failing if node.failing is not None else self._next_order())
            self._keep_likeliest(root, end, is_hidden=is_hidden)
        return replace(node, outcome=end.outcome, is_suspecting=is_suspecting, ends=ends)

    def _keep_likeliest(self, root: Root, end: RoundEnd, *, is_hidden: bool) -> None:
        if is_hidden:
            self._set(hidden=self._job.hidden or root)
        elif end.outcome == outcomes.CANNOT_START and self._job.ending is None:
            self._set(ending=root)
        elif self._job.root is None or (root.severity, root.order) < (self._job.root.severity, self._job.root.order):
            self._set(root=root)

    # --- nodes that go -----------------------------------------------------------------------------------------------
    def read_closed(self, closed: Closed) -> None:
        """Take in how a node's connection has ended; if it has broken, the node may come back within the lease."""
        self._forget_refusal(closed.node)
        if closed.how == BROKEN:
            if closed.node in self._nodes:
                self._nodes[closed.node] = replace(self._nodes[closed.node], is_away=True)
        elif closed.how == SILENT:
            self._drop(closed.node, SILENT, closed.detail)
        else:
            detail = f"{_CLAUSES[outcomes.DIED]}: {closed.detail}" if closed.detail else _CLAUSES[outcomes.DIED]
            self._drop(closed.node, outcomes.DIED, detail)

    def _drop(self, name: str, reason: str, detail: str) -> None:
        """Drop a node: it left, died, is silent or is refused."""
        node = self._nodes.pop(name, None)
        before = self._gone.pop(name, None)
        was = node if node is not None or before is None else before.was
        if node is None and before is not None:
            reason, detail = before.reason, before.detail  # why it is not in the job; that it has ended adds nothing
        self._gone[name] = Gone(name, reason, detail, was)
        if was is not None and was.rank is not None:
            is_lost = was.is_member and was.outcome != outcomes.DONE
            seat = self._seats[was.rank]
            self._seats[was.rank] = replace(seat, is_awaited=False, is_lost=seat.is_lost or is_lost)

    def give_up(self, started: Round) -> None:
        """Count the coordinator of a round as lost: it is surely dead."""
        rank = started.coordinator_rank
        if rank >= 0 and self._seats[rank].is_awaited:
            self._seats[rank] = Seat(started.coordinator, is_awaited=False, is_lost=True)

    # --- the state ---------------------------------------------------------------------------------------------------
    def _forget_refusal(self, name: str) -> None:
        if self._job.refusals:
            self._set(refusals=tuple(one for one in self._job.refusals if one.node != name))

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _set(self, **changes: object) -> None:
        self._job = replace(self._job, **changes)  # type: ignore[arg-type] # names are checked by tests


def forget_place(gone: Gone) -> Gone:
    """Return a node that is gone without its place in the last round: another round is there now."""
    was = gone.was and replace(gone.was, is_member=False, rank=None)
    return replace(gone, was=was, is_told=True)


# --- nodes of another job --------------------------------------------------------------------------------------------
def describe_misfit(state: NodeState, config: JobConfig, scripts: tuple[RoleScript, ...], *, here: str = "here") -> str:
    """Return the reason why a node is not of this job; "" if it may be. See `describe_difference` for `here`."""
    difference = describe_difference(config, state.config, here=here)
    own = state.node_info.role_script
    known = _find_script(scripts, own.role)
    if difference or not own.script or known is None or _are_equal(known, own):
        return difference
    script, other = own.script, known.script
    if script == other and own.file is not None and known.file is not None:
        script, other = own.file.path, known.file.path
    return (
        f"the script of role {own.role!r} is {script!r} {here} and {other!r} in the job: nodes of one role run the "
        "same script, and each job needs an --rdzv-id of its own"
    )


def _are_equal(one: RoleScript, other: RoleScript) -> bool:
    if one.script != other.script or one.file is None or other.file is None:
        return one.script == other.script
    return one.file.path == other.file.path or one.file.digest == other.file.digest


def _find_script(scripts: tuple[RoleScript, ...], role: str) -> RoleScript | None:
    return next((known for known in scripts if known.role == role), None)
