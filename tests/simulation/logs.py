"""The logs of all stores, read by a reader that knows no more than that terms count."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elastic_run.core.protocol import messages
from elastic_run.core.protocol.job_keys import HEAD, LOG_START, decision_key
from elastic_run.core.protocol.log_start import find_start
from tests.simulation.properties import ASSIGNMENTS, BUDGET, ONE_DECIDER, ONE_ROUND, require
from tests.simulation.store import SPOILT

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.store import Store
    from tests.simulation.world import World


@dataclass(slots=True)
class Log:
    """What counts in one log.

    Attributes:
        next_slot: The slot that comes next.
        term: The present term, 0 for none.
        coordinator: Whose it is.
        incarnation: Of the newest round.
        round: The newest round.
        round_id: Its unique id.
        restarts: Its restarts, None before the first.
        entries: All that count, each with its slot and its time in true seconds.
        is_copy: Whether its store was restored from a snapshot.
        witnesses: The nodes that could tell of their round when the log went on from a round; None after the next Form.
        unread: Slots that were created beyond the next one, in a store that was restored.
        writers: For the logs of one store and its snapshots: in which of them each coordinator wrote last.
    """

    next_slot: int = 0
    term: int = 0
    coordinator: str = ""
    incarnation: str = ""
    round: int = 0
    round_id: str = ""
    restarts: int | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    is_copy: bool = False
    witnesses: frozenset[Agent] | None = None
    unread: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    writers: dict[tuple[str, int], Log] = field(default_factory=dict)

    @property
    def end(self) -> dict[str, Any] | None:
        """The verdict, or None."""
        return next((entry for entry in self.entries if entry["kind"] == "end"), None)

    @property
    def claims(self) -> int:
        """The number of terms."""
        return sum(entry["kind"] == "claim" for entry in self.entries)

    @property
    def goes_on_from_nodes(self) -> bool:
        """Whether its coordinator has asked all nodes where they stand, and has formed no round since then."""
        kinds = [entry["kind"] for entry in self.entries]
        return "resync" in kinds[max((index for index, kind in enumerate(kinds) if kind == "form"), default=0) :]

    def find_state(self, store: Store, start: messages.LogStart) -> str:
        """Return `slot.term` of the newest state; "" if the log was begun again behind it, or if the state is lost."""
        decisions = [entry for entry in self.entries if entry["kind"] != "claim"]
        if not decisions or decisions[-1]["slot"] < start.slot:
            return ""
        slot, term = decisions[-1]["slot"], decisions[-1]["term"]
        is_void = start.is_restart and term < start.term
        return "" if is_void or not store.has_state(slot, term) else f"{slot}.{term}"

    def copy(self) -> Log:
        """Return what counts in a copy of the store."""
        return replace(self, entries=[*self.entries], unread={**self.unread}, is_copy=True)

    def enter(self, world: World, store: Store, slot: int, writer: str, value: bytes) -> None:
        """Take in a slot that was created just now, and read on as far as slots are there."""
        start = find_start(store.values.get(LOG_START))
        start = start if self.is_copy else None
        if start is not None and start.is_restart and (start.slot > self.next_slot or start.term > self.term):
            # The store has lost what nodes had read: nothing of before counts for those who read on. A request that
            # came late may have deleted a slot behind the start; then a node creates that slot again.
            self.next_slot = max(min(self.next_slot, slot), start.slot)
            self.term, self.coordinator = start.term, ""
            self.entries = [entry for entry in self.entries if entry["kind"] != "end"]
            self._forget_untold(world)
        is_next = slot == self.next_slot or (self.is_copy and slot > self.next_slot)
        require(is_next, ONE_DECIDER, f"slot {slot} was created when {self.next_slot} was the next")
        # What a coordinator sent before it noticed that lies beyond the next slot.
        self.unread[slot] = writer, value
        if self.is_copy:
            self._jump(store)
        trimmed = 0 if start is None else start.slot
        while self.next_slot in self.unread or self.next_slot < trimmed:
            slot = self.next_slot
            self.next_slot += 1
            if slot in self.unread:
                self._read(world, store, slot, *self.unread.pop(slot))

    def _forget_untold(self, world: World) -> None:
        """Go back to the last round that a node was told: the start makes the entry or the head of a later one void."""
        places = [place for agent in world.agents for place in agent.formed if place.incarnation == self.incarnation]
        if self.round and all(place.round_id != self.round_id for place in places):
            told = [(place.round, place.round_id) for place in places if place.round < self.round]
            self.round, self.round_id = max(told, default=(0, ""))
            self.restarts = None

    def _jump(self, store: Store) -> None:
        """Go on from the slot that `head` names, as nodes do: the store has lost the slots before that.

        A node may have written its claim again after the store was restored. This claim hides the loss from that node.
        The restored store may also have lost the decision that formed a round. A `head` that is written late names that
        round, although a node has written a claim in the slot of the lost decision.
        """
        raw = store.values.get(HEAD)
        head = None if raw in (None, SPOILT) else messages.read_head(raw)
        if head is None or head.slot not in self.unread or head.slot < self.next_slot or head.term < self.term:
            return
        is_lost = head.round > self.round and json.loads(self.unread[head.slot][1])["kind"] == "claim"
        if decision_key(self.next_slot) in store.values and not is_lost:
            return
        self.next_slot, self.term, self.coordinator = head.slot, head.term, head.coordinator
        self.incarnation, self.round, self.round_id = head.incarnation, head.round, head.round_id
        self.restarts = head.restart_count if head.round else None
        self.entries = [entry for entry in self.entries if entry["kind"] != "end"]
        self.unread = {slot: there for slot, there in self.unread.items() if slot >= head.slot}

    def _read(self, world: World, store: Store, slot: int, writer: str, value: bytes) -> None:
        entry = json.loads(value)
        self._go_on_from_writer(writer, entry["term"])
        if self.entries and self.entries[-1] == {**entry, "slot": slot, "time": self.entries[-1]["time"]}:
            return  # its coordinator has written it again: the answer of before was lost with the store
        is_claim = entry["kind"] == "claim"
        is_raised = entry["kind"] == "recovered" and entry["term"] >= self.term
        counts = entry["term"] > self.term if is_claim else entry["term"] == self.term or is_raised
        if entry["kind"] == "form" and self.is_copy and not counts:
            # Nodes that had read on before another one let the log begin anew take part in it all the same.
            name = entry["incarnation"], entry["round"], f"{entry['round']}/{entry['term']}/{writer}"
            world.oracle.rounds.former_ids.setdefault(name, self.round_id)
        if not counts or self.end is not None:
            return
        if is_claim:
            self.term, self.coordinator = entry["term"], entry["node"]
        require(writer == self.coordinator, ONE_DECIDER, f"{writer} wrote {entry} in the term of {self.coordinator}")
        if is_raised:
            can_be_newer = world.config.has_successors or self.is_copy or self.goes_on_from_nodes
            is_newer = can_be_newer and (entry["round"], entry["term"]) >= (self.round, self.term)
            # Another job, founded after the snapshot where nobody knew of one: its rounds have numbers of their own.
            is_other = self.is_copy and entry["incarnation"] != self.incarnation
            is_allowed = not self.round or is_newer or is_other or self._is_lost(world, store, entry)
            require(is_allowed, ONE_ROUND, f"recovered round {entry['round']} after round {self.round}")
            self.term, self.round, self.restarts = entry["term"], entry["round"], entry["restart_count"]
            self.incarnation, self.round_id = entry["incarnation"], entry["round_id"]
            self.witnesses = world.witnesses
        if entry["kind"] == "resync":
            # Nodes may know of a newer round than another store, or one that was restored.
            is_asked = world.faults.is_spoilt or world.config.has_successors or self.is_copy
            require(is_asked, ONE_DECIDER, "the state was lost, and nobody had touched it")
        if entry["kind"] == "form":
            places = self._find_places(store, slot, entry)
            if places or not self.is_copy:  # else they were written before the store was restored
                self._enter_form(world, entry, places)
        self.entries.append({**entry, "slot": slot, "time": world.clockwork.now})
        self.writers[self.coordinator, self.term] = self

    def _is_lost(self, world: World, store: Store, recovered: dict[str, Any]) -> bool:
        """Whether the newest round here was lost in a restore, and is back from another snapshot or in a late `head`.

        The round from which the log goes on was formed in between. It follows what the first snapshot knew, as
        docs/architecture.md has it, if no node that was told of the lost round was in reach then. Or the log goes on
        from an older round, since neither a node in reach nor a state in the store tells of the lost one. The latter
        also holds in a store that was not restored, after a stranger has destroyed the state.
        """
        if not self.is_copy and not self.goes_on_from_nodes:
            return False
        rounds, lost = world.oracle.rounds, (self.incarnation, self.round, self.round_id)
        name = recovered["incarnation"], recovered["round"], recovered["round_id"]
        is_unknown = rounds.find_told(lost).isdisjoint(world.able) and not store.has_state_of(self.round_id)
        return rounds.has_forgotten(lost, name) or is_unknown

    def _go_on_from_writer(self, writer: str, term: int) -> None:
        """Take over what a coordinator had decided before the store was restored, if this entry goes on from that.

        Two coordinators may have one term, of which one was claimed before: who finds its slot taken ends its term.
        """
        former = self.writers.get((writer, term), self)
        if former is not self and former.coordinator == writer and former.term >= self.term:
            self.term, self.coordinator, self.incarnation = former.term, former.coordinator, former.incarnation
            self.round, self.round_id, self.restarts = former.round, former.round_id, former.restarts
            self.entries = [*former.entries]

    def _find_places(self, store: Store, slot: int, entry: dict[str, Any]) -> dict[str, messages.Assignment]:
        """Return the assignments of a round by node, but not those that another coordinator of its term has left."""
        prefix, round_id = f"a/{slot}.{entry['term']}/", self._name_round(entry["round"])
        values = {key.removeprefix(prefix): value for key, value in store.values.items() if key.startswith(prefix)}
        places = {node: messages.read_assignment(value) for node, value in values.items()}
        return {node: place for node, place in places.items() if place.round_id == round_id}

    def _name_round(self, number: int) -> str:
        return f"{number}/{self.term}/{self.coordinator}"

    def _enter_form(self, world: World, entry: dict[str, Any], places: dict[str, messages.Assignment]) -> None:
        number, restarts = entry["round"], entry["restart_count"]
        if entry["incarnation"] != self.incarnation:
            # Another job, founded where nobody knew of one.
            self.incarnation, self.round, self.round_id, self.restarts = entry["incarnation"], 0, "", None
        require(number > self.round, ONE_ROUND, f"round {number} was formed after {self.round}")
        require(restarts >= (self.restarts or 0), BUDGET, f"restarts were forgotten in round {number}")
        is_next = self.restarts is None or restarts - self.restarts <= 1
        require(is_next, BUDGET, f"{restarts} restarts in round {number}, {self.restarts} before it")
        failed = world.oracle.rounds.failed
        require(restarts <= failed, BUDGET, f"{restarts} restarts in round {number}, {failed} failures")
        low, high = world.config.min_nodes, world.config.max_nodes
        require(low <= entry["nodes"] <= high, ONE_ROUND, f"{entry['nodes']} nodes in round {number}")
        self.round, self.restarts = number, restarts
        name = entry["incarnation"], number, self._name_round(number)
        world.oracle.rounds.former_ids[name] = self.round_id
        self.round_id = name[2]
        require(len(places) == entry["nodes"], ASSIGNMENTS, f"{len(places)} assignments of round {name}")
        # In a store that was restored a node of a fact may have replaced its workers' store since, or read the end.
        living = [agent for agent in world.agents if agent.is_alive and not (self.is_copy and agent.end)]
        there = {agent.member.store_address if self.is_copy else agent.node for agent in living}
        heads = {place.master if self.is_copy else place.master.host for place in places.values()}
        # Where the state was garbage, a log goes on from what nodes tell. If the store can move, they keep its copies.
        can_forget = self.is_copy or (self.goes_on_from_nodes and not world.config.has_successors)
        # A node that comes back between that decision and this one is heard only if the coordinator reads its fact.
        witnesses = world.witnesses if self.witnesses is None else world.witnesses & self.witnesses
        self.witnesses = None
        world.oracle.rounds.note_form(
            name,
            set(places),
            world.clockwork.now,
            is_headless=heads.isdisjoint(there),
            witnesses=witnesses if can_forget else None,
            is_restored=self.is_copy,
        )
