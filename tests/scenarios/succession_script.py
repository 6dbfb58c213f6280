"""Scenario scripts of the log: members and their coordinators over one store, step by step.

The lines below each `>` line of a script in `succession/` are what nodes do and are told; `ELASTIC_RUN_REWRITE=1`
rewrites them all; review the diff. `at=` sets the time; `config MIN MAX [RESTARTS] [NAME=SECONDS…]` are those of the
nodes that start from there on. The verbs:

- members: `start NODE…`, `follow [NODE…]` (read the log to its end), `heartbeat NODE [dropped]` (its last one was
  removed), `look NODE` (at the coordinator's heartbeat), `failing NODE [consequence]`, `gone NODE OUTCOME`,
  `leave NODE`;
- coordinators: `decide NODE` (read all facts, write all decisions), `prepare NODE` (the same, but stopped before the
  slot is created), `create NODE` (it goes on), `watch NODE` (look at all heartbeats), `resign NODE`, `move NODE`,
  `refuse NODE N` (so many strangers);
- trouble: `lose NODE` (what it says does not arrive), `reconnect NODE`, `interrupt NODE`, `hold NODE` (its
  assignments), `release NODE`, `entry SLOT TEXT`, `fact TEXT`, `put KEY TEXT` (no text: the key goes), `drop SLOT`,
  `oldhead` (the first head is back), `change NODE` (its store is emptied), `go STORE NODE…` (to another store; `at
  STORE NODE…` starts there), `die NODE [NODE]` (its guardian tells it in the store of the other node), `dead RANK
  STATUS ROUND_ID NODE [STORE]` (a proof, told in the store of the node), `wipe` (the store is another, empty one;
  nobody is told), `elsewhere NODE` (it is told), `answer NODE SLOT` (late), `backup [NAME]` and `restore [NAME]` (the
  store; nobody is told), `notice NODE…` (they see that the store was restored).

The file is longer than others since there is a method for each verb.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_run.core.job import coordinator as core
from elastic_run.core.job import coordinator_slots as slots
from elastic_run.core.job import machine as coordination
from elastic_run.core.job.snapshot import find_newest_state, identify
from elastic_run.core.node import machine as membership
from elastic_run.core.node import messages as node_messages
from elastic_run.core.node.state import OVER, READY, WAITING, Member
from elastic_run.core.protocol.job_keys import (
    HEAD,
    LOG_START,
    assignment_key,
    copy_key,
    decision_key,
    state_key,
)
from elastic_run.core.protocol.log_start import find_restart, find_start, is_raised_by, is_trimmed
from elastic_run.core.protocol.messages import (
    DIED,
    LAST_SEQUENCE,
    Fact,
    FailoverRequest,
    Leave,
    LogStart,
    NodeInfo,
    SeatDead,
    StoreAddress,
    read_decision,
    to_json,
)
from tests.support.configs import plain_config

if TYPE_CHECKING:
    from elastic_run.core.job.coordinator_state import Coordinator


def _show(thing: object) -> str:
    names = (name for name in type(thing).__slots__ if name not in ("node_info", "config", "store_address", "node"))  # type: ignore[attr-defined]  # all are slotted records
    shown = [(name, getattr(thing, name)) for name in names]
    told = ", ".join(f"{name}={value!r}" for name, value in shown if value not in ("", None, (), False))
    return f"{type(thing).__name__}({told})"


class Place:
    """What one store holds."""

    def __init__(self) -> None:
        self.facts: list[bytes] = []
        self.values: dict[str, bytes] = {}
        self.heartbeats: dict[str, int] = {}


class Bed:
    """Stores and the nodes on them, in one thread."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.stores: dict[str, Place] = {"a": Place()}
        self.where: dict[str, str] = {}
        self.store = self.stores["a"]
        self.copies: dict[str, bytes] = {}
        self.members: dict[str, Member] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.deaf: set[str] = set()
        self.heads: list[bytes] = []
        self.saved: dict[str, Place] = {}
        self.held: dict[str, node_messages.FetchAssignment | None] = {}
        self.pending: list[tuple[str, node_messages.Command]] = []
        self.config = plain_config()

    def play(self, script: str) -> str:
        """Return the script with the trace of today."""
        for line in script.splitlines():
            if line.startswith("    "):
                continue
            self.lines.append(line)
            if line.startswith("config"):
                self._config(*line.split()[1:])
            elif line.startswith("> "):
                words = line[2:].split()
                if words[-1].startswith("at="):
                    self.now = float(words.pop()[3:])
                getattr(self, "_put_value" if words[0] == "put" else f"_{words[0]}")(*words[1:])
        return "\n".join(self.lines) + "\n"

    @property
    def facts(self) -> list[bytes]:
        """The facts in the store of the node at work."""
        return self.store.facts

    @property
    def values(self) -> dict[str, bytes]:
        """The documents in that store."""
        return self.store.values

    @property
    def heartbeats(self) -> dict[str, int]:
        """The heartbeats in that store."""
        return self.store.heartbeats

    def _enter_store(self, node: str) -> None:
        self.store = self.stores[self.where.get(node, "a")]

    def _tell(self, node: str, text: str) -> None:
        self.lines.append(f"    {node}: {text}")

    def _config(self, *words: str) -> None:
        has_successors = "successors" in words
        words = tuple(word for word in words if word != "successors")
        low, high, *restarts = (int(word) for word in words if "=" not in word)
        times = {name: float(value) for name, _, value in (word.partition("=") for word in words) if value}
        config = plain_config(low, high, max_restarts=restarts[0] if restarts else 0, has_successors=has_successors)
        self.config = replace(config, **times)  # type: ignore[arg-type]  # scripts name times only

    # --- members -----------------------------------------------------------------------------------------------------
    def _start(self, *nodes: str) -> None:
        for node in nodes:
            node_info, store_address = NodeInfo(node, 1, 1), StoreAddress(node, 1)
            self.members[node], commands = membership.begin(
                node, node_info=node_info, config=self.config, store_address=store_address, now=self.now
            )
            self._obey(node, commands)

    def _feed(self, node: str, event: node_messages.Event) -> None:
        self._enter_store(node)
        before = self.members[node].state
        self.members[node], commands = membership.decide(self.members[node], event, self.now)
        after = self.members[node].state
        if before != after:
            self._tell(node, f"{before} -> {after}")
        self._obey(node, commands)

    def _obey(self, node: str, commands: tuple[node_messages.Command, ...]) -> None:
        """Perform commands in order: what follows from the first of them comes after the last."""
        is_free = not self.pending
        self.pending += [(node, command) for command in commands]
        while is_free and self.pending:
            node, command = self.pending[0]
            self._enter_store(node)
            if isinstance(command, node_messages.ReadHead):
                self._head(node)
            elif isinstance(command, node_messages.Append):
                self._append(node, command.fact)
            elif isinstance(command, node_messages.CreateEntry):
                winner = self._create_slot(command.slot, to_json(command.claim))
                won = {None: "trimmed", to_json(command.claim): "won"}.get(winner, "lost")
                self._tell(node, f"claims slot {command.slot} for term {command.claim.term}: {won}")
                self._feed_entry(node, command.slot, winner)
            elif isinstance(command, node_messages.FetchAssignment) and node in self.held:
                self.held[node] = command
            elif isinstance(command, node_messages.FetchAssignment):
                value = self.values.get(assignment_key(command.slot, command.term, node))
                self._feed(node, node_messages.AssignmentRead(command.slot, command.term, value))
            elif isinstance(command, node_messages.KeepState | node_messages.PrepareRejoin):
                self._tend_copy(node, command)
            elif isinstance(command, node_messages.Coordinate):
                self._start_term(node, command)
            else:
                self._tell(node, _show(command))
                if isinstance(command, node_messages.StopCoordinating):
                    self.coordinators.pop(node, None)
            del self.pending[0]

    def _tend_copy(self, node: str, command: node_messages.KeepState | node_messages.PrepareRejoin) -> None:
        if isinstance(command, node_messages.KeepState):
            self._keep_copy(node)
            self._feed(node, node_messages.StateKept(command.prepared))
            return
        copy = self.members[node].job.copy
        if command.needs_copy:
            document = self.copies.get(node)
            copy = None if document is None else identify(document)
            if copy is not None and document is not None:
                self.values[copy_key(copy)] = document
        is_idle = self.members[node].state in (WAITING, READY)
        self._feed(node, node_messages.RejoinPrepared(copy, StoreAddress(node, 99) if is_idle else None))

    def _append(self, node: str, fact: Fact) -> None:
        is_lost = node in self.deaf
        self._tell(node, f"{'loses' if is_lost else 'says'} {_show(fact)}")
        if not is_lost:
            self.facts.append(to_json(fact))
            self._feed(node, node_messages.Appended(fact.sequence))

    def _feed_entry(self, node: str, slot: int, value: bytes | None) -> None:
        is_void = value is None
        start = self.values.get(LOG_START)
        self._feed(node, node_messages.EntryTrimmed(slot) if is_void else node_messages.EntryRead(slot, value, start))  # type: ignore[arg-type]

    def _create_slot(self, slot: int, value: bytes) -> bytes | None:
        """Create a slot as the driver does; returns what it holds, None where the slot was trimmed."""
        is_ours = self._put(slot, value)
        if not is_trimmed(slot, self.values.get(LOG_START)):
            return self.values[decision_key(slot)]
        if is_ours:
            del self.values[decision_key(slot)]
        return None

    def _keep_copy(self, node: str) -> None:
        member = self.members[node]
        document = self.values.get(state_key(member.log.state_slot, member.log.state_term))
        if not member.config.has_successors or not member.job.has_view or document is None:
            return
        kept = self.copies.get(node)
        if kept is None or not identify(document).is_older_than(identify(kept)):
            self.copies[node] = document

    def _put(self, slot: int, value: bytes) -> bool:
        return self.values.setdefault(decision_key(slot), value) == value

    def _head(self, node: str) -> None:
        self._feed(node, node_messages.HeadRead(self.values.get(HEAD), self.values.get(LOG_START)))

    def _oldhead(self) -> None:
        self.values[HEAD] = self.heads[0]

    def _drop(self, slot: str) -> None:
        del self.values[decision_key(int(slot))]

    def _follow(self, *nodes: str) -> None:
        for node in nodes or tuple(self.members):
            self._enter_store(node)
            while True:
                slot = self.members[node].log.next_slot
                if slot is None or self.members[node].state == OVER:
                    break
                is_void = is_trimmed(slot, self.values.get(LOG_START))
                value = self.values.get(decision_key(slot))
                if value is None and not is_void:
                    break
                self._feed_entry(node, slot, None if is_void else value)
                self._keep_copy(node)

    def _heartbeat(self, node: str, kind: str = "") -> None:
        self.heartbeats[node] = self.heartbeats.get(node, 0) + 1
        self._feed(node, node_messages.HeartbeatWritten(was_dropped=kind == "dropped"))

    def _look(self, node: str) -> None:
        watched = self.members[node].watched
        self._feed(node, node_messages.CoordinatorHeartbeatRead(watched, self.heartbeats.get(watched)))

    def _failing(self, node: str, kind: str = "") -> None:
        place = self.members[node].round.place
        self._feed(node, node_messages.WorkersFailing(0 if place is None else place.round, kind == "consequence"))

    def _gone(self, node: str, outcome: str) -> None:
        place = self.members[node].round.place
        number = 0 if place is None else place.round
        self._feed(node, node_messages.WorkersGone(number, outcome, StoreAddress(node, number + 1)))

    def _leave(self, node: str) -> None:
        self._feed(node, node_messages.Leaving("signal"))
        self._tell(node, f"has left: {self.members[node].has_left}")

    def _lose(self, node: str) -> None:
        self.deaf.add(node)

    def _answer(self, node: str, slot: str) -> None:
        self._feed(node, node_messages.EntryRead(int(slot), self.values[decision_key(int(slot))]))
        self._feed(node, node_messages.EntryTrimmed(int(slot)))
        self._feed(node, node_messages.AssignmentRead(int(slot), 1, None))
        self._feed(node, node_messages.TermEnded(0))
        self._feed(node, node_messages.CoordinatorHeartbeatRead("nobody", 1))

    def _hold(self, node: str) -> None:
        self.held[node] = None

    def _release(self, node: str) -> None:
        command = self.held.pop(node)
        if command is not None:
            self._obey(node, (command,))

    def _reconnect(self, node: str) -> None:
        self.deaf.discard(node)
        self._feed(node, node_messages.Reconnected())

    def _interrupt(self, node: str) -> None:
        self._feed(node, node_messages.Interrupted())
        if node in self.coordinators:
            self.coordinators[node] = core.interrupted(self.coordinators[node], self.now)

    def _entry(self, slot: str, *words: str) -> None:
        self._put(int(slot), " ".join(words).encode())

    def _put_value(self, key: str, *words: str) -> None:
        self.values[key] = " ".join(words).encode()
        if not words:
            del self.values[key]

    def _fact(self, *words: str) -> None:
        self.facts.append(" ".join(words).encode())

    def _dead(self, rank: str, status: str, round_id: str, node: str, store: str = "") -> None:
        """Tell a proof of death in the store of a node."""
        self._enter_store(node)
        number = int(round_id.partition("/")[0])
        self.facts.append(to_json(SeatDead("", round_id, "", number, int(rank), status, store)))

    def _change(self, node: str) -> None:
        self.values.clear()
        self.facts.clear()
        self._feed(node, node_messages.StoreChanged())

    def _go(self, store: str, *nodes: str) -> None:
        """Let nodes go to a store, which is empty before the first of them."""
        for node in nodes:
            self.where[node] = store
            self.stores.setdefault(store, Place())
            self.coordinators.pop(node, None)
            self._feed(node, node_messages.StoreChanged())

    def _at(self, store: str, *nodes: str) -> None:
        """Let nodes start in a store."""
        self.stores.setdefault(store, Place())
        for node in nodes:
            self.where[node] = store
        self._start(*nodes)

    def _die(self, node: str, listener: str = "") -> None:
        """Let a node be killed; its guardian tells that in the store of another node, or nobody is told."""
        del self.members[node]
        self.coordinators.pop(node, None)
        if listener:
            self._enter_store(listener)
            self.facts.append(to_json(Leave(node, LAST_SEQUENCE, DIED)))

    def _wipe(self) -> None:
        """Let the store be another one, in which nothing is; nobody is told."""
        self.values.clear()
        self.facts.clear()

    def _backup(self, name: str = "") -> None:
        self.saved[name] = deepcopy(self.store)

    def _restore(self, name: str = "") -> None:
        saved = deepcopy(self.saved[name])
        self.store.facts, self.store.values, self.store.heartbeats = saved.facts, saved.values, saved.heartbeats

    def _notice(self, *nodes: str) -> None:
        for node in nodes:
            self._enter_store(node)
            log = self.members[node].log
            slot, read = log.next_slot or 0, (log.former_entry, log.last_entry)
            there = [self.values.get(decision_key(before)) for before in (slot - 2, slot - 1)]
            raw = self.values.get(LOG_START)
            start = find_restart(log.next_slot, log.term, read, log.restart, there=there, raw=raw)
            self._raise_start(start)
            start = start and find_start(self.values[LOG_START])
            self._tell(node, f"notices: {'all is there' if start is None else _show(start)}")
            self._feed(node, node_messages.StoreRestored(start))

    def _elsewhere(self, node: str) -> None:
        self._feed(node, node_messages.StoreChanged())

    # --- coordinators ------------------------------------------------------------------------------------------------
    def _start_term(self, node: str, command: node_messages.Coordinate) -> None:
        self._tell(node, _show(command))
        state = None
        if command.state_slot >= 0:
            state = self.values.get(state_key(command.state_slot, command.state_term), b"")
        self.coordinators[node] = core.start_term(
            node,
            term=command.term,
            slot=command.slot,
            state=state,
            now=self.now,
            is_successor=self.where.get(node, "a") != "a",
            store_id=self.where.get(node, "a"),
            known_round=command.known_round,
            newest_round=command.newest_round,
            known_restarts=command.known_restarts,
            silent=command.silent,
            last_heartbeat=command.last_heartbeat,
        )
        if core.has_lost_state(self.coordinators[node]):
            entries = [(slot, self.values.get(decision_key(slot))) for slot in range(command.slot)]
            backup = self.values.get(find_newest_state(entries))
            known = core.take_backup(self.coordinators[node], backup, self.now)
            facts = self.facts[known.position :]
            self.coordinators[node] = core.skip(known, facts, len(self.facts), self.values.get(LOG_START))
            self._tell(node, f"complains: {known.complaint}")

    def _prepare(self, node: str) -> None:
        self._enter_store(node)
        known = self.coordinators[node]
        facts = self.facts[known.position :]
        self.coordinators[node] = known = core.receive(known, facts, len(self.facts), now=self.now, jitter=0.0)
        while known.wants is not None:
            copy = self.values.get(copy_key(known.wants))
            self.coordinators[node] = known = core.take_copy(known, copy, now=self.now, jitter=0.0)
        if known.complaint:
            self._tell(node, f"complains: {known.complaint}")
        if known.view is not None and known.job.config is not None and known.job.config.has_successors:
            self._tell(node, f"waits: {coordination.describe(known.view, self.now).missing}")
        proposal = slots.propose(known, self.now)
        if proposal is not None:
            self.values.update(proposal.documents)

    def _create(self, node: str) -> None:
        self._enter_store(node)
        while True:
            known = self.coordinators[node]
            proposal = slots.propose(known, self.now)
            if proposal is None:
                break
            self.values.update(proposal.documents)
            winner = self._create_slot(proposal.slot, proposal.entry)
            verb = "writes" if winner == proposal.entry else "can't write"
            self._tell(node, f"{verb} slot {proposal.slot}: {_show(read_decision(proposal.entry))}")
            start = self.values.get(LOG_START)
            self.coordinators[node], cleanup = slots.settle(known, winner, now=self.now, jitter=0.0, log_start=start)
            self.values.update(cleanup.documents)
            self.heads += [value for key, value in cleanup.documents.items() if key == HEAD]
            self._raise_start(cleanup.log_start)
            if all(self.values.get(key) == value for key, value in cleanup.expected.items()):
                for key in cleanup.deleted:
                    self.values.pop(key, None)
            self.coordinators[node] = slots.garbage_deleted(self.coordinators[node])
            if self.coordinators[node].is_over:
                self._end_term(node)
                break

    def _raise_start(self, start: LogStart | None) -> None:
        if start is not None and is_raised_by(start, self.values.get(LOG_START)):
            self.values[LOG_START] = to_json(start)

    def _end_term(self, node: str) -> None:
        known = self.coordinators[node]
        self._tell(node, "is no coordinator any more")
        if known.is_superseded:
            self._feed(node, node_messages.TermEnded(known.term))

    def _decide(self, node: str) -> None:
        self._prepare(node)
        self._create(node)

    def _watch(self, node: str) -> None:
        self._enter_store(node)
        known = self.coordinators[node]
        heartbeats = {name: self.heartbeats.get(name) for name in known.watched}
        self.coordinators[node] = core.observe(known, heartbeats, now=self.now, jitter=0.0)
        self.coordinators[node] = core.check(self.coordinators[node], self.values.get(HEAD), self.values.get(LOG_START))
        if self.coordinators[node].is_over:
            self._end_term(node)
            return
        self.values.update(core.make_documents(self.coordinators[node], self.now))
        self._create(node)

    def _refuse(self, node: str, count: str) -> None:
        """Let so many nodes of another protocol come, each of which takes a slot."""
        self._enter_store(node)
        for index in range(int(count)):
            self._fact(f'{{"protocol":3,"node":"f{len(self.facts)}","sequence":{index}}}')
        self._prepare(node)
        told = len(self.lines)
        self._create(node)
        del self.lines[told:]

    def _resign(self, node: str) -> None:
        self.coordinators[node] = core.resign(self.coordinators[node])
        self._create(node)

    def _move(self, node: str) -> None:
        self._enter_store(node)
        self.facts.append(to_json(FailoverRequest("b:29400", "a goes")))
        self._prepare(node)
        self._create(node)
