"""What a member makes of the log and of the store: rounds, halts, the end, and who coordinates."""

from __future__ import annotations

import math
from types import MappingProxyType

from elastic_run.core.job.config import describe_settled
from elastic_run.core.node.messages import (
    Append,
    AssignmentRead,
    Coordinate,
    CoordinatorHeartbeatRead,
    CreateEntry,
    CutOff,
    Ended,
    EndTerm,
    EntryRead,
    EntryTrimmed,
    FetchAssignment,
    Formed,
    Halted,
    HeadRead,
    HeartbeatWritten,
    Interrupted,
    KeepState,
    PrepareRejoin,
    ReadHead,
    Reconnected,
    Refused,
    RejoinPrepared,
    Settled,
    StateKept,
    StopCoordinating,
    StoreChanged,
    TermEnded,
    Unreadable,
    UseStore,
    Warned,
)
from elastic_run.core.node.reports import FactWriter
from elastic_run.core.node.state import (
    BEGINNING,
    FENCED,
    HALTING,
    JUMP,
    LEAVING,
    OVER,
    READY,
    REPLACED,
    RUNNING,
    WAITING,
)
from elastic_run.core.protocol import liveness
from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.job_keys import HEAD, LOG_START
from elastic_run.core.protocol.log_start import find_start
from elastic_run.core.protocol.messages import (
    LOSS,
    Assignment,
    Claim,
    Copy,
    End,
    Failover,
    Form,
    Halt,
    Head,
    Leave,
    LogStart,
    Prepare,
    Recovered,
    Refuse,
    Resign,
    Resync,
    UnknownProtocolError,
    Warn,
    is_related,
    read_assignment,
    read_decision,
    read_head,
    read_term,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.config import JobConfig


class MemberUpdate(FactWriter):
    """A member while any event is entered."""

    # --- the store ---------------------------------------------------------------------------------------------------
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

    def enter_cut_off(self, event: CutOff) -> None:
        """The workers are not to run on without the job."""
        self._halt(Halted(self._round, FENCED, f"no answer for {event.seconds:.0f} s"))

    def enter_heartbeat_written(self, event: HeartbeatWritten) -> None:
        """The store has taken a heartbeat."""
        gap = self._now - self.member.beaten_at
        self._set(beaten_at=self._now)
        if self.member.state == BEGINNING or self.member.log.needs_head:
            self.commands.append(ReadHead())
        is_late = gap > self.member.config.lease / 2
        if (event.was_dropped or is_late) and self.member.state != BEGINNING:
            # Others may have taken this node for lost. A machine that was suspended sees no gap on its own clock.
            self.commands.append(ReadHead())
            self._announce()

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

    def enter_store_changed(self, event: StoreChanged) -> None:
        """The node speaks to another store."""
        member = self.member
        self._set_log(
            next_slot=None,
            needs_head=False,
            trusted_slot=-1,
            term=0,
            min_term=max(member.log.min_term, member.log.term),
            state_slot=-1,
            state_term=0,
        )
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
        self._set_round(fetching=None)
        self._change_coordinator("")
        self.commands += [Append(fact) for fact in self.member.facts.outstanding]
        self.commands.append(ReadHead())
        self.commands.append(PrepareRejoin())

    def enter_rejoin_prepared(self, event: RejoinPrepared) -> None:
        """The node can say where it stands."""
        self._set_job(copy=event.copy)
        self._set_facts(is_preparing=False)
        if event.offer is not None and self.member.state in (BEGINNING, WAITING, READY):
            gone = self.member.round.gone
            self._set(offer=event.offer)
            self._set_round(gone=None if gone is None else replace(gone, offer=event.offer))
        self._announce()

    def enter_state_kept(self, event: StateKept) -> None:
        """Say that this node has read a `Prepare`, whatever store it says the next word in."""
        prepared = event.prepared
        if prepared.incarnation == self.member.job.incarnation and prepared.round >= self.member.job.known_round:
            self._set_job(prepared=prepared, has_confirmed_elsewhere=False)
            self._announce()

    # --- the log -----------------------------------------------------------------------------------------------------
    def enter_head(self, event: HeadRead) -> None:
        """The head of the log was read."""
        head, start = self._read_head(event.head), self._read_start(event.log_start)
        if head is not None and (start is None or head.slot >= start.slot):
            if self._leads_on(head) or self._is_behind(start):
                self._jump(head)
            self._set_log(needs_head=False)
        elif start is not None:
            if self._is_behind(start):
                self._begin_at(start)
        elif self.member.log.next_slot is None:
            if event.log_start is not None:
                return  # slots were trimmed, nobody knows which: to begin at 0 might found a second job
            self._set_log(next_slot=0)
        if self.member.state == BEGINNING:
            self._set(state=WAITING)
            self._say_join()

    def _read_head(self, data: bytes | None) -> Head | None:
        try:
            return None if data is None else read_head(data)
        except MessageError as error:
            self.commands.append(Unreadable(HEAD, str(error)))
            return None

    def _read_start(self, data: bytes | None) -> LogStart | None:
        start = find_start(data)
        if data is not None and start is None:
            self.commands.append(Unreadable(LOG_START, f"{data[:40]!r} is not where a log begins"))
        return start

    def _is_behind(self, start: LogStart | None) -> bool:
        """Whether the slot that it waits for was trimmed, or it waits for none yet."""
        return start is not None and (self.member.log.next_slot is None or self.member.log.next_slot < start.slot)

    def _leads_on(self, head: Head) -> bool:
        """Whether this node is to go on from the slot that `head` names, and not from the one that it waits for."""
        next_slot = self.member.log.next_slot
        return (
            next_slot is None
            or head.slot - next_slot >= JUMP
            or (self.member.log.needs_head and head.slot >= next_slot)
            or self._is_stuck(head)
        )

    def _begin_at(self, start: LogStart) -> None:
        """Go on from the oldest slot that is kept: no `head` says where the log stands."""
        self._set_log(next_slot=start.slot, trusted_slot=-1, term=start.term, state_slot=-1, state_term=0)
        self._look_for_head()
        self._announce()

    def _look_for_head(self) -> None:
        """Give a coordinator that lives a lease to say where the log stands, before this node claims its office."""
        claims_from = max(self.member.coordination.claims_from, self._now + self.member.config.lease)
        self._set_log(needs_head=True)
        self._set_coordination(claims_from=claims_from)
        self._change_coordinator("")

    def _is_stuck(self, head: Head) -> bool:
        """Whether it waits for a slot that an old `head` named."""
        return self.member.log.trusted_slot == self.member.log.next_slot and head.slot > self.member.log.trusted_slot

    def _jump(self, head: Head) -> None:
        """Go on from the newest slot, and make up for what the slots between said."""
        is_first = self.member.state == BEGINNING
        self._set_log(
            next_slot=head.slot,
            trusted_slot=head.slot,
            term=head.term,
            state_slot=head.state_slot,
            state_term=head.state_term,
        )
        # A node that has left this store, and is back, coordinates here no more.
        is_former = head.coordinator == self.member.node and not self.member.coordination.is_coordinator
        self._change_coordinator("" if is_former else head.coordinator)
        self._learn_job(head.incarnation, head.restart_count, head.round, head.round_id)
        self._forget_prepared(head.round, read_term(head.round_id))
        self._set_job(has_view=head.round > 0 and not self.member.job.has_confirmed_elsewhere)
        if head.prepared is not None:
            self._learn_prepare(head.prepared, head.known)
        if is_first:
            self._set_job(known_round=head.round)
        elif head.round > self.member.job.known_round:
            if not head.is_running:
                self._set_round(halt=Halt(head.term, head.round, LOSS))
            self._learn_round(head.round, head.form_slot, head.form_term)
        else:
            if not head.is_running and head.round == self._round:
                self._learn_halt(Halt(head.term, head.round, LOSS))
            self._announce()

    def enter_trimmed(self, event: EntryTrimmed) -> None:
        """A slot was trimmed."""
        if event.slot == self.member.log.next_slot:
            self.commands.append(ReadHead())

    def enter_term_ended(self, event: TermEnded) -> None:
        """This node's term has ended."""
        if self.member.coordination.is_coordinator and self.member.log.term <= event.term:
            self._look_for_head()
            self.commands.append(ReadHead())
            self._announce()

    def enter_entry(self, event: EntryRead) -> None:
        """A slot of the log was read."""
        if event.slot != self.member.log.next_slot:
            return
        is_trusted = event.slot == self.member.log.trusted_slot
        self._set_log(next_slot=event.slot + 1)
        try:
            decision = read_decision(event.value)
        except UnknownProtocolError as error:
            if self.member.log.term == 0 or is_trusted:
                self._finish(Refused(str(error)))
            return
        except MessageError:
            return
        if isinstance(decision, Claim):
            is_valid = decision.term > self.member.log.term
        elif isinstance(decision, Recovered):
            is_valid = decision.term >= self.member.log.term > 0
        else:
            is_valid = decision.term == self.member.log.term
        if not is_valid and not is_trusted:
            return
        self._set_log(term=decision.term)
        if isinstance(decision, Claim):
            self._learn_coordinator(decision, event.slot)
            return
        self._set_log(state_slot=event.slot, state_term=decision.term)
        # Whoever decides is there, whatever its beats say.
        self._change_coordinator(self.member.coordination.coordinator)
        self._learn(decision, event.slot)

    def _learn(
        self, decision: Resign | Prepare | Form | Warn | Halt | Refuse | Resync | Recovered | Failover | End, slot: int
    ) -> None:
        if isinstance(decision, Form | Recovered):
            self._learn_form(decision, slot)
        elif isinstance(decision, Prepare):
            formed_term = read_term(decision.round_id)
            state = Copy(decision.incarnation, decision.round, decision.term, slot, formed_term, decision.store_id)
            self._learn_prepare(state, decision.known)
        elif isinstance(decision, Warn):
            self._learn_warning(decision)
        elif isinstance(decision, Halt):
            self._learn_halt(decision)
        elif isinstance(decision, Refuse):
            if decision.node == self.member.node:
                self._finish(Refused(decision.detail))
        elif isinstance(decision, Resync):
            self._set_job(has_view=False, copy=None)
            self._set_facts(is_preparing=True)
            self.commands.append(PrepareRejoin())
        elif isinstance(decision, End):
            self._finish(Ended(decision))
        else:
            self._learn_term_end(decision)

    def _learn_prepare(self, state: Copy, known: tuple[Copy, ...]) -> None:
        """Confirm a `Prepare`, unless its log doesn't know the last one that this node confirmed in another store.

        That log may have formed a round on the node's word. The node has said so here, and the coordinator asks anew.
        """
        last = self.member.job.prepared
        if last is None or state.knows(last, known):
            self._set_job(has_view=True)
            self.commands.append(KeepState(state))

    def _forget_prepared(self, number: int, formed_term: int) -> None:
        """Forget the `Prepare` that this node has confirmed last, if a newer round was formed since then."""
        prepared = self.member.job.prepared
        if prepared is None or not prepared.is_prepared_after(number, formed_term):
            self._set_job(prepared=None, has_confirmed_elsewhere=False)

    def _learn_form(self, decision: Form | Recovered, slot: int) -> None:
        if isinstance(decision, Recovered):
            self._set_job(known_round=max(self.member.job.known_round, decision.round))
            self._learn_job(decision.incarnation, decision.restart_count, decision.round, decision.round_id)
            self._forget_prepared(decision.round, read_term(decision.round_id))
        else:
            self._learn_job(decision.incarnation, decision.restart_count)
            self._forget_prepared(decision.round, decision.term)
            if decision.round > self.member.job.known_round:
                self._learn_round(decision.round, slot, decision.term)
        self._set_job(has_view=not self.member.job.has_confirmed_elsewhere, copy=None)

    def _learn_term_end(self, decision: Resign | Failover) -> None:
        self._change_coordinator("")
        if isinstance(decision, Failover):
            # This log is over; `StoreChanged` says from when on the other may be claimed.
            self._set_coordination(claims_from=math.inf)
            self.commands.append(UseStore(decision.endpoint, decision.detail))

    def _finish(self, last: Refused | Ended) -> None:
        self._change_coordinator("")
        self._set(state=OVER)
        self._set_facts(outstanding=())
        self.commands.append(last)

    def _learn_coordinator(self, claim: Claim, slot: int) -> None:
        silent = self.member.coordination.coordinator if self.member.coordination.is_vacant else ""
        last_heartbeat = self.member.coordination.leases.beats.get(silent)
        self._change_coordinator(claim.node)
        if claim.node != self.member.node or self.member.coordination.is_coordinator:
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
        place, copy = self.member.round.place, self.member.job.copy
        known = [(place.incarnation, place.round)] if place is not None else []
        known += [(copy.incarnation, copy.round)] if copy is not None else []
        return max((number for incarnation, number in known if incarnation == self.member.job.incarnation), default=0)

    def _change_coordinator(self, node: str) -> None:
        if self.member.coordination.is_coordinator and node != self.member.node:
            self._set_coordination(is_coordinator=False)
            self.commands.append(StopCoordinating())
        watched = (node,) if node else ()
        leases = replace(self.member.coordination.leases, beats=MappingProxyType({}))
        self._set_coordination(coordinator=node, is_vacant=not node, leases=liveness.watch(leases, watched, self._now))

    def _learn_job(self, incarnation: str, restart_count: int, number: int = 0, round_id: str = "") -> None:
        """Learn whose log this is, and its last round; another round of the same number is nobody's here.

        A round of a higher number is newer than this log: the coordinator lets the log go on from it.
        """
        member = self.member
        if is_related(incarnation, member.job.incarnation):
            known_restarts = max(member.job.known_restarts, restart_count)
            self._set_job(incarnation=incarnation or member.job.incarnation, known_restarts=known_restarts)
            is_other = (
                member.round.place is not None and self._round == number > 0 and member.round.place.round_id != round_id
            )
        else:
            self._set_job(incarnation=incarnation, known_restarts=restart_count)
            self._set_job(prepared=None, has_confirmed_elsewhere=False)
            is_other = True
        if is_other and member.state == RUNNING:
            self._set_round(is_replaced=True)
            self._halt(Halted(self._round, REPLACED))
        elif is_other and member.state == READY:
            self.leave_round()

    # --- rounds ------------------------------------------------------------------------------------------------------
    def _learn_round(self, number: int, slot: int, term: int) -> None:
        if self.member.job.prepared is not None:
            # A newer one than this, of another store: its log may have formed a round on this node's word.
            self._announce()
            return
        self._set_job(known_round=number)
        if self.member.state in (RUNNING, HALTING):
            if self.member.state == RUNNING:
                self._halt(Halted(self._round, REPLACED))
            return
        if self.member.state != LEAVING:
            self._set_round(fetching=(slot, term))
            self.commands.append(FetchAssignment(slot, term))

    def enter_assignment(self, event: AssignmentRead) -> None:
        """The assignment of a round was read."""
        if self.member.round.fetching != (event.slot, event.term):
            return
        self._set_round(fetching=None)
        place = _read_assignment(event.value)
        is_told = place is not None and place.round_id == self.member.round.told_round_id
        if place is None or is_told or place.round != self.member.job.known_round:
            self._set(state=WAITING)
            self._set_round(place=None, gone=None, is_failing=False)
            self._set_facts(is_due=False)
            self._say_join()
            return
        self._set(state=RUNNING)
        self._set_round(place=place, is_replaced=False, is_failing=False, gone=None)
        self._set_round(told_round_id=place.round_id)
        if place.config is not None:
            self._take_config(place.config)
        self.commands.append(Formed(place))
        if self.member.facts.is_due:
            self._announce()
        if self.member.round.warned == place.round:
            self.commands.append(Warned(place.round))
        if self.member.round.halt is not None:
            self._learn_halt(self.member.round.halt)

    def _take_config(self, config: JobConfig) -> None:
        """Apply the job's configuration from now on, also where this node has to tell them to others."""
        detail = describe_settled(config, self.member.config)
        self._set(config=config)
        if detail:
            self.commands.append(Settled(detail))

    def _learn_warning(self, warn: Warn) -> None:
        self._set_round(warned=warn.round)
        if self.member.state == RUNNING and self._round == warn.round:
            self.commands.append(Warned(warn.round))

    def _learn_halt(self, halt: Halt) -> None:
        # The store may have moved before this node could hear of the round in which the job went on without it.
        self._set_round(halt=halt)
        self._set_job(known_round=max(self.member.job.known_round, halt.round))
        if self.member.state == RUNNING and self._round <= halt.round:
            reason = halt.reason if self._round == halt.round else REPLACED
            self._halt(Halted(self._round, reason, halt.detail))

    def _halt(self, halted: Halted) -> None:
        self._set(state=HALTING)
        self.commands.append(halted)

    # --- the office --------------------------------------------------------------------------------------------------
    def claim(self) -> None:
        """Claim the office of the coordinator where nobody holds it."""
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


def _read_assignment(data: bytes | None) -> Assignment | None:
    try:
        return None if data is None else read_assignment(data)
    except MessageError:
        return None
