"""Which agent coordinates: what an agent asks, whom it follows, and when it coordinates itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job import coordinator_search as discovering
from elastic_run.core.job.coordinator_search import (
    COORDINATES,
    FIRST_RETRY,
    FOLLOWS,
    KNOWS_NOTHING,
    KNOWS_ROUND,
    LEASE_STORE,
    REFUSES,
    RETRY,
    RUNS_ROUND,
    SEARCHES,
    AcquireLease,
    Answer,
    Ask,
    BecomeCoordinator,
    CoordinatorLost,
    Follow,
    WaitUntil,
)
from elastic_run.core.job.state import BROKEN, ENDED, SILENT, MayFound, StepDown
from elastic_run.records import replace

if TYPE_CHECKING:
    from elastic_run.core.job.coordinator_search import Action, Fact

_LEASE = 6.0


class _Agent:
    """An agent whose facts come from a test."""

    def __init__(self, *endpoints: str, own: str = "") -> None:
        self.state = replace(discovering.begin("me", endpoints, own, _LEASE), pause=RETRY)
        self.now = 100.0

    def tell(self, fact: Fact = None, *, after: float = 0.0, standing: int = KNOWS_NOTHING) -> list[Action]:
        """Give it a fact some seconds later, and return what it does."""
        self.now += after
        self.state, actions = discovering.decide(self.state, fact, self.now, standing=standing)
        return list(actions)

    def follow(self, endpoint: str, node: str = "x") -> None:
        """Let it follow the agent at an endpoint."""
        actions = self.tell()
        while actions != [Follow(endpoint)]:
            ask = actions[-1]
            assert isinstance(ask, Ask)
            is_there = ask.endpoint == endpoint
            answer = Answer(endpoint, COORDINATES, node) if is_there else Answer(ask.endpoint, REFUSES)
            actions = self.tell(answer)


def test_the_pauses_between_questions_grow() -> None:
    """Agents that start together find each other at once, and a port that nobody serves is asked twice a second."""
    state, actions = discovering.decide(discovering.begin("me", ("a",), "", _LEASE), None, 100.0)
    pauses = []
    now = 100.0
    for _ in range(7):
        state, actions = discovering.decide(state, Answer("a", REFUSES), now)
        wait = actions[-1]
        assert isinstance(wait, WaitUntil)
        pauses.append(round(wait.at - now, 2))
        now = wait.at
        state, actions = discovering.decide(state, None, now)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]


# --- one endpoint ----------------------------------------------------------------------------------------------------
def test_the_owner_of_the_only_endpoint_coordinates() -> None:
    """It asks nobody, and again coordinates when its coordination is over."""
    agent = _Agent("a", own="a")
    assert agent.tell() == [BecomeCoordinator(""), MayFound()]
    assert discovering.make_answer(agent.state, RUNS_ROUND) == Answer("a", COORDINATES, "me", "", RUNS_ROUND)
    assert agent.tell(after=99.0, standing=KNOWS_ROUND) == []
    assert agent.tell(CoordinatorLost(BROKEN)) == [BecomeCoordinator(""), MayFound()]


def test_others_ask_the_only_endpoint_until_its_agent_coordinates() -> None:
    """A port that refuses and an agent that searches are asked again after a pause."""
    agent = _Agent("a")
    assert agent.tell() == [Ask("a")]
    assert agent.tell() == []
    assert agent.tell(Answer("b", COORDINATES, "x")) == []  # nobody has asked there
    assert agent.tell(Answer("a", REFUSES)) == [WaitUntil(100.5)]
    assert agent.tell(after=0.25) == [WaitUntil(100.5)]
    assert agent.tell(after=0.25) == [Ask("a")]
    assert agent.tell(Answer("a", SEARCHES, "x")) == [WaitUntil(101.0)]
    assert agent.tell(after=0.5) == [Ask("a")]
    assert agent.tell(Answer("a", COORDINATES, "x")) == [Follow("a")]
    assert agent.tell(after=99.0) == []
    assert agent.tell(CoordinatorLost(ENDED)) == [Ask("a")]
    assert agent.tell(Answer("a", REFUSES))[:1] == [WaitUntil(agent.now + FIRST_RETRY)]


# --- several endpoints -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("own", "asked"), [("", ["a", "b", "c"]), ("a", []), ("b", ["a"]), ("c", ["a", "b"])], ids=["none", "a", "b", "c"]
)
def test_a_host_coordinates_where_no_endpoint_before_its_own_does(own: str, asked: list[str]) -> None:
    """It asks those before its own in order; an agent that hosts none asks all, and then pauses."""
    agent = _Agent("a", "b", "c", own=own)
    actions = agent.tell()
    for name in asked:
        assert actions == [Ask(name)]
        actions = agent.tell(Answer(name, REFUSES))
    others = [name for name in "abc" if name != own]
    assert actions == ([BecomeCoordinator(""), Ask(others[0])] if own else [WaitUntil(100.5)])


def test_an_agent_follows_whom_an_endpoint_follows() -> None:
    """A redirection is followed once; an agent that is redirected to its own endpoint goes on asking."""
    agent = _Agent("a", "b", "c", own="c")
    agent.tell()
    assert agent.tell(Answer("a", FOLLOWS, "x", to="b")) == [Ask("b")]
    assert agent.tell(Answer("b", FOLLOWS, "y", to="c"))[0] == BecomeCoordinator("")
    agent = _Agent("a")
    agent.tell()
    assert agent.tell(Answer("a", FOLLOWS, "x", to="z")) == [Ask("z")]
    assert agent.tell(Answer("z", FOLLOWS, "y", to="w")) == [WaitUntil(100.5)]
    agent.tell(after=0.5)
    agent.tell(Answer("a", FOLLOWS, "x", to="z"))
    assert agent.tell(Answer("z", COORDINATES, "z")) == [Follow("z")]
    assert discovering.make_answer(agent.state, KNOWS_ROUND) == Answer("", FOLLOWS, "me", "z", KNOWS_ROUND)


@pytest.mark.parametrize(
    ("how", "answer", "dead"),
    [
        (ENDED, Answer("a", REFUSES), "x"),
        (ENDED, Answer("a", SEARCHES, "other"), "x"),
        (ENDED, Answer("a", SEARCHES, "x"), ""),
        (ENDED, Answer("a", SILENT), ""),
        (BROKEN, Answer("a", REFUSES), "x"),
        (BROKEN, Answer("a", SEARCHES, "x"), ""),
    ],
)
def test_a_coordinator_is_dead_by_two_proofs(how: str, answer: Answer, dead: str) -> None:
    """Its connection has ended, and then its port refuses or another node answers there."""
    agent = _Agent("a", "b", own="b")
    agent.follow("a")
    assert agent.tell(CoordinatorLost(how)) == [Ask("a")]
    assert agent.tell(answer) == [BecomeCoordinator(dead), Ask("a")]


def test_an_agent_that_listens_in_the_place_of_the_coordinator_has_the_second_proof() -> None:
    """Agents of one machine: who gets the port of the one that has ended knows that nobody listens there."""
    agent = _Agent("a", "b", own="")
    agent.follow("a")
    agent.state = replace(agent.state, own="a")
    assert agent.tell(CoordinatorLost(ENDED))[0] == BecomeCoordinator("x")


def test_a_silent_coordinator_is_not_asked_first() -> None:
    """The question to it would only cost time; an order to search that names a coordinator is followed."""
    agent = _Agent("a", "b", "c")
    agent.follow("b")
    assert agent.tell(CoordinatorLost(SILENT)) == [Ask("a")]
    assert agent.tell(Answer("a", REFUSES)) == [Ask("c")]
    assert agent.tell(Answer("c", COORDINATES, "z")) == [Follow("c")]
    assert agent.tell(CoordinatorLost(BROKEN, to="a")) == [Ask("a")]


def test_a_silent_coordinator_is_asked_last() -> None:
    """A candidate asks the others before it, and looks for them before it takes its next turn."""
    agent = _Agent("a", "b", "c", own="b")
    agent.follow("a")
    assert agent.tell(CoordinatorLost(SILENT)) == [BecomeCoordinator("", "x"), Ask("c")]
    assert agent.tell(Answer("c", SEARCHES, "z"), standing=KNOWS_ROUND) == [Ask("a")]
    assert agent.tell(CoordinatorLost(BROKEN)) == [Ask("c")]
    assert agent.tell(Answer("c", SEARCHES, "z"))[0] == BecomeCoordinator("", "x")


def test_a_redirect_to_a_silent_coordinator_is_not_followed() -> None:
    """An agent that has not noticed the silence yet would send the asker back, where the answer takes its time."""
    agent = _Agent("a", "b", "c", own="c")
    agent.follow("a")
    assert agent.tell(CoordinatorLost(SILENT)) == [Ask("b")]
    assert agent.tell(Answer("b", FOLLOWS, "y", to="a"))[0] == BecomeCoordinator("", "x")


def test_a_new_coordinator_knows_that_the_one_before_was_silent() -> None:
    """So it does not wait for that node."""
    agent = _Agent("a", "b", own="b")
    agent.follow("a", "x")
    assert agent.tell(CoordinatorLost(SILENT)) == [BecomeCoordinator("", "x"), Ask("a")]


@pytest.mark.parametrize(
    ("answer", "standing", "leaves"),
    [
        (Answer("a", COORDINATES, "x"), KNOWS_NOTHING, True),
        (Answer("a", COORDINATES, "x"), KNOWS_ROUND, False),
        (Answer("a", COORDINATES, "x", "", KNOWS_ROUND), KNOWS_ROUND, True),
        (Answer("a", FOLLOWS, "x", "b", KNOWS_ROUND), KNOWS_NOTHING, False),
        (Answer("a", SEARCHES, "x", "", KNOWS_ROUND), KNOWS_NOTHING, False),
        (Answer("a", SILENT), KNOWS_NOTHING, False),
    ],
)
def test_a_candidate_leaves_for_one_that_has_more(answer: Answer, standing: int, *, leaves: bool) -> None:
    """It follows a coordinator that knows more of the job, or as much at an endpoint before its own."""
    agent = _Agent("a", "b", "c", own="b")
    agent.tell()
    assert agent.tell(Answer("a", REFUSES)) == [BecomeCoordinator(""), Ask("a")]
    after = [StepDown("a"), Follow("a")] if leaves else [Ask("c")]
    assert agent.tell(answer, standing=standing) == after


def test_a_candidate_stays_beside_a_later_one_and_while_it_runs_a_round() -> None:
    """It leaves for a later endpoint only if that has more, and asks nobody while it runs a round."""
    agent = _Agent("a", "b", own="a")
    assert agent.tell() == [BecomeCoordinator(""), Ask("b")]
    assert agent.tell(Answer("b", COORDINATES, "x"), standing=KNOWS_ROUND) == [WaitUntil(100.5)]
    assert agent.tell(Answer("b", REFUSES), standing=KNOWS_ROUND) == [WaitUntil(100.5)]  # late: it goes on waiting
    assert agent.tell(after=0.5, standing=KNOWS_ROUND) == [Ask("b")]
    assert agent.tell(Answer("b", COORDINATES, "x", "", RUNS_ROUND), standing=RUNS_ROUND) == []
    assert agent.tell(after=9.0, standing=RUNS_ROUND) == []
    assert agent.tell(standing=KNOWS_ROUND) == [WaitUntil(110.0)]
    assert agent.tell(after=0.5, standing=KNOWS_ROUND) == [Ask("b")]
    answer = Answer("b", COORDINATES, "x", "", RUNS_ROUND)
    assert agent.tell(answer, standing=KNOWS_ROUND) == [StepDown("b"), Follow("b")]


def test_a_coordinator_without_majority_asks_all_others_before_it_coordinates_again() -> None:
    """Another one may have gone on meanwhile, at a later endpoint."""
    agent = _Agent("a", "b", "c", own="a")
    agent.tell()
    assert agent.tell(CoordinatorLost(BROKEN)) == [Ask("b")]
    assert agent.tell(Answer("b", REFUSES)) == [Ask("c")]
    assert agent.tell(Answer("c", SILENT)) == [BecomeCoordinator(""), Ask("b")]


@pytest.mark.parametrize(
    ("own", "answer", "at_once", "later"),
    [
        ("a", Answer("b", REFUSES), True, True),
        ("a", Answer("b", SEARCHES, "x"), True, True),
        ("a", Answer("b", COORDINATES, "x"), True, True),
        ("a", Answer("b", FOLLOWS, "x", "c", KNOWS_ROUND), False, False),
        ("a", Answer("b", FOLLOWS, "x", "a", KNOWS_ROUND), False, False),
        ("a", Answer("b", SILENT), False, True),
        ("b", Answer("a", REFUSES), False, True),
        ("b", Answer("a", SILENT), False, True),
    ],
)
def test_who_may_found_a_job(own: str, answer: Answer, *, at_once: bool, later: bool) -> None:
    """The first endpoint at once when nobody knows of a job; with one out of reach, or another endpoint, later."""
    agent = _Agent("a", "b", own=own)
    actions = agent.tell()
    if own == "b":
        actions = agent.tell(answer)
    assert actions[0] == BecomeCoordinator("")
    assert (MayFound() in agent.tell(answer)) == at_once
    agent.tell(after=2 * _LEASE)
    assert (MayFound() in agent.tell(answer)) == later


# --- a lease ---------------------------------------------------------------------------------------------------------
def test_the_store_of_the_lease_redirects_to_its_holder() -> None:
    """An agent that finds nobody there asks the store again; a store out of reach too."""
    agent = _Agent(LEASE_STORE)
    assert agent.tell() == [Ask(LEASE_STORE)]
    assert agent.tell(Answer(LEASE_STORE, FOLLOWS, "x", "a")) == [Ask("a")]
    assert agent.tell(Answer("a", SILENT)) == [WaitUntil(100.5)]
    assert agent.tell(after=0.5) == [Ask(LEASE_STORE)]
    assert agent.tell(Answer(LEASE_STORE, SILENT)) == [WaitUntil(101.0)]
    agent.tell(after=0.5)
    agent.tell(Answer(LEASE_STORE, FOLLOWS, "x", "a"))
    assert agent.tell(Answer("a", COORDINATES, "x")) == [Follow("a")]


def test_a_lease_that_nobody_holds_is_acquired() -> None:
    """The agent that gets it coordinates, the others follow that one."""
    agent = _Agent(LEASE_STORE)
    agent.tell()
    assert agent.tell(Answer(LEASE_STORE, SEARCHES)) == [AcquireLease("")]
    assert agent.tell(Answer(LEASE_STORE, FOLLOWS, "x", "a")) == [Ask("a")]
    assert agent.tell(Answer("a", REFUSES)) == [WaitUntil(100.5)]
    agent.tell(after=0.5)
    agent.tell(Answer(LEASE_STORE, SEARCHES))
    assert agent.tell(Answer(LEASE_STORE, COORDINATES, "me")) == [BecomeCoordinator(""), MayFound()]
    assert agent.tell(after=9.0, standing=RUNS_ROUND) == []
    assert agent.tell(CoordinatorLost(BROKEN, to="b")) == [Ask("b")]
    assert agent.tell(Answer("b", REFUSES)) == [Ask(LEASE_STORE)]
    assert agent.tell(Answer(LEASE_STORE, FOLLOWS, "me", "own")) == [AcquireLease("me")]


def test_a_connection_that_was_reset_takes_no_lease_from_its_holder() -> None:
    """A proxy may have died beside a living holder: others wait until its lease has run out."""
    agent = _Agent(LEASE_STORE)
    agent.tell()
    agent.tell(Answer(LEASE_STORE, FOLLOWS, "x", "a"))
    agent.tell(Answer("a", COORDINATES, "x"))
    agent.tell(CoordinatorLost(BROKEN))
    assert agent.tell(Answer("a", REFUSES)) == [Ask(LEASE_STORE)]
    assert agent.tell(Answer(LEASE_STORE, FOLLOWS, "x", "a")) == [Ask("a")]


def test_the_lease_of_a_dead_holder_is_acquired_instead_of_it() -> None:
    """Nobody waits for the lease of an agent that is proved dead to run out."""
    agent = _Agent(LEASE_STORE)
    agent.tell()
    agent.tell(Answer(LEASE_STORE, FOLLOWS, "x", "a"))
    agent.tell(Answer("a", COORDINATES, "x"))
    assert agent.tell(CoordinatorLost(ENDED)) == [Ask("a")]
    assert agent.tell(Answer("a", REFUSES)) == [Ask(LEASE_STORE)]
    assert agent.tell(Answer(LEASE_STORE, FOLLOWS, "x", "a")) == [AcquireLease("x")]
    answer = Answer(LEASE_STORE, COORDINATES, "me", "", KNOWS_ROUND)
    assert agent.tell(answer) == [BecomeCoordinator("x"), WaitUntil(112.0)]
    assert agent.tell(after=12.0) == [MayFound()]


def test_an_agent_that_listens_in_the_place_of_its_coordinator_has_the_proof() -> None:
    """The port of the coordinator before is its own now, so that one is dead."""
    agent = _Agent("a:1")
    agent.follow("a:1")
    agent.state = replace(agent.state, own="a:1")
    actions = agent.tell(CoordinatorLost(ENDED))
    while isinstance(actions[0], Ask):
        actions = agent.tell(Answer(actions[0].endpoint, REFUSES))
    assert actions[0] == BecomeCoordinator("x")
