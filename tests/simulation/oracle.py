"""What must hold in every run, checked without any knowledge of how the core comes to it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

from elastic_run.core.job.config import describe_difference
from elastic_run.core.job.role_scripts import RoleScript, describe_other_script
from elastic_run.core.node import messages as node_messages
from elastic_run.core.protocol.job_keys import LOG_START
from elastic_run.core.protocol.log_start import find_start
from elastic_run.core.protocol.messages import LogStart
from tests.simulation.logs import Log
from tests.simulation.progress import Progress
from tests.simulation.properties import (
    ASSIGNMENTS,
    DELETED,
    ENDS,
    ONE_DECIDER,
    REFUSALS,
    RESTARTS_USED,
    SIZE,
    SUCCESS,
    VERDICT,
    require,
)
from tests.simulation.rounds import Rounds
from tests.simulation.store import SPOILT

if TYPE_CHECKING:
    from elastic_run.core.protocol.messages import Assignment
    from tests.simulation.agent import Agent
    from tests.simulation.rounds import Round
    from tests.simulation.store import Store
    from tests.simulation.world import World


def _describe_other_script(one: Agent, other: Agent) -> str:
    node_info = other.member.node_info
    return describe_other_script((RoleScript(node_info.role, one.member.node_info.script),), node_info.role_script)


class Oracle:
    """Collects what nodes were told, and judges.

    Args:
        world: The run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.rounds = Rounds(has_majority=world.config.has_successors, may_split=world.config.on_split == "continue")
        self.progress = Progress(world)
        self._logs: dict[int, Log] = defaultdict(Log)
        self._entries: dict[tuple[int, int], bytes] = {}

    # --- what happened -----------------------------------------------------------------------------------------------
    def note_slot(self, store: Store, slot: int, writer: str, value: bytes) -> None:
        """A slot of a log was created."""
        self._logs[id(store)].enter(self._world, store, slot, writer, value)
        self._world.faults.note_slot(store, value)

    def note_copy(self, store: Store, snapshot: Store) -> None:
        """A store was copied."""
        self._logs[id(snapshot)] = self._logs[id(store)].copy()

    def note_delete(self, store: Store, key: str) -> None:
        """A key was deleted in a clean-up."""
        start = find_start(store.values.get(LOG_START)) or LogStart(0, 0)
        kind, _, number = key.partition("/")
        if kind == "d":
            require(int(number) < start.slot, DELETED, f"slot {number}, and the log begins at {start.slot}")
        elif kind == "s":
            newest = self._logs[id(store)].find_state(store, start)
            require(number != newest, DELETED, f"the state {number}, and it is the newest")

    def note_formed(self, agent: Agent, place: Assignment) -> None:
        """A node was told its place."""
        require(agent.end is None, ASSIGNMENTS, f"{agent.node} got a round after the end")
        require(agent.running is None, ASSIGNMENTS, f"{agent.node} got a round while it ran one")
        self.rounds.note_formed(agent, place)

    def note_entry(self, agent: Agent, slot: int, value: bytes) -> None:
        """A node has read a slot of the log as one that counts."""
        there = self._entries.setdefault((id(agent.store), slot), value)
        require(there == value, ONE_DECIDER, f"{agent.node} read another entry of slot {slot} than a node before")

    def note_done(self, agent: Agent, place: Assignment) -> None:
        """All workers of a round ended with 0 on a node."""
        self.rounds.find(place).done.add(agent)

    def note_failure(self, place: Assignment) -> None:
        """A worker of a round failed by itself."""
        self.rounds.find(place).has_failed = True
        self.progress.failed_at = self._world.clockwork.now

    def note_end(self, agent: Agent) -> None:
        """A node was told the end."""
        require(agent.is_alive, ENDS, f"{agent.node} was told the end after its own")
        self._world.measure()

    def look(self) -> None:
        """Judge what must hold at any time."""
        self.rounds.look(may_be_hidden=self._world.faults.has_hidden)
        self.progress.look()

    def note_started(self) -> None:
        """A node has started the workers of its round."""
        self.rounds.look(may_be_hidden=self._world.faults.has_hidden)

    # --- the judgement -----------------------------------------------------------------------------------------------
    def judge(self) -> None:
        """Raise BrokenPropertyError where a promise was broken."""
        living = [agent.node for agent in self._world.living]
        require(not living, ENDS, f"never learnt the end: {living}")
        self._judge_refusals()
        self.rounds.judge()
        self._judge_verdicts()
        if not self._world.stores:
            return
        log = self._logs[id(self._world.last_store)]
        self._judge_end(log)
        self._judge_size(log)

    def _judge_refusals(self) -> None:
        """A node is refused only where another with another configuration, or another script, was there before."""
        agents = self._world.agents
        for agent in agents:
            if isinstance(agent.end, node_messages.Refused):
                others = {describe_difference(other.member.config, agent.member.config) for other in agents}
                others |= {_describe_other_script(other, agent) for other in agents}
                require(agent.end.detail in others - {""}, REFUSALS, agent.end.detail)

    def _judge_verdicts(self) -> None:
        verdicts: dict[str, set[str]] = defaultdict(set)
        for agent in self._world.agents:
            if isinstance(agent.end, node_messages.Ended):
                end = agent.end.end
                verdicts[agent.member.job.incarnation].add(json.dumps([end.verdict, end.exit_code, end.root]))
        # An end that was lost with its store before anybody copied it is decided once more in the next one.
        closed = max(1, sum(log.end is not None for log in self._logs.values()))
        for incarnation, ends in verdicts.items():
            require(len(ends) <= closed, VERDICT, f"different truths of {incarnation}: {ends}")

    def _judge_end(self, log: Log) -> None:
        end = log.end
        if end is None:
            return
        config, rounds = self._world.config, self._find_last_rounds(log)
        if end["verdict"] == "success":
            is_done = any(len(round_.done) == round_.size for round_ in rounds)
            names = [round_.name for round_ in rounds]
            require(is_done, SUCCESS, f"success while somebody was not done with {names}")
        elif end["verdict"] == "worker_failed":
            require(any(round_.has_failed for round_ in rounds), VERDICT, "a failure that nobody had")
            is_used = all(round_.restarts >= config.max_restarts for round_ in rounds)
            require(is_used, RESTARTS_USED, "the job ended before its restarts were used")
        else:
            require(end["verdict"] in ("nodes_lost", "rendezvous"), VERDICT, str(end))
            # Where a node with another configuration came first, all the rest are refused.
            refused = [agent for agent in self._world.agents if isinstance(agent.end, node_messages.Refused)]
            is_foreign = any(self._world.is_ours(agent) for agent in refused)
            is_barred = is_foreign or config.membership_window is not None or config.has_successors
            is_short = is_barred or self._world.was_short(end["time"])
            require(is_short, VERDICT, f"gave up with enough nodes: {end['detail']}")

    def _find_last_rounds(self, log: Log) -> list[Round]:
        """Return the rounds that a log was about when it ended; where it knew of none, those of its members."""
        if log.round:
            found = self.rounds.find_all(log.incarnation, log.round)
            return [round_ for round_ in found if round_.name[2] == log.round_id]
        told = [agent for agent in self._world.agents if isinstance(agent.end, node_messages.Ended)]
        last = filter(None, map(self.rounds.find_last, told))
        return list({round_.name: round_ for round_ in last}.values())

    def _judge_size(self, log: Log) -> None:
        store = self._world.last_store
        if self._world.network.late or self._world.network.again:
            return
        states = [key for key in store.values if key.startswith("s/")]
        slots = [key for key in store.values if key.startswith("d/")]
        # A state that was on its way when the store was restored stays: the log there knows nothing of it.
        late = 0 if self._world.config.has_successors else len(self._world.stores) - 1
        require(len(states) <= 2 * log.claims + 1 + late, SIZE, f"states pile up: {states}")
        # Slots of a coordinator that died before it could delete them, and the start itself.
        require(len(slots) <= self._world.kept_slots + 2 * log.claims + 1, SIZE, f"slots pile up: {slots}")
        if log.end is None:
            return
        key = f"s/{log.end['slot']}.{log.end['term']}"
        is_legible = store.values.get(key, SPOILT) != SPOILT
        if self._world.is_tidy(log.end["slot"]) and is_legible:
            position = json.loads(store.values[key])["position"]
            require(store.trimmed == position, SIZE, f"facts pile up: {store.trimmed} of {position} were trimmed")
