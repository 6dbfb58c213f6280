"""What a member makes of the log: `head`, and each decision."""

from __future__ import annotations

from elastic_run.core.node.messages import (
    Ended,
    EndTerm,
    EntryRead,
    EntryTrimmed,
    Halted,
    HeadRead,
    KeepState,
    Leaving,
    PrepareRejoin,
    ReadHead,
    Refused,
    Unreadable,
)
from elastic_run.core.node.state import BEGINNING, JUMP, LEAVING, OVER, READY, REPLACED, RUNNING, WAITING
from elastic_run.core.node.store_events import StoreUpdate
from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.job_keys import HEAD, LOG_START
from elastic_run.core.protocol.log_start import find_start
from elastic_run.core.protocol.messages import (
    EXCLUDED,
    LOSS,
    Claim,
    Copy,
    Decision,
    End,
    Failover,
    Form,
    Halt,
    Head,
    LogStart,
    Prepare,
    Recovered,
    Refuse,
    Resign,
    Resync,
    UnknownProtocolError,
    Warn,
    is_related,
    read_decision,
    read_head,
    read_term,
)


class MemberUpdate(StoreUpdate):
    """A member while any event is entered."""

    def enter_head(self, event: HeadRead) -> None:
        """The head of the log was read."""
        head, start = self._read_head(event.head), self._read_start(event.log_start)
        if head is not None and not _is_void(head, start):
            if self._leads_on(head) or self._is_behind(start):
                self._jump(head)
                if start is not None and start.is_restart:
                    self._set_log(restart=start.slot)
            self._set_log(needs_head=False)
        elif start is not None:
            if self._is_behind(start):
                self._begin_at(start)
        elif self.member.log.next_slot is None:
            if event.log_start is not None:
                return  # some slots were trimmed, but not which: a node that begins at 0 might start a second job
            self._set_log(next_slot=0)
        if self.member.state == BEGINNING:
            self._set(state=WAITING)
            if event.head is None:
                self._announce()
            else:
                self._say_join()  # at once, so that also a job of another protocol hears of this node

    def _read_head(self, data: bytes | None) -> Head | None:
        try:
            return None if data is None else read_head(data)
        except UnknownProtocolError:
            return None  # the decisions are in that protocol as well, and this node is refused by them
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
        self._begin_anew(start)
        self._look_for_head()
        self._rejoin()

    def _is_stuck(self, head: Head) -> bool:
        """Whether it waits for a slot that an old `head` named."""
        return self.member.log.trusted_slot == self.member.log.next_slot and head.slot > self.member.log.trusted_slot

    def _jump(self, head: Head) -> None:
        """Go on from the newest slot, and make up for what the slots between said."""
        is_first = self.member.state == BEGINNING
        self._set_log(
            next_slot=head.slot,
            last_entry=b"",
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

    def enter_entry(self, event: EntryRead) -> None:
        """A slot of the log was read."""
        if event.slot != self.member.log.next_slot:
            return
        start = find_start(event.log_start)
        if start is not None and start.is_restart and start.term > self.member.log.term:
            self._begin_anew(start)
            if start.slot < event.slot:
                return  # a slot between them may hold a claim that this node took for void, or did not read at all
        is_trusted = event.slot == self.member.log.trusted_slot
        former_entry = self.member.log.last_entry
        self._set_log(next_slot=event.slot + 1, last_entry=event.value, former_entry=former_entry)
        try:
            decision = read_decision(event.value)
        except UnknownProtocolError as error:
            if self.member.log.term == 0 or is_trusted:
                self._finish(Refused(str(error)))
            return
        except MessageError:
            return
        if not self._counts(decision) and not is_trusted:
            return
        self._set_log(term=decision.term)
        if isinstance(decision, Claim):
            self._learn_coordinator(decision, event.slot)
            return
        self._set_log(state_slot=event.slot, state_term=decision.term)
        # Whoever decides is there, whatever its heartbeats say.
        self._change_coordinator(self.member.coordination.coordinator)
        self._learn(decision, event.slot)

    def _counts(self, decision: Decision) -> bool:
        """Whether a decision counts after those before it."""
        term = self.member.log.term
        if isinstance(decision, Claim):
            return decision.term > term
        return decision.term >= term > 0 if isinstance(decision, Recovered) else decision.term == term

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
                self._learn_refusal(decision)
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
            if self.member.state == RUNNING and self._round < decision.round:
                # Its round was formed in a restored store, before a node told of the newer one.
                self._halt(Halted(self._round, REPLACED))
        else:
            place = self._last_place
            # A restored store may form a round of this node's number again, in a later term.
            round_id = "" if place is None or read_term(place.round_id) < decision.term else place.round_id
            self._learn_job(decision.incarnation, decision.restart_count, decision.round, round_id)
            self._forget_prepared(decision.round, decision.term)
            if decision.round > self.member.job.known_round:
                self._learn_round(decision.round, slot, decision.term)
        if self.member.facts.is_due:
            self._announce()
        self._set_job(has_view=not self.member.job.has_confirmed_elsewhere, copy=None)

    def _learn_refusal(self, decision: Refuse) -> None:
        """Go. A node that is excluded was a member, and says so: until then it may be counted in another store."""
        if decision.verdict != EXCLUDED:
            if self.member.coordination.is_coordinator:
                # With a Resign in the log another node coordinates at once: this one may serve the store, and then it
                # asks the next coordinator for a failover.
                self._set_coordination(is_coordinator=False)
                self.commands.append(EndTerm())
            self._finish(Refused(decision.detail))
        elif self.member.state != LEAVING:
            self.enter_leaving(Leaving(EXCLUDED))
            self.commands.append(Refused(decision.detail, EXCLUDED))

    def _finish(self, last: Refused | Ended) -> None:
        self._change_coordinator("")
        self._set(state=OVER)
        self._set_facts(outstanding=())
        self.commands.append(last)

    def _learn_job(self, incarnation: str, restart_count: int, number: int = 0, round_id: str = "") -> None:
        """Learn the job of this log, and its last round. Another round of that number does not belong to this log.

        A round of a higher number is newer than this log: the coordinator lets the log go on from it.
        """
        member = self.member
        if is_related(incarnation, member.job.incarnation):
            known_restarts = max(member.job.known_restarts, restart_count)
            self._set_job(incarnation=incarnation or member.job.incarnation, known_restarts=known_restarts)
            place = self._last_place
            is_other = place is not None and place.round == number > 0 and place.round_id != round_id
        else:
            self._set_job(incarnation=incarnation, known_restarts=restart_count)
            self._set_job(prepared=None, has_confirmed_elsewhere=False)
            is_other = True
        if is_other and member.state == RUNNING:
            self._set_round(is_replaced=True)
            self._halt(Halted(self._round, REPLACED))
        elif is_other and member.state in (WAITING, READY) and member.round.gone is not None:
            self._set_round(is_replaced=True)
            self.leave_round()
            # It joins later: the round that is being learned may have this node as a member, and use its store.
            self._set_facts(is_due=True)


def _is_void(head: Head, start: LogStart | None) -> bool:
    """Whether the head names a slot that was trimmed, or a term that ended when the store was restored."""
    return start is not None and (head.slot < start.slot or (start.is_restart and head.term < start.term))
