"""Which node coordinates, as one node sees it: the coordinator's heartbeats, claims, and terms that end."""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.core.node.messages import (
    Coordinate,
    CoordinatorHeartbeatRead,
    CreateEntry,
    EndTerm,
    ReadHead,
    StopCoordinating,
    TermEnded,
    UseStore,
)
from elastic_run.core.node.reports import FactWriter
from elastic_run.core.node.state import BEGINNING, LEAVING, LOST, OVER
from elastic_run.core.protocol import liveness
from elastic_run.core.protocol.messages import Claim, Failover, Resign
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.protocol.messages import LogStart


class CoordinationUpdate(FactWriter):
    """The coordinator as a member sees it, while one event is entered."""

    def claim(self) -> None:
        """Claim to coordinate, if the job has no coordinator."""
        member = self.member
        is_able = member.state not in (BEGINNING, LEAVING, OVER) and self._now >= member.coordination.claims_from
        if (
            not is_able
            or not member.coordination.is_vacant
            or member.log.next_slot in (None, member.coordination.claimed)
        ):
            return
        self._set_coordination(claimed=member.log.next_slot)
        term = max(member.log.term, member.log.min_term) + 1
        self.commands.append(CreateEntry(member.log.next_slot, Claim(term, member.node)))

    def enter_coordinator_heartbeat(self, event: CoordinatorHeartbeatRead) -> None:
        """The coordinator's heartbeat was read."""
        if event.node != self.member.watched:
            return
        leases, silent = liveness.observe(self.member.coordination.leases, {event.node: event.value}, self._now)
        self._set_coordination(leases=leases)
        if silent:
            self._set_coordination(is_vacant=True)
        elif self.member.log.trusted_slot == self.member.log.next_slot:
            # The entry that `head` names has not come yet: it may be an old `head` that names a slot which is gone.
            self.commands.append(ReadHead())

    def enter_term_ended(self, event: TermEnded) -> None:
        """This node's term has ended."""
        if self.member.coordination.is_coordinator and self.member.log.term <= event.term:
            self._look_for_head()
            self.commands.append(ReadHead())
            self._announce()

    def _learn_coordinator(self, claim: Claim, slot: int) -> None:
        silent = self.member.coordination.coordinator if self.member.coordination.is_vacant else ""
        last_heartbeat = self.member.coordination.leases.heartbeats.get(silent)
        # Its own claim of a log that it has left and reads again is over: it may have written slots since.
        is_former = claim.node == self.member.node and claim.term <= self.member.log.min_term
        self._change_coordinator("" if is_former else claim.node)
        if self.member.facts.is_due:
            self._announce()
        if claim.node != self.member.node or is_former or self.member.coordination.is_coordinator:
            return
        self._set_coordination(is_coordinator=True)
        member = self.member
        self.commands.append(
            Coordinate(
                member.log.term,
                slot,
                member.log.state_slot,
                member.log.state_term,
                known_round=max(member.job.highest_round, member.job.known_round),
                newest_round=self._newest_round,
                known_restarts=member.job.known_restarts,
                silent=silent,
                last_heartbeat=last_heartbeat,
            )
        )
        if member.state == LEAVING:
            self.commands.append(EndTerm())

    @property
    def _newest_round(self) -> int:
        """The newest round of this log's job that this node runs, has run last, or keeps a copy of."""
        place, copy = self._last_place, self.member.job.copy
        known = [(place.incarnation, place.round)] if place is not None else []
        known += [(copy.incarnation, copy.round)] if copy is not None else []
        return max((number for incarnation, number in known if incarnation == self.member.job.incarnation), default=0)

    def _change_coordinator(self, node: str) -> None:
        if self.member.coordination.is_coordinator and node != self.member.node:
            self._set_coordination(is_coordinator=False)
            self.commands.append(StopCoordinating())
        watched = (node,) if node else ()
        leases = replace(self.member.coordination.leases, heartbeats=MappingProxyType({}))
        self._set_coordination(coordinator=node, is_vacant=not node, leases=liveness.watch(leases, watched, self._now))

    def _begin_anew(self, start: LogStart) -> None:
        """Go on where the log begins, in its term, without the job's state: nobody coordinates there.

        The next coordinator asks all nodes where they stand.
        """
        log = self.member.log
        self._set_log(
            next_slot=start.slot,
            trusted_slot=-1,
            last_entry=LOST,
            term=start.term,
            min_term=max(log.min_term, log.term),
            restart=start.slot if start.is_restart else log.restart,
            state_slot=start.slot - 1,
            state_term=0,
        )
        self._change_coordinator("")

    def _look_for_head(self) -> None:
        """Wait a lease for a living coordinator to write `head`, before this node claims to coordinate."""
        claims_from = max(self.member.coordination.claims_from, self._now + self.member.config.lease)
        self._set_log(needs_head=True)
        self._set_coordination(claims_from=claims_from)
        self._change_coordinator("")

    def _learn_term_end(self, decision: Resign | Failover) -> None:
        self._change_coordinator("")
        if isinstance(decision, Failover):
            # This log is over; `StoreChanged` says from when on the other may be claimed.
            self._set_coordination(claims_from=math.inf)
            self.commands.append(UseStore(decision.endpoint, decision.detail))
