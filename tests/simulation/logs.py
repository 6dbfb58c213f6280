"""The logs of all stores, read by a reader that knows no more than that terms count."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elastic_run.core.protocol import messages
from tests.simulation.properties import ASSIGNMENTS, BUDGET, ONE_DECIDER, ONE_ROUND, require
from tests.simulation.store import SPOILT

if TYPE_CHECKING:
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
        entries: All that count, each with its slot.
        is_copy: Whether its store was restored from a snapshot.
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

    @property
    def end(self) -> dict[str, Any] | None:
        """The verdict, or None."""
        return next((entry for entry in self.entries if entry["kind"] == "end"), None)

    @property
    def claims(self) -> int:
        """The number of terms."""
        return sum(entry["kind"] == "claim" for entry in self.entries)

    def copy(self) -> Log:
        """Return what counts in a copy of the store."""
        return replace(self, entries=[*self.entries], is_copy=True)

    def enter(self, world: World, store: Store, slot: int, writer: str, value: bytes) -> None:
        """Read a slot that was created just now."""
        # In a store that was restored the log begins behind what nodes have followed before.
        is_next = slot == self.next_slot or (self.is_copy and slot > self.next_slot)
        require(is_next, ONE_DECIDER, f"slot {slot} was created when {self.next_slot} was the next")
        self.next_slot = slot + 1
        entry = json.loads(value)
        is_claim = entry["kind"] == "claim"
        is_raised = entry["kind"] == "recovered" and entry["term"] >= self.term
        counts = entry["term"] > self.term if is_claim else entry["term"] == self.term or is_raised
        if not counts or self.end is not None:
            return
        if is_claim:
            self.term, self.coordinator = entry["term"], entry["node"]
        require(writer == self.coordinator, ONE_DECIDER, f"{writer} wrote {entry} in the term of {self.coordinator}")
        if is_raised:
            can_be_newer = world.config.has_successors or self.is_copy
            is_newer = can_be_newer and (entry["round"], entry["term"]) >= (self.round, self.term)
            is_allowed = not self.round or world.faults.is_spoilt or is_newer
            require(is_allowed, ONE_ROUND, f"recovered round {entry['round']} after round {self.round}")
            self.term, self.round, self.restarts = entry["term"], entry["round"], entry["restart_count"]
            self.incarnation, self.round_id = entry["incarnation"], entry["round_id"]
        if entry["kind"] == "resync":
            # Nodes may know of a newer round than another store, or one that was restored.
            is_asked = world.faults.is_spoilt or world.config.has_successors or self.is_copy
            require(is_asked, ONE_DECIDER, "the state was lost, and nobody had touched it")
        if entry["kind"] == "form":
            prefix = f"a/{slot}.{entry['term']}/"
            places = {key.removeprefix(prefix): value for key, value in store.values.items() if key.startswith(prefix)}
            self._enter_form(world, entry, places)
        self.entries.append({**entry, "slot": slot})

    def _enter_form(self, world: World, entry: dict[str, Any], places: dict[str, bytes]) -> None:
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
        name = entry["incarnation"], number, f"{number}/{self.term}/{self.coordinator}"
        world.oracle.rounds.former_ids[name] = self.round_id
        self.round_id = name[2]
        require(len(places) == entry["nodes"], ASSIGNMENTS, f"{len(places)} assignments of round {name}")
        living = {agent.node for agent in world.agents if agent.is_alive}
        heads = {_find_rank_0(value) for value in places.values() if value != SPOILT}
        world.oracle.rounds.note_form(name, set(places), world.clockwork.now, is_headless=heads.isdisjoint(living))


def _find_rank_0(assignment: bytes) -> str:
    """Return the node whose agent serves the workers' store of a round."""
    return messages.read_assignment(assignment).master.host
