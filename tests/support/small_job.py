"""A coordinator and its nodes in one process: documents arrive at once, and time passes when a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_run.core.config import JobConfig
from elastic_run.core.job import coordination as coordinating
from elastic_run.core.job import membership
from elastic_run.core.job.documents import NodeInfo, Promise, RoundEnd, StoreAddress
from elastic_run.core.job.founding import MAJORITY, ONLY_ONE
from elastic_run.core.job.membership import Member, OrderRead, WorkersGone
from elastic_run.core.job.state import ENDED, Closed, Job, MayFound, Said
from elastic_run.records import replace

if TYPE_CHECKING:
    from typing import Any

    from elastic_run.core.job.documents import NodeState, Order
    from elastic_run.core.job.state import Event


class SmallJob:
    """A job whose first node coordinates.

    Args:
        choice: How a coordinator is chosen, a word of `founding`.
        config: The job's configuration.
        term: The coordinator's term.
    """

    def __init__(self, choice: str = ONLY_ONE, *, term: int = 1, **config: Any) -> None:
        self.config = JobConfig(**{"min_nodes": 2, "max_nodes": 2, "last_call_timeout": 0.0, **config})
        self.now = 100.0
        self.jitter = 0.0
        self.state = Job(Promise(term, "a"), choice, self.now)
        if choice != MAJORITY:
            self.state = coordinating.decide(self.state, [MayFound()], now=self.now)
        self.members: dict[str, Member] = {}
        self.commands: dict[str, list[membership.Command]] = {}
        self.said: dict[str, NodeState] = {}
        self.ordered: dict[str, Order] = {}

    def add(self, *names: str, **info: Any) -> None:
        """Let nodes come; `config` is a node's own configuration."""
        config = info.pop("config", self.config)
        for name in names:
            self.members[name] = self.make_member(name, config, **info)
            self.commands[name] = []
        self.exchange()

    @staticmethod
    def make_member(name: str, config: JobConfig, **info: Any) -> Member:
        """Return a node that has met no coordinator yet."""
        node_info = NodeInfo(**{"host": name, "pid": 1, "local_world_size": 1, **info})
        return Member(name, node_info, config, StoreAddress(name, 1))

    def move(self, name: str, member: Member) -> None:
        """Let a node of another job's coordinator come to this one."""
        self.members[name] = member
        self.commands[name] = []
        self.exchange()

    def feed(self, name: str, event: membership.Event) -> None:
        """Let something happen to a node."""
        self._feed(name, event)
        self.exchange()

    def end(self, name: str, outcome: str, **report: Any) -> None:
        """Let the workers of a node end."""
        self.end_quietly(name, outcome, **report)
        self.exchange()

    def end_quietly(self, name: str, outcome: str, **report: Any) -> None:
        """Let the workers of a node end, of which the coordinator hears later."""
        started = self.members[name].started
        assert started is not None
        details = {key: report.pop(key) for key in ("verdict", "detail", "ends") if key in report}
        store = replace(self.members[name].store_address, port=self.members[name].store_address.port + 1)
        self._feed(name, WorkersGone(started.number, RoundEnd(outcome, report or None, **details), store))

    def close(self, name: str, how: str = ENDED, detail: str = "", *, returns: bool = False) -> None:
        """End a node's connection; a node that returns opens another one at once."""
        self.said.pop(name, None)
        self.ordered.pop(name, None)
        if not returns:
            del self.members[name]
        self.decide(Closed(name, how, detail))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.decide()

    def decide(self, *events: Event) -> None:
        """Let the coordinator take in events."""
        self.state = coordinating.decide(self.state, events, now=self.now, jitter=self.jitter)
        self.exchange()

    def exchange(self, away: tuple[str, ...] = ()) -> None:
        """Deliver all documents, until nothing changes any more."""
        while True:
            states = {
                name: membership.make_state(member, self.now, is_first=name not in self.said)
                for name, member in self.members.items()
                if name not in away and not member.is_over
            }
            news = [Said(state) for name, state in states.items() if self.said.get(name) != replace(state, memory=None)]
            self.said.update({event.state.node: replace(event.state, memory=None) for event in news})
            if news:
                self.state = coordinating.decide(self.state, news, now=self.now, jitter=self.jitter)
            orders = {name: coordinating.make_order(self.state, name) for name in states}
            fresh = {name: order for name, order in orders.items() if self.ordered.get(name) != order}
            self.ordered.update(fresh)
            for name, order in fresh.items():
                self._feed(name, OrderRead(order))
            if not (news or fresh):
                return

    def _feed(self, name: str, event: membership.Event) -> None:
        self.members[name], commands = membership.decide(self.members[name], event, self.now)
        self.commands[name] += commands

    def told(self, name: str) -> list[str]:
        """Return the kinds of commands that a node has got, in order."""
        return [type(command).__name__ for command in self.commands[name]]
