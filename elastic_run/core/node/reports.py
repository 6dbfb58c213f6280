"""A member's facts: made of its agent's events, and sent again if the coordinator may have missed them."""

from __future__ import annotations

from elastic_run.core.node.messages import (
    Append,
    Appended,
    Command,
    EndTerm,
    Leaving,
    PrepareRejoin,
    WorkersFailing,
    WorkersGone,
)
from elastic_run.core.node.state import BEGINNING, LEAVING, READY, WAITING, Member
from elastic_run.core.protocol.messages import (
    Fact,
    Failing,
    Join,
    Leave,
    PreviousRound,
    Ready,
    is_related,
)
from elastic_run.records import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.protocol.messages import Assignment


class FactWriter:
    """A member while one event is entered, and the commands that follow from it."""

    def __init__(self, member: Member, now: float) -> None:
        self.member = member
        self.commands: list[Command] = []
        self._now = now

    def _set(self, **changes: Any) -> None:  # noqa: ANN401 - values of any field
        self.member = replace(self.member, **changes)

    def _set_log(self, **changes: Any) -> None:  # noqa: ANN401 - ditto
        self._set(log=replace(self.member.log, **changes))

    def _set_coordination(self, **changes: Any) -> None:  # noqa: ANN401 - ditto
        self._set(coordination=replace(self.member.coordination, **changes))

    def _set_job(self, **changes: Any) -> None:  # noqa: ANN401 - ditto
        self._set(job=replace(self.member.job, **changes))

    def _set_round(self, **changes: Any) -> None:  # noqa: ANN401 - ditto
        self._set(round=replace(self.member.round, **changes))

    def _set_facts(self, **changes: Any) -> None:  # noqa: ANN401 - ditto
        self._set(facts=replace(self.member.facts, **changes))

    # --- what the agent says -----------------------------------------------------------------------------------------
    def enter_failing(self, event: WorkersFailing) -> None:
        """A worker has failed."""
        is_news = not self.member.round.is_failing or (self.member.round.is_suspecting and not event.is_secondary)
        if self._round != event.round or not is_news:
            return
        self._set_round(is_failing=True, is_suspecting=event.is_secondary)
        self._say_failing()

    def enter_gone(self, event: WorkersGone) -> None:
        """No process of the round lives any more."""
        if self._round != event.round:
            return
        self._set(store_address=event.store_address)
        self._set_round(gone=event)
        if event.round < self.member.job.known_round or self.member.round.is_replaced or self._is_of_another_job:
            self.leave_round()
            self._announce()
        else:
            self._set(state=READY)
            self._say_ready(event)

    def leave_round(self) -> None:
        """Wait for another round: the job went on without this node.

        The node still tells of its last round, since a restored store may have lost the newer one. Where the store can
        move, it does not: another log may go on from the newer round, and none may go on from the last round then.
        """
        is_over = self.member.config.has_successors or self.member.round.is_replaced or self._is_of_another_job
        self._set(state=WAITING)
        self._set_round(place=None, gone=None if is_over else self.member.round.gone, is_failing=False)

    def enter_leaving(self, event: Leaving) -> None:
        """The agent goes."""
        self._set(state=LEAVING)
        member = self.member
        self._say(Leave(member.node, self._next_sequence(), event.reason, event.detail, member.job.prepared))
        if self.member.coordination.is_coordinator:
            self.commands.append(EndTerm())

    # --- facts -------------------------------------------------------------------------------------------------------
    @property
    def _round(self) -> int:
        return 0 if self.member.round.place is None else self.member.round.place.round

    @property
    def _last_place(self) -> Assignment | None:
        """Its assignment in the round of which it tells the job: it runs that round, or has run it last."""
        return self.member.round.place if self.member.round.gone is None else self.member.round.told

    @property
    def _is_of_another_job(self) -> bool:
        """Whether the round that it runs, or has run, is of another job than the one whose log it follows."""
        place = self._last_place
        return place is not None and not is_related(place.incarnation, self.member.job.incarnation)

    def _next_sequence(self) -> int:
        self._set_facts(sequence=self.member.facts.sequence + 1)
        return self.member.facts.sequence

    def _say(self, fact: Fact) -> None:
        self._set_facts(outstanding=(*self.member.facts.outstanding, fact))
        self.commands.append(Append(fact))

    def _say_join(self) -> None:
        member, place = self.member, self._last_place
        if member.facts.is_preparing:
            return  # the workers' store that it offered in another store may be in use: it says `Join` with another one
        last = None
        if place is not None:
            last = PreviousRound(
                round_id=place.round_id,
                round=place.round,
                rank=place.group_rank,
                nodes=place.group_world_size,
                restart_count=place.restart_count,
                incarnation=place.incarnation,
            )
        self._say(
            Join(
                node=member.node,
                sequence=self._next_sequence(),
                node_info=member.node_info,
                config=member.config,
                store_address=member.store_address,
                seen=-1 if member.log.next_slot is None else member.log.next_slot - 1,
                last=last,
                highest_round=max(member.job.highest_round, member.job.known_round),
                copy=member.job.copy,
                prepared=member.job.prepared,
                known_restarts=member.job.known_restarts,
                has_left=place is not None and member.round.place is None,
            )
        )

    def _say_failing(self) -> None:
        round_id = "" if self.member.round.place is None else self.member.round.place.round_id
        self._say(
            Failing(self.member.node, self._next_sequence(), self._round, round_id, self.member.round.is_suspecting)
        )

    def _say_ready(self, gone: WorkersGone) -> None:
        place = self._last_place
        self._say(
            Ready(
                self.member.node,
                self._next_sequence(),
                gone.round,
                "" if place is None else place.round_id,
                gone.outcome,
                gone.store_address,
                gone.report,
                gone.verdict,
                gone.detail,
                gone.ends,
            )
        )

    def _rejoin(self) -> None:
        """Say where this node stands, with another workers' store: a round may have been formed with the old one."""
        self._set_facts(is_preparing=True)
        self.commands.append(PrepareRejoin(needs_copy=False))

    def _announce(self) -> None:
        """Say again all that the coordinator has to know of this node."""
        if self.member.state in (BEGINNING, LEAVING) or self.member.facts.is_preparing:
            return
        if self.member.round.fetching is not None or self.member.log.next_slot in (None, 0):
            # Where the log stands, which node coordinates, or whether it is in the new round, is known in a moment.
            self._set_facts(is_due=True)
            return
        self._set_facts(is_due=False)
        self._say_join()
        if self.member.round.gone is not None:
            self._say_ready(self.member.round.gone)
        elif self.member.round.is_failing:
            self._say_failing()

    def enter_appended(self, event: Appended) -> None:
        """A fact has arrived."""
        self._set_facts(
            outstanding=tuple(fact for fact in self.member.facts.outstanding if fact.sequence > event.sequence)
        )
