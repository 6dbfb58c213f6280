"""What happens to the node's store: connections that break, heartbeats that are answered, another store."""

from __future__ import annotations

from elastic_run.core.node.messages import (
    Append,
    FetchAssignment,
    HeartbeatWritten,
    Interrupted,
    PrepareRejoin,
    ReadHead,
    Reconnected,
    RejoinPrepared,
    StateKept,
    StoreChanged,
    StoreRestored,
)
from elastic_run.core.node.rounds import RoundUpdate
from elastic_run.core.node.state import BEGINNING, READY, WAITING, LogPosition
from elastic_run.core.protocol import liveness
from elastic_run.core.protocol.messages import Leave
from elastic_run.records import replace


class StoreUpdate(RoundUpdate):
    """A member's store, while one event is entered."""

    def enter_reconnected(self, _: Reconnected) -> None:
        """The connection is a new one."""
        self._set_coordination(claimed=-1, leases=liveness.interrupted(self.member.coordination.leases, self._now))
        self.commands += [Append(fact) for fact in self.member.facts.outstanding]
        self.commands.append(ReadHead())
        if self.member.round.fetching is not None:
            self.commands.append(FetchAssignment(*self.member.round.fetching))

    def enter_interrupted(self, _: Interrupted) -> None:
        """The store could not be reached for a while."""
        self._set_coordination(leases=liveness.interrupted(self.member.coordination.leases, self._now))

    def enter_heartbeat_written(self, event: HeartbeatWritten) -> None:
        """The store has taken a heartbeat."""
        gap = self._now - self.member.beaten_at
        self._set(beaten_at=self._now)
        if self.member.log.next_slot is None or self.member.log.needs_head:
            self.commands.append(ReadHead())
        is_late = event.is_unknown or gap > self.member.config.lease / 2
        if (event.was_dropped or is_late) and self.member.state != BEGINNING:
            # Others may have taken this node for lost. A machine that was suspended sees no gap on its own clock.
            self.commands.append(ReadHead())
            if event.was_dropped and self.member.round.fetching is None:
                self._rejoin()
            else:
                self._announce()

    def enter_store_changed(self, event: StoreChanged) -> None:
        """The node speaks to another store."""
        member = self.member
        self._forget_log()
        self._set_coordination(claimed=-1, claims_from=self._now)
        self._set_job(
            has_view=False,
            copy=None,
            has_confirmed_elsewhere=member.job.prepared is not None,
            known_round=self._round,
            highest_round=max(member.job.highest_round, member.job.known_round),
        )
        self._set_facts(
            is_preparing=True, outstanding=tuple(fact for fact in member.facts.outstanding if isinstance(fact, Leave))
        )
        self._set(node_info=replace(member.node_info, serves_store=event.serves_store))
        self._change_coordinator("")
        self.commands += [Append(fact) for fact in self.member.facts.outstanding]
        self.commands.append(ReadHead())
        self.commands.append(PrepareRejoin())

    def enter_store_restored(self, event: StoreRestored) -> None:
        """The store has gone back: every node says again where it stands, and the log goes on from there."""
        if not self.member.log.last_entry:
            self._forget_log()
        elif event.start is not None:
            self._begin_anew(event.start)
            self._set_round(fetching=None)  # the round was formed in a slot that is lost
        self.enter_reconnected(Reconnected())
        if self.member.state == BEGINNING:
            return
        self._look_for_head()
        if self.member.round.fetching is None:
            self._rejoin()
        else:
            self._announce()

    def _forget_log(self) -> None:
        """Begin with the log as a node does that starts, but claim no term a second time."""
        log = self.member.log
        self._set(log=LogPosition(min_term=max(log.min_term, log.term)))
        self._set_round(fetching=None)

    def enter_rejoin_prepared(self, event: RejoinPrepared) -> None:
        """The node can say where it stands."""
        self._set_job(copy=event.copy)
        self._set_facts(is_preparing=False)
        if event.store_address is not None and self.member.state in (BEGINNING, WAITING, READY):
            gone = self.member.round.gone
            self._set(store_address=event.store_address)
            self._set_round(gone=None if gone is None else replace(gone, store_address=event.store_address))
        self._announce()

    def enter_state_kept(self, event: StateKept) -> None:
        """Say that this node has read a `Prepare`, whatever store it says the next word in."""
        prepared = event.prepared
        if prepared.incarnation == self.member.job.incarnation and prepared.round >= self.member.job.known_round:
            self._set_job(prepared=prepared, has_confirmed_elsewhere=False)
            self._announce()
