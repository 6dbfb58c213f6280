"""What must hold in every run, checked without any knowledge of how the core comes to it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from elastic_run.core import member as membership
from elastic_run.core.messages import DONE
from elastic_run.core.role_scripts import RoleScript, describe_other_script
from elastic_run.core.rules import describe_difference
from tests.simulation.store import SPOILT

if TYPE_CHECKING:
    from typing import TypeAlias

    from elastic_run.core.messages import Assignment
    from tests.simulation.agent import Agent
    from tests.simulation.store import Store
    from tests.simulation.world import World

    Round: TypeAlias = tuple[str, int]


def _round(place: Assignment) -> Round:
    return place.lineage, place.round


def _describe_other_script(one: Agent, other: Agent) -> str:
    card = other.member.card
    return describe_other_script((RoleScript(card.role, one.member.card.script),), card.role_script)


class Oracle:
    """Collects what nodes were told, and judges."""

    def __init__(self, world: World) -> None:
        self._world = world
        # By lineage and number: a job that begins where another has lost its store begins with round 1, as that did.
        self._places: dict[Round, dict[str, Assignment]] = defaultdict(dict)
        self._entries: dict[tuple[int, int], bytes] = {}
        self._done: dict[Round, set[str]] = defaultdict(set)
        self._failed: set[Round] = set()
        self._ended_at = float("inf")
        self._takeover: tuple[Agent, float] | None = None

    # --- what happened -----------------------------------------------------------------------------------------------
    def note_formed(self, agent: Agent, place: Assignment) -> None:
        """A node was told its place."""
        assert agent.end is None, f"{agent.node} got a round after the end"
        assert agent.running is None, f"{agent.node} got a round while it ran one"
        assert not agent.formed or place.round > agent.formed[-1].round, "round numbers must grow"
        assert place.lineage, "a round that can't be told from another job's"
        others = self._places[_round(place)]
        for other in others.values():
            assert other.group_rank != place.group_rank, f"rank {place.group_rank} of round {place.round} twice"
            for field in ("group_world_size", "world_size", "master", "restart_count", "hosts"):
                assert getattr(other, field) == getattr(place, field), f"two memberships of round {place.round}"
        assert 0 <= place.group_rank < place.group_world_size
        others[agent.node] = place

    def note_entry(self, agent: Agent, slot: int, value: bytes) -> None:
        """A node has read a slot of the log as one that counts."""
        there = self._entries.setdefault((id(agent.store), slot), value)
        assert there == value, f"{agent.node} read another entry of slot {slot} than a node before"

    def note_done(self, agent: Agent, place: Assignment) -> None:
        """All workers of a round ended with 0 on a node."""
        self._done[_round(place)].add(agent.node)

    def note_failure(self, place: Assignment) -> None:
        """A worker of a round failed by itself."""
        self._failed.add(_round(place))

    def note_takeover(self, agent: Agent, copy: bytes | None) -> None:
        """A node goes on in another store with its copy of the state."""
        job = json.loads(copy).get("job", {}) if copy and copy != SPOILT else {}
        hosts = [node for node in job.get("nodes", ()) if node["card"]["serves_store"]]
        is_lost = any(host["is_member"] and host["outcome"] != DONE for host in hosts)
        if job.get("phase") in ("running", "warned") and is_lost:
            self._takeover = agent, self._world.clockwork.now

    def note_end(self, agent: Agent, end: membership.Ended | membership.Refused) -> None:
        """A node was told the end."""
        assert agent.is_alive
        if isinstance(end, membership.Ended):
            self._ended_at = min(self._ended_at, self._world.clockwork.now)

    # --- the judgement -----------------------------------------------------------------------------------------------
    def judge(self) -> None:
        """Raise AssertionError where a promise was broken."""
        living = [agent.node for agent in self._world.living]
        assert not living, f"never learnt the end: {living}"
        self._judge_refusals()
        self._judge_rounds()
        self._judge_survivors()
        self._judge_takeover()
        logs = [self._judge_log(store) for store in self._world.stores]
        entries: list[dict[str, Any]] = next((log for log in reversed(logs) if log), [])
        forms = [entry for log in logs for entry in log if entry["kind"] == "form"]
        self._judge_verdict(entries, forms[-1]["lineage"] if forms else "")
        self._judge_size(entries)

    def _judge_refusals(self) -> None:
        """A node is refused only where another with other rules, or another script, was there before."""
        agents = self._world.agents
        for agent in agents:
            if isinstance(agent.end, membership.Refused):
                others = {describe_difference(other.member.rules, agent.member.rules) for other in agents}
                others |= {_describe_other_script(other, agent) for other in agents}
                assert agent.end.detail in others - {""}, agent.end.detail

    def _judge_survivors(self) -> None:
        """Who is in two rounds in a row keeps its rank where the second has it."""
        for (lineage, number), places in self._places.items():
            for node, place in self._places.get((lineage, number + 1), {}).items():
                before = places.get(node)
                if before is not None and before.group_rank < place.group_world_size:
                    assert before.group_rank == place.group_rank, f"{node} lost its rank after round {number}"

    def _judge_takeover(self) -> None:
        """The node that went with the store which it served is not waited for: its lease was over already."""
        if self._takeover is None:
            return
        agent, since = self._takeover
        store = self._world.stores[-1]
        if agent.is_alive and not agent.has_left and agent.was_stalled_at < since:
            until = min((time for time in store.times if time > since), default=float("inf"))
            assert until - since < self._world.rules.lease / 2, f"aged twice: {until - since:.1f} s"

    def _judge_rounds(self) -> None:
        for (_, number), places in self._places.items():
            some = next(iter(places.values()))
            # Where a node with other rules came first, the job goes by those.
            rules = {self._agent(node).member.rules for node in places}
            assert len(rules) == 1, f"two sets of rules in round {number}"
            assert len({self._agent(node).member.card.script for node in places}) == 1, "two scripts in one round"
            assert some.restart_count <= rules.pop().max_restarts, f"more restarts than allowed in round {number}"
            if len(places) < some.group_world_size:
                continue
            ordered = sorted(places.values(), key=lambda place: place.group_rank)
            assert [place.group_rank for place in ordered] == list(range(len(ordered)))
            base = 0
            for node, place in sorted(places.items(), key=lambda item: item[1].group_rank):
                assert place.base_rank == base, f"base rank of {node} in round {number}"
                base += self._agent(node).member.card.local_world_size
            assert base == some.world_size

    def _agent(self, node: str) -> Agent:
        return next(agent for agent in self._world.agents if agent.node == node)

    def _judge_log(self, store: Store) -> list[dict[str, Any]]:
        """Read the log as a newcomer who knows no more than that terms count, and return what counts."""
        term, office, round_number, is_closed = 0, "", 0, False
        restarts: int | None = None
        valid: list[dict[str, Any]] = []
        for slot, (number, writer, value) in enumerate(store.slots):
            assert number == slot, f"slot {number} was created after {slot - 1}"
            entry = json.loads(value)
            is_claim = entry["kind"] == "claim"
            counts = entry["term"] == term + is_claim or (is_claim and term == 0)
            if not counts or is_closed:
                continue
            if is_claim:
                term, office = entry["term"], entry["node"]
            assert writer == office, f"{writer} decided in the term of {office}"
            if entry["kind"] == "recall":
                assert self._world.is_spoilt, "nobody touched the state"
            if entry["kind"] == "form":
                assert entry["round"] > round_number, "round numbers must grow"
                assert entry["restart_count"] >= (restarts or 0), "restarts were forgotten"
                assert entry["restart_count"] <= len(self._failed), "a restart that no failure asked for"
                assert self._world.rules.min_nodes <= entry["nodes"] <= self._world.rules.max_nodes
                assert restarts is None or entry["restart_count"] - restarts <= 1
                round_number, restarts = entry["round"], entry["restart_count"]
            is_closed = entry["kind"] == "end"
            valid.append({**entry, "slot": slot})
        return valid

    def _judge_verdict(self, entries: list[dict[str, Any]], lineage: str) -> None:
        ends = {
            json.dumps([a.end.end.verdict, a.end.end.exit_code, a.end.end.root])
            for a in self._world.agents
            if isinstance(a.end, membership.Ended)
        }
        # An end that was lost with its store before anybody copied it is decided once more in the next one.
        closed = sum(any(b'"kind":"end"' in value for _, _, value in store.slots) for store in self._world.stores)
        assert len(ends) <= max(1, closed), f"different truths: {ends}"
        end = next((entry for entry in entries if entry["kind"] == "end"), None)
        if end is None:
            return
        rules = self._world.rules
        last = max((known for known in self._places if known[0] == lineage), default=(lineage, 0))
        if end["verdict"] == "success":
            nodes = next(iter(self._places[last].values())).group_world_size
            assert len(self._done[last]) == nodes, "success while somebody was not done"
        elif end["verdict"] == "worker_failed":
            assert last in self._failed, "a failure that nobody had"
            used = next(iter(self._places[last].values())).restart_count
            assert used >= rules.max_restarts, "budget was left"
        else:
            assert end["verdict"] in ("nodes_lost", "rendezvous"), end
            # Where a node with other rules came first, all the rest are refused.
            refused = [agent for agent in self._world.agents if isinstance(agent.end, membership.Refused)]
            is_foreign = any(self._world.is_ours(agent) for agent in refused)
            is_barred = is_foreign or rules.membership_count is not None or rules.has_successors
            assert is_barred or self._world.was_short(self._ended_at), f"gave up with enough nodes: {end['detail']}"

    def _judge_size(self, entries: list[dict[str, Any]]) -> None:
        store = self._world.last_store
        states = [key for key in store.values if key.startswith("s/")]
        slots = [key for key in store.values if key.startswith("d/")]
        claims = sum(entry["kind"] == "claim" for entry in entries)
        assert len(states) <= 2 * claims + 1, f"states pile up: {states}"
        # Slots of a coordinator that died before it could delete them, and the start itself.
        assert len(slots) <= self._world.kept_slots + 2 * claims + 1, f"slots pile up: {slots}"
        end = next((entry for entry in entries if entry["kind"] == "end"), None)
        key = None if end is None else f"s/{end['slot']}.{end['term']}"
        is_legible = store.values.get(key or "", SPOILT) != SPOILT
        if end is not None and self._world.is_tidy(end["slot"]) and key in store.values and is_legible:
            assert store.trimmed == json.loads(store.values[key])["position"], "facts pile up"
