"""An agent of a simulated job: the real decisions of `core.job`, and as little of a driver as they need."""

# ruff: noqa: D102 - what a method of the simulation does, its name says
from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.core.job import coordination as coordinating
from elastic_run.core.job import coordinator_search as discovering
from elastic_run.core.job import membership
from elastic_run.core.job.documents import NodeInfo, Promise, Round, RoundEnd, StoreAddress
from elastic_run.core.job.founding import LEASE
from elastic_run.core.job.membership import Ended, Formed, Halted, Member, Refused, Search, WorkersFailing, WorkersGone
from elastic_run.core.job.restart_policy import DONE, FAILED, STOPPED
from elastic_run.core.job.state import BROKEN, LEASE_SHARE, SILENT, Job, LeaseRenewed, StepDown
from elastic_run.records import replace
from tests.coordination.lease_store import TIME_TO_LIVE
from tests.coordination.properties import ACTIVE, check_ends, check_formed, check_started

if TYPE_CHECKING:
    from elastic_run.core.config import JobConfig
    from elastic_run.core.job.state import Event
    from tests.coordination.lease_store import Reading
    from tests.coordination.world import Link, World


class Agent:
    """A launcher on a host."""

    def __init__(self, world: World, host: int, name: str, config: JobConfig) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.is_alive = True
        self.had_power = True
        self.frozen_until = 0.0
        self.rate = world.random.uniform(0.9, 1.1)
        self.offset = world.random.uniform(0.0, 1000.0)
        self.stores = 0
        self.is_fenced = world.random.random() < 0.5
        info = NodeInfo(f"host{host}", world.count, 1)
        self.member = Member(name, info, config, self.open_store())
        own = f"e{host}" if host < world.endpoints and world.choice != LEASE else ""
        self.discovery = discovering.begin(name, world.addresses, own, TIME_TO_LIVE)
        self.wakes_at = 0.0
        self.link: Link | None = None
        self.lost_at: float | None = None
        #: The connections of the nodes that have said something.
        self.links: dict[str, Link] = {}
        self.coordination: Job | None = None
        self.begun = 0.0
        self.started_by: tuple[Round, ...] = ()
        self.verdict: str | None = None
        self.runs: Round | None = None
        self.ran: set[Round] = set()

    @property
    def clock(self) -> float:
        """Its own monotonic seconds: no two agents' clocks agree or run equally fast."""
        return self.offset + self.world.now * self.rate

    @property
    def acts(self) -> bool:
        return self.is_alive and self.world.now >= self.frozen_until

    @property
    def address(self) -> str:
        return self.name if self.world.choice == LEASE else self.discovery.own

    def has_done(self, started: Round) -> bool:
        """Whether its workers of a round have all succeeded."""
        end = self.member.ended
        return self.member.started == started and end is not None and end.outcome == DONE

    def open_store(self) -> StoreAddress:
        self.stores += 1
        return StoreAddress(f"{self.name}", self.stores)

    # --- which agent coordinates -------------------------------------------------------------------------------------
    @property
    def standing(self) -> int:
        if self.coordination is None:
            return discovering.compute_node_standing(self.member)
        return discovering.compute_standing(self.coordination)

    def discover(self, fact: discovering.Fact = None) -> None:
        if self.verdict is not None or not self.is_alive:
            return
        self.discovery, actions = discovering.decide(self.discovery, fact, self.clock, standing=self.standing)
        for action in actions:
            if isinstance(action, discovering.Ask):
                self._ask(action.endpoint)
            elif isinstance(action, discovering.AcquireLease):
                self._acquire(action.instead_of)
            elif isinstance(action, discovering.BecomeCoordinator):
                self.begin(action.dead, action.silent)
            elif isinstance(action, discovering.Follow):
                self.world.connect(self, action.endpoint)
            elif isinstance(action, discovering.WaitUntil):
                if action.at != self.wakes_at:
                    self.wakes_at = action.at
                    seconds = (action.at - self.clock) / self.rate + 0.001
                    self.world.after(seconds, self.world.wake, self, self._look_around)
            else:
                self.coordinate([action])

    def _look_around(self) -> None:
        self.wakes_at = 0.0
        self.discover()

    def _ask(self, endpoint: str) -> None:
        if endpoint == discovering.LEASE_STORE:
            self.world.lease.call(self, lambda store: store.read(), self._read_lease)
        else:
            self.world.ask(self, endpoint)

    def _acquire(self, instead_of: str) -> None:
        at = self.clock
        self.world.lease.call(
            self, lambda store: store.acquire(self.name, instead_of), lambda reading: self._read_lease(reading, at)
        )

    def _read_lease(self, reading: Reading | None, at: float | None = None) -> None:
        if reading is None:
            answer = discovering.Answer(discovering.LEASE_STORE, SILENT)
        elif reading.holder == self.name and at is not None:
            self.lease = (reading.term, at + LEASE_SHARE * TIME_TO_LIVE)
            others = [name for name in reading.coordinators if name != self.name]
            answer = discovering.Answer(
                discovering.LEASE_STORE,
                discovering.COORDINATES,
                self.name,
                standing=discovering.KNOWS_ROUND if others else discovering.KNOWS_NOTHING,
            )
            self.world.after(0.01, self.world.lease.tell_others, self, reading.term, others)
        else:
            role = discovering.FOLLOWS if reading.holder else discovering.SEARCHES
            answer = discovering.Answer(discovering.LEASE_STORE, role, reading.holder, to=reading.holder)
        self.discover(answer)

    lease = (0, 0.0)

    # --- the node's side ---------------------------------------------------------------------------------------------
    def feed(self, event: membership.Event) -> None:
        before = self.member
        self.member, commands = membership.decide(self.member, event, self.clock)
        for command in commands:
            self.perform(command)
        if self.member != before or isinstance(event, membership.OrderRead):
            self.say()

    def perform(self, command: membership.Command) -> None:
        world, started = self.world, self.member.started
        if isinstance(command, Formed):
            assert started is not None
            check_formed(world, self, started, command.assignment)
            self.runs = started
            self.ran.add(started)
            self.train(started)
        elif isinstance(command, Halted):
            world.after(world.random.choice((0.01, 0.1, 1.0, 5.0)), self.stop_workers, self.runs, STOPPED)
        elif isinstance(command, Ended):
            self.verdict = command.end.verdict
            world.say("end", self.name, command.end.verdict)
            self.runs = None
        elif isinstance(command, Refused):
            self.verdict = "refused"
            self.runs = None
        elif isinstance(command, Search) and self.link is not None:
            world.close_at_node(self.link, BROKEN, command.to)

    def train(self, started: Round) -> None:
        pick = self.world.random
        if pick.random() < 0.2:
            self.world.after(pick.uniform(0.1, 20.0), self.fail, started)
        elif pick.random() < 0.02:
            self.world.after(pick.uniform(1.0, 60.0), self.stop_workers, started, DONE)

    def fail(self, started: Round) -> None:
        if self.is_alive and self.runs == started:
            self.world.wake(self, lambda: self.feed(WorkersFailing(started.number)))
            self.world.after(0.05, self.stop_workers, started, FAILED)

    def stop_workers(self, started: Round | None, outcome: str) -> None:
        """The workers of a round have ended."""
        if not self.is_alive or started is None or self.runs != started:
            return
        self.runs = None
        self.world.wake(self, lambda: self._tell_gone(started, outcome))

    def _tell_gone(self, started: Round, outcome: str) -> None:
        report = {"exit_code": 1, "severity": 0, "signature": "boom", "uptime": 100.0} if outcome == FAILED else None
        self.feed(WorkersGone(started.number, RoundEnd(outcome, report), self.open_store()))

    def say(self) -> None:
        """Send the newest state, if it differs from the last one that was sent on this connection."""
        link = self.link
        if link is None or self.member.is_over:
            return
        is_first = "up" not in link.sent
        state = membership.make_state(self.member, self.clock, is_first=is_first, dead=self.discovery.dead)
        if link.sent.get("up") == state:
            return
        link.sent["up"] = replace(state, memory=None)
        self.world.post(link, "up", state)

    def lose_coordinator(self, how: str, to: str = "") -> None:
        self.link = None
        self.lost_at = self.world.now
        self.world.wake(self, lambda: self.discover(discovering.CoordinatorLost(how, to)))

    # --- the coordinator's side --------------------------------------------------------------------------------------
    def begin(self, dead: str, silent: str) -> None:
        world = self.world
        term, until = self.lease if world.choice == LEASE else (self.member.promise.term + 1, float("inf"))
        world.say("candidate", self.name, term, dead)
        self.begun = self.clock
        self.coordination = Job(
            Promise(term, self.name),
            world.choice,
            self.begun,
            dead=dead,
            silent=silent,
            started_by=self.started_by,
            lease_until=until,
        )
        world.connect(self, self.address)
        assert self.link is not None
        world.read_at_once(self.link)
        if world.choice == LEASE:
            world.after(0.5, self.renew, self.begun)

    def renew(self, since: float) -> None:
        """Renew the lease thrice in its time to live; a frozen agent does so later, one that steps down no more."""
        if self.is_alive and self.coordination is not None and self.begun == since:
            if self.acts:
                at, term = self.clock, self.coordination.promise.term
                self.world.lease.call(
                    self,
                    lambda store: store.renew(self.name, term),
                    lambda reading: self._read_renewal(reading, at, since),
                )
            self.world.after(TIME_TO_LIVE / 3, self.renew, since)

    def _read_renewal(self, reading: Reading | None, at: float, since: float) -> None:
        if reading is None or self.coordination is None or self.begun != since:
            return
        if reading.holder == self.name:
            self.coordinate([LeaseRenewed(at + LEASE_SHARE * TIME_TO_LIVE, reading.term)])
        else:
            self.coordinate([StepDown(reading.holder)])

    def coordinate(self, events: list[Event]) -> None:
        before, world = self.coordination, self.world
        if before is None or not self.acts:
            return
        standing = self.standing
        after = coordinating.decide(before, events, now=self.clock, jitter=world.random.random())
        self.coordination = after
        self.started_by = after.started_by
        if before.phase in ACTIVE and after.phase != before.phase and after.round == before.round:
            check_ends(world.agents, before, after)
        if after.proposed is not None and (before.proposed is None or before.proposed.round != after.proposed.round):
            world.at_turn(self)
        if after.round is not None and after.round in after.started_by and after.round not in before.started_by:
            assert before.proposed is not None
            check_started(world, self, after, before.proposed)
            world.at_turn(self)
        for link in list(self.links.values()):
            order = coordinating.make_order(after, link.node.name)
            if link.sent.get("down") != order:
                link.sent["down"] = order
                world.post(link, "down", order)
        if after.is_over:
            self.stop_coordinating()
        else:
            world.set_timer(self)
            if self.standing != standing:
                self.discover()

    def stop_coordinating(self) -> None:
        """Close the connections, once the last orders are sent."""
        self.world.say("no coordinator", self.name)
        self.coordination = None
        links, self.links = list(self.links.values()), {}
        for link in links:
            self.world.after(0.2, self.world.close_at_host, link, BROKEN)
