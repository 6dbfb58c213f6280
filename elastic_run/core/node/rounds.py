"""Rounds, as one node sees them: its assignment, the warning of a new round, and halts."""

from __future__ import annotations

from elastic_run.core.job.config import describe_settled
from elastic_run.core.node.coordination import CoordinationUpdate
from elastic_run.core.node.messages import AssignmentRead, CutOff, FetchAssignment, Formed, Halted, Settled, Warned
from elastic_run.core.node.state import FENCED, HALTING, LEAVING, REPLACED, RUNNING
from elastic_run.core.protocol.codec import MessageError
from elastic_run.core.protocol.messages import Assignment, Halt, Warn, read_assignment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.job.config import JobConfig


class RoundUpdate(CoordinationUpdate):
    """A member's round, while one event is entered."""

    def enter_assignment(self, event: AssignmentRead) -> None:
        """The assignment of a round was read."""
        if self.member.round.fetching != (event.slot, event.term):
            return
        self._set_round(fetching=None)
        place = _read_assignment(event.value)
        if (
            place is None
            or self._is_old(place)
            or place.round != self.member.job.known_round
            or self._has_other_store(place)
        ):
            self.leave_round()
            self._set_facts(is_due=False)
            self._rejoin()
            return
        self._set(state=RUNNING)
        self._set_round(place=place, told=place, is_replaced=False, is_failing=False, gone=None)
        if place.config is not None:
            self._take_config(place.config)
        self.commands.append(Formed(place))
        if self.member.facts.is_due:
            self._announce()
        if self.member.round.warned == place.round:
            self.commands.append(Warned(place.round))
        if self.member.round.halt is not None:
            self._learn_halt(self.member.round.halt)

    def _is_old(self, place: Assignment) -> bool:
        """Whether this node was told a round of this number or above: the log in a store to which it returns is older.

        The other round may be of another job, begun anew in another store. A new round has a higher number than all
        rounds of which its nodes have heard, so none is refused for ever.
        """
        told = self.member.round.told
        return told is not None and told.round >= place.round

    def _has_other_store(self, place: Assignment) -> bool:
        """Whether the round was formed with a workers' store of this node that it has replaced since then."""
        return place.group_rank == 0 and place.master != self.member.store_address

    def enter_cut_off(self, event: CutOff) -> None:
        """The workers are not to run on without the job."""
        self._halt(Halted(self._round, FENCED, f"no answer for {event.seconds:.0f} s"))

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


def _read_assignment(data: bytes | None) -> Assignment | None:
    try:
        return None if data is None else read_assignment(data)
    except MessageError:
        return None
