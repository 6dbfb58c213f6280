"""A coordinator and its nodes: rounds, refusals and ends, with documents that arrive at once."""

from __future__ import annotations

import pytest

from elastic_run.core.config import JobConfig, Window
from elastic_run.core.job import coordination as coordinating
from elastic_run.core.job import membership
from elastic_run.core.job.codec import MessageError, encode, from_document, to_message
from elastic_run.core.job.coordination import LARGEST_MEMORY, write_memory
from elastic_run.core.job.coordinator_search import (
    KNOWS_NOTHING,
    KNOWS_ROUND,
    RUNS_ROUND,
    compute_node_standing,
    compute_standing,
)
from elastic_run.core.job.documents import (
    ErrorCount,
    NodeEnds,
    NodeState,
    Order,
    Promise,
    Proposal,
    Round,
    RoundEnd,
    StoreAddress,
)
from elastic_run.core.job.founding import LEASE, MAJORITY, describe_majority, find_base, list_needed, may_form
from elastic_run.core.job.membership import (
    CutOff,
    Ended,
    Formed,
    Halted,
    Leaving,
    OrderRead,
    Refused,
    Search,
    WorkersFailing,
    make_state,
)
from elastic_run.core.job.state import (
    BROKEN,
    HALTING,
    PAUSING,
    RUNNING,
    SILENT,
    Closed,
    Job,
    LeaseRenewed,
    MayFound,
    Said,
    StepDown,
)
from elastic_run.records import replace
from tests.support.small_job import SmallJob

_FAILED = {"exit_code": 1, "severity": 0, "signature": "boom", "uptime": 100.0, "summary": "ValueError: boom"}


def _halts(job: SmallJob, name: str) -> list[tuple[str, str]]:
    return [(one.reason, one.detail) for one in job.commands[name] if isinstance(one, Halted)]


def _end(job: SmallJob, name: str) -> Ended:
    return next(one for one in job.commands[name] if isinstance(one, Ended))


def test_a_round_forms_and_succeeds() -> None:
    """Two nodes start one round, each with its rank, and end with success when all workers have."""
    job = SmallJob()
    job.add("a", "b")
    places = [one.assignment for name in "ab" for one in job.commands[name] if isinstance(one, Formed)]
    assert [(place.group_rank, place.world_size, place.master.host) for place in places] == [(0, 2, "a"), (1, 2, "a")]
    job.end("a", "done")
    assert job.state.phase == RUNNING
    job.end("b", "done")
    assert _end(job, "b").end.verdict == "success"
    assert coordinating.next_at(job.state, job.now) is None
    assert coordinating.decide(job.state, [], now=job.now).end == job.state.end


def test_a_failure_restarts_all_nodes_and_uses_the_budget() -> None:
    """The other node stops, the next round counts one restart, and the failure after the last restart ends the job."""
    job = SmallJob(max_restarts=1, max_backoff=0.0)
    job.add("a", "b")
    job.feed("b", WorkersFailing(1))
    assert _halts(job, "a") == [("failure", "a worker failed on b")]
    job.end("b", "failed", **_FAILED)
    job.end("a", "stopped")
    assert [one.assignment.restart_count for one in job.commands["a"] if isinstance(one, Formed)] == [0, 1]
    job.feed("b", WorkersFailing(2, is_secondary=True))
    job.feed("b", WorkersFailing(2))
    job.end("b", "failed", ends=NodeEnds(1, errors=(ErrorCount(1, 1),) * 20), **_FAILED)
    job.end("a", "stopped", **_FAILED)
    assert (_end(job, "a").end.verdict, _end(job, "a").end.exit_code) == ("worker_failed", 1)
    assert len(job.state.attempts) == 1


def test_a_restart_may_wait() -> None:
    """After an early failure the job pauses, and then forms the next round."""
    job = SmallJob(max_restarts=5, min_uptime=50.0)
    early = {**_FAILED, "uptime": 1.0}
    job.add("a", "b")
    for signature in ("x", "y"):
        job.end("b", "failed", **{**early, "signature": signature})
        job.end("a", "stopped")
    assert job.state.phase == PAUSING
    at = coordinating.next_at(job.state, job.now)
    assert at is not None
    job.wait(at - job.now)
    assert job.state.phase == RUNNING


def test_a_killed_agent_is_lost_at_once_and_a_silent_one_after_the_lease() -> None:
    """The end of a connection that the guardian closed halts the round at once; a broken one may come back."""
    job = SmallJob(max_nodes=3)
    job.add("a", "b", "c")
    job.close("c", BROKEN, returns=True)
    assert (job.state.phase, dict(job.state.away)) == (RUNNING, {})
    job.close("c", BROKEN)
    job.wait(5.9)
    assert job.state.phase == RUNNING
    job.wait(0.2)
    assert _halts(job, "a") == [("loss", "c (silent for 6.0 s)")]
    job.end("a", "stopped")
    job.end("b", "stopped")
    assert job.state.round is not None
    assert job.state.round.size == 2
    job.close("b", detail="OOM")
    assert _halts(job, "a")[-1] == ("loss", "b (its agent died: OOM)")
    job.decide(Closed("nobody", SILENT))


def test_a_node_that_leaves_says_why() -> None:
    """A node that gets SIGTERM leaves, and the other one waits for a replacement, which takes its rank."""
    job = SmallJob()
    job.add("a", "b")
    job.feed("b", Leaving("signal", "SIGTERM"))
    assert _halts(job, "a") == [("leave", "b (was told to stop: SIGTERM)")]
    job.end("a", "stopped")
    job.add("c")
    place = next(one.assignment for one in job.commands["c"] if isinstance(one, Formed))
    assert place.group_rank == 1


def test_a_node_may_leave_before_it_is_known() -> None:
    """The first document of a node may say that it goes."""
    job = SmallJob()
    state = make_state(SmallJob.make_member("a", job.config), job.now, is_first=True)
    job.decide(Said(replace(state, leaving="signal")))
    assert not job.state.nodes


def test_a_node_that_has_left_counts_for_the_next_round() -> None:
    """Two of three nodes say that they go, and end: the third one goes on alone, since they are nowhere else."""
    job = SmallJob(MAJORITY, min_nodes=1, max_nodes=3, last_call_timeout=5.0, has_successors=True)
    job.decide(MayFound())
    job.add("a", "b", "c")
    for name in ("b", "c"):
        job.feed(name, Leaving("signal"))
        job.close(name)
    job.end("a", "stopped")
    sizes = [command.assignment.group_world_size for command in job.commands["a"] if isinstance(command, Formed)]
    assert sizes == [3, 1]
    assert describe_majority(job.state) == ""


def test_a_node_that_leaves_counts_for_one_coordinator() -> None:
    """Node b says to a that it goes, loses the connection, and comes to c: with its seat both would form a round."""
    job = SmallJob(MAJORITY, min_nodes=1, max_nodes=3, has_successors=True)
    job.decide(MayFound())
    job.add("a", "b", "c")
    job.feed("b", Leaving("signal"))
    assert may_form(job.state, {"a"})
    promise = Promise(2, "c")
    states = []
    for name in "bc":
        member, _ = membership.decide(job.members[name], membership.Connected(promise), job.now)
        member, _ = membership.decide(member, OrderRead(Order(promise, "gather")), job.now)
        states.append(make_state(member, job.now, is_first=True))
    other = coordinating.decide(Job(promise, MAJORITY, job.now), map(Said, states), now=job.now)
    assert not may_form(other, {"c"})
    assert [seat.is_lost for seat in other.seats] == [False, True, False]


def test_a_node_that_leaves_a_round_of_another_coordinator_is_lost() -> None:
    """The next coordinator hears of the node for the first time when it goes: its seat is not awaited."""
    first = SmallJob(LEASE)
    first.add("a", "b")
    second = SmallJob(LEASE, term=2)
    second.move("a", first.members["a"])
    second.move("b", replace(first.members["b"], leaving="signal"))
    assert second.state.phase == HALTING
    assert second.state.halt is not None
    assert second.state.halt.detail == "b (was told to stop)"


def test_only_a_round_that_lacks_nodes_is_named() -> None:
    """A round whose nodes are here is not named as the one that lacks nodes."""
    base, later = Round(1, 1, "x", "r", 1), Round(2, 2, "x", "r", 3)
    proposal = Proposal(later, 0, base, ("a",))
    member = SmallJob.make_member("a", JobConfig())
    state = replace(make_state(member, 0.0, is_first=True), node="a", started=base, accepted=(proposal,))
    job = Job(state.promise, MAJORITY, 0.0, here={"a": state})
    assert describe_majority(job) == "1 of another round's 3 nodes are here, 2 are needed"


def _state(name: str, started: Round | None, *accepted: Proposal) -> NodeState:
    """Return the state of an idle node that follows coordinator x."""
    state = make_state(SmallJob.make_member(name, JobConfig()), 0.0, is_first=False)
    return replace(state, promise=Promise(9, "x"), started=started, accepted=accepted)


def test_a_start_that_nobody_has_received_counts() -> None:
    """Coordinator x is no member of round 2. Node a has never read its start, and node b, which has, is cut off."""
    first, second = Round(1, 1, "o", "r", 3), Round(2, 2, "x", "r", 3)
    here = {"a": _state("a", first, Proposal(second, 0, first, ("a", "b", "d"))), "c": _state("c", first)}
    job = Job(Promise(9, "x"), MAJORITY, 0.0, here=here, started_by=(second,))
    assert (find_base(job), may_form(job, {"a", "c"})) == (second, False)
    assert may_form(replace(job, started_by=()), {"a", "c"}), "an agent that has not started the round has abandoned it"


def test_each_proposal_that_may_have_started_needs_its_majority() -> None:
    """Round 2 runs on b and c, which may go on without a; y, which knew of it, has proposed round 3, and lost b."""
    first, second, third = Round(1, 1, "o", "r", 3), Round(2, 2, "p", "r", 3), Round(3, 3, "y", "r", 5)
    older = Proposal(second, 0, first, ("a", "b", "c"))
    newer = Proposal(third, 0, first, ("a", "b", "d", "e", "f"))
    here = {"a": _state("a", first, older, newer), "d": _state("d", first, newer)}
    here |= {name: _state(name, None, newer) for name in "ef"}
    job = Job(Promise(9, "x"), MAJORITY, 0.0, here=here)
    assert list_needed(job) == (first, second, third)
    assert not may_form(job, set("adef"))
    assert describe_majority(job) == "1 of another round's 3 nodes are here, 2 are needed"


def test_one_of_two_goes_on_where_its_user_wants_that() -> None:
    """Half of a pair is no majority, so it goes on with `--on-split=continue` alone."""
    base = Round(1, 1, "o", "r", 2)
    for on_split in ("stop", "continue"):
        job = Job(Promise(9, "x"), MAJORITY, 0.0, config=JobConfig(on_split=on_split), here={"a": _state("a", base)})
        assert may_form(job, {"a"}) is (on_split == "continue")


def test_with_a_lease_the_proposal_of_another_coordinator_counts_as_started() -> None:
    """No seats are counted there: without it a member that has not read the `start` forms a round beside that one."""
    proposed = Round(1, 1, "o", "r", 2)
    here = {"a": _state("a", None, Proposal(proposed, 0, None))}
    assert find_base(Job(Promise(9, "x"), LEASE, 0.0, here=here)) == proposed


def test_no_round_is_proposed_before_all_have_promised() -> None:
    """A node that has promised nothing yet may have accepted another proposal, of which its next state tells."""
    job = SmallJob(MAJORITY, min_nodes=1, max_nodes=1, has_successors=True)
    job.decide(MayFound())
    states = [make_state(job.make_member(name, job.config), 0.0, is_first=True) for name in "ab"]
    promised = [replace(state, promise=job.state.promise) for state in states]
    before = coordinating.decide(job.state, [Said(promised[0]), Said(states[1])], now=job.now)
    assert before.proposed is None
    assert coordinating.decide(before, [Said(promised[1])], now=job.now).proposed is not None


def test_nodes_that_differ_are_refused() -> None:
    """A node with other settings or another script is told both values, and the job goes on without it."""
    job = SmallJob(min_nodes=1, max_nodes=3)
    job.add("a", script="train.py")
    job.add("b", config=replace(job.config, max_restarts=5))
    job.add("c", script="other.py")
    details = [one.detail for name in "bc" for one in job.commands[name] if isinstance(one, Refused)]
    assert details[0] == "--max-restarts is 5 here and 0 in the job"
    assert "'other.py' here and 'train.py' in the job" in details[1]
    refused = job.members["b"]
    job.close("b", BROKEN)
    assert [one.node for one in job.state.refusals] == ["c"]
    state = make_state(replace(refused, is_over=False), job.now, is_first=True)
    job.decide(Said(state))
    assert [one.node for one in job.state.refusals] == ["c", "b"]


def test_a_refused_node_says_nothing_of_rounds() -> None:
    """A node of another job knows another round, in a higher term: this job waits for none of its members."""
    job = SmallJob()
    job.add("a")
    stranger = replace(
        make_state(job.members["a"], 0.0, is_first=True),
        node="stranger",
        config=replace(job.config, max_restarts=5),
        promise=Promise(9, "elsewhere"),
        started=Round(9, 9, "elsewhere", "r", 2),
    )
    job.decide(Said(stranger))
    assert coordinating.make_order(job.state, "stranger").phase == "refuse"
    assert (job.state.round, job.state.promise.term) == (None, 1)
    job.add("b")
    assert job.state.phase == RUNNING


def test_a_job_that_nobody_is_in_begins_anew() -> None:
    """If all nodes go before the first round, the next node decides the settings."""
    job = SmallJob()
    job.add("a")
    job.close("a")
    assert job.state.config is None
    assert coordinating.next_at(job.state, job.now) is None


def test_the_jobs_first_node_decides_the_durations() -> None:
    """A node with other durations is taken in, and gets the job's."""
    job = SmallJob()
    job.add("a")
    job.add("b", config=replace(job.config, join_timeout=5.0))
    assert job.members["b"].config == job.config


def test_a_node_with_the_same_fixed_rank_is_refused() -> None:
    """The second node with a fixed rank is refused in a job that runs; before its first round the job ends."""
    job = SmallJob(max_nodes=3)
    job.add("a", has_fixed_rank=True, preferred_rank=0)
    job.add("b", has_fixed_rank=True, preferred_rank=1)
    job.add("c", has_fixed_rank=True, preferred_rank=1)
    job.wait(9.0)
    assert any(isinstance(one, Refused) for one in job.commands["c"])
    job = SmallJob()
    job.add("a", "b", has_fixed_rank=True, preferred_rank=0)
    job.wait(9.0)
    assert _end(job, "b").end.verdict == "refused"


def test_a_node_that_cannot_start_ends_the_job() -> None:
    """A program that can't be started ends the job at once with that node's verdict."""
    job = SmallJob()
    job.add("a", "b")
    job.end("b", "cannot_start", verdict="cannot_start", detail="no such file")
    assert _end(job, "a").end.verdict == "cannot_start"


def test_a_machine_that_fails_again_and_again_is_excluded() -> None:
    """After its second failure a node is told that it is excluded, and so is the next agent on its machine."""
    job = SmallJob(max_nodes=4, max_restarts=9, last_call_timeout=5.0, exclude_after=Window(1, 3600.0))
    job.add("a", machine="ma")
    job.add("b", machine="mb")
    job.add("c", machine="mc")
    job.wait(5.0)
    job.end("c", "failed", **_FAILED)
    job.end("a", "stopped")
    job.end("b", "stopped")
    assert [one.reason for one in job.state.exclusions] != []
    job.add("d", machine="mc")
    assert any(isinstance(one, Refused) and one.verdict == "excluded" for one in job.commands["d"])


def test_too_few_nodes_end_the_job_in_time() -> None:
    """After `join_timeout` a job with too few nodes ends with 201."""
    job = SmallJob(join_timeout=60.0)
    job.add("a")
    job.wait(60.0)
    assert _end(job, "a").end.verdict == "rendezvous"


def test_a_growing_job_warns_its_workers() -> None:
    """A new node makes the round make way after its delay and its warning."""
    job = SmallJob(min_nodes=1, max_nodes=2, scale_up_delay=2.0, scale_up_grace=3.0)
    job.add("a")
    job.add("b")
    job.wait(2.0)
    assert job.told("a")[-1] == "Warned"
    job.wait(3.0)
    assert _halts(job, "a") == [("join", "b")]
    job.end("a", "stopped")
    assert job.told("b") == ["Formed"]


def test_a_new_coordinator_goes_on_with_the_round() -> None:
    """A coordinator that takes the lease finds all members of the last round running, and changes nothing."""
    first = SmallJob(LEASE)
    first.add("a", "b")
    second = SmallJob(LEASE, term=2)
    for name in "ab":
        second.move(name, first.members[name])
    assert (second.state.phase, second.told("a")) == (RUNNING, [])
    first.decide(LeaseRenewed(first.now, 1))
    first.decide(Said(make_state(second.members["b"], 0.0, is_first=True)))
    assert first.state.is_over
    assert coordinating.make_order(first.state, "b").phase == "search"
    assert coordinating.decide(first.state, [], now=0.0) is first.state


def test_a_store_that_lost_its_data_hinders_nobody() -> None:
    """A lease counts its terms from the beginning again: nodes obey its holder as before, and the round runs on."""
    first = SmallJob(LEASE, term=9)
    first.add("a", "b")
    first.decide(LeaseRenewed(first.now + 5.0, 2))
    assert first.state.promise.term == 9
    second = SmallJob(LEASE, term=3)
    second.decide(LeaseRenewed(second.now + 5.0, 3))
    for name in "ab":
        second.move(name, first.members[name])
    assert (second.state.phase, second.state.promise.term, second.told("a")) == (RUNNING, 10, [])


def test_a_failure_that_was_settled_counts_once() -> None:
    """The next coordinator reads that the failure of the last round has its restart already."""
    first = SmallJob(LEASE, max_restarts=1)
    first.add("a", "b")
    assert first.state.round is not None
    assert first.state.memory is not None
    memory = replace(first.state.memory, restart_count=1, settled_round=first.state.round.round_id)
    second = SmallJob(LEASE, term=2, max_restarts=1)
    for name in "ab":
        end = RoundEnd("failed", _FAILED)
        second.move(name, replace(first.members[name], phase="idle", ended=end, memory=memory))
    assert (second.state.end, second.state.restart_count, second.told("a")) == (None, 1, ["Formed"])


def test_a_coordinator_says_how_much_it_has() -> None:
    """One that knows of no round has nothing, one that awaits members less than one whose round runs; so has a node."""
    first = SmallJob(LEASE)
    assert compute_standing(first.state) == KNOWS_NOTHING
    first.add("a", "b")
    assert compute_standing(first.state) == RUNS_ROUND
    second = SmallJob(LEASE, term=2)
    second.move("a", first.members["a"])
    assert compute_standing(second.state) == KNOWS_ROUND
    members = (first.members["a"], SmallJob.make_member("n", first.config))
    assert [compute_node_standing(member) for member in members] == [KNOWS_ROUND, KNOWS_NOTHING]


def test_the_members_of_the_last_round_are_awaited_for_two_leases() -> None:
    """A member that does not come to the new coordinator within two leases is lost."""
    first = SmallJob(LEASE)
    first.add("a", "b")
    second = SmallJob(LEASE, term=2)
    second.move("a", first.members["a"])
    second.wait(12.1)
    assert second.state.phase == HALTING


def test_a_job_with_several_endpoints_needs_more_than_half() -> None:
    """One of three nodes forms no round, looks elsewhere after two leases, and ends with the missing number."""
    first = SmallJob(MAJORITY, max_nodes=3, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b", "c")
    second = SmallJob(MAJORITY, term=2, min_nodes=1, max_nodes=3, has_successors=True)
    second.config = first.config
    lone = replace(first.members["c"], phase="idle", ended=RoundEnd("stopped"))
    second.move("c", lone)
    second.wait(12.1)
    second.wait(12.1)
    assert any(isinstance(one, Search) for one in second.commands["c"])
    third = SmallJob(MAJORITY, term=9, max_nodes=3, has_successors=True, join_timeout=1.0)
    third.config = first.config
    third.move("c", replace(lone, config=replace(first.config, min_nodes=1, join_timeout=1.0)))
    third.wait(12.1)
    third.wait(1.1)
    assert "1 of the last round's 3 nodes are here, 2 are needed" in _end(third, "c").end.detail


def test_a_higher_term_is_taken_over() -> None:
    """A node that has followed a higher coordinator makes this one take a higher term; its round runs on."""
    job = SmallJob(MAJORITY, has_successors=True)
    job.decide(MayFound())
    job.add("a", "b")
    job.add("c")
    job.feed("c", OrderRead(Order(Promise(7, "x"), "gather")))
    assert job.state.promise == Promise(8, "a")
    assert job.told("a") == ["Formed"]


def test_a_coordinator_starts_nothing_after_its_lease() -> None:
    """It starts no round until the lease is renewed; what was accepted in an older term is proposed again."""
    job = SmallJob(LEASE)
    job.decide(LeaseRenewed(job.now + 5.0, 1))
    job.wait(5.0)
    job.add("a", "b")
    assert (job.state.round, job.told("a")) == (None, [])
    job.decide(LeaseRenewed(job.now + 5.0, 3))
    assert (job.state.promise, job.state.phase) == (Promise(3, "a"), RUNNING)
    job.wait(9.0)
    assert job.state.phase == RUNNING


def test_a_job_whose_lease_is_never_renewed_says_so_at_its_end() -> None:
    """All its nodes are there, so not they are missing."""
    job = SmallJob(LEASE, join_timeout=20.0)
    job.decide(LeaseRenewed(job.now + 5.0, 1))
    job.wait(5.0)
    job.add("a", "b")
    job.wait(20.0)
    end = _end(job, "b").end
    assert (end.verdict, end.detail) == (
        "store_lost",
        "the lease could not be renewed within 20 s, so no round could form",
    )


def test_an_accepted_round_waits_for_the_lease() -> None:
    """What all have accepted when the lease is over starts when it is renewed."""
    job = SmallJob(LEASE)
    for name in "ab":
        job.members[name] = job.make_member(name, job.config)
        job.commands[name] = []
    job.exchange(away=("b",))
    job.state = coordinating.decide(job.state, [Said(make_state(job.members["b"], 0.0, is_first=True))], now=job.now)
    job.state = replace(job.state, lease_until=job.now + 1.0)
    states = {
        name: replace(make_state(job.members[name], 0.0, is_first=False), promise=job.state.promise) for name in "ab"
    }
    job.state = coordinating.decide(job.state, [Said(state) for state in states.values()], now=job.now)
    assert job.state.proposed is not None
    proposals = job.state.proposed.proposals
    accepted = [Said(replace(state, accepted=(proposals[name],))) for name, state in states.items()]
    state = coordinating.decide(job.state, accepted, now=job.now + 1.0)
    assert state.round is None
    assert coordinating.decide(state, [LeaseRenewed(job.now + 5.0, 1)], now=job.now + 2.0).round is not None


def test_a_coordinator_that_steps_down_sends_its_nodes_to_the_other_one() -> None:
    """Their workers run on, and the next coordinator goes on with their round."""
    job = SmallJob(LEASE)
    job.add("a", "b")
    job.decide(StepDown("elsewhere"))
    assert job.commands["b"][1:] == [Search("elsewhere")]
    assert job.members["b"].phase == "runs"


def test_a_node_may_bring_the_proof_that_the_last_coordinator_is_dead() -> None:
    """Of two nodes one is left, which tells the next coordinator, and they go on without the dead one's seat."""
    first = SmallJob(MAJORITY, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b")
    left = replace(first.members["b"], phase="idle", ended=RoundEnd("stopped"))
    for dead, is_awaited in (("", True), ("a", False)):
        state = Job(Promise(2, "n"), MAJORITY, 0.0)
        said = replace(make_state(left, 0.0, is_first=True, dead=dead), promise=state.promise)
        seats = coordinating.decide(state, [Said(said)], now=0.0).seats
        assert [seat.is_awaited for seat in seats] == [is_awaited, False]


def test_the_others_do_not_wait_again_for_a_silent_coordinator() -> None:
    """More than half of the nodes go on as soon as only the coordinator before is missing; half of them wait for it."""
    first = SmallJob(MAJORITY, max_nodes=3, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b", "c")
    states = [make_state(first.members[name], 0.0, is_first=True) for name in "bc"]
    state = Job(Promise(2, "b"), MAJORITY, 0.0, silent="a")
    state = coordinating.decide(state, [Said(states[0])], now=0.0)
    assert state.phase == "running"
    assert coordinating.decide(state, [Said(states[1])], now=0.0).phase == "halting"
    both = Job(Promise(2, "b"), MAJORITY, 0.0, silent="x")
    assert coordinating.decide(both, map(Said, states), now=0.0).phase == "running"


def test_a_proof_that_comes_later_ends_the_wait_for_the_last_coordinator() -> None:
    """A node that learns of the death while others are waited for says so, and its seat is given up."""
    first = SmallJob(MAJORITY, max_nodes=3, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b", "c")
    states = [make_state(first.members[name], 0.0, is_first=True) for name in "bc"]
    state = coordinating.decide(Job(Promise(2, "b"), MAJORITY, 0.0), map(Said, states), now=0.0)
    assert (state.phase, state.is_awaiting) == (RUNNING, True)
    state = coordinating.decide(state, [Said(replace(states[0], dead="a"))], now=0.0)
    assert (state.phase, state.is_awaiting) == (HALTING, False)
    assert coordinating.decide(state, [Said(replace(states[1], dead="a"))], now=0.0).seats == state.seats


def test_a_node_that_ended_before_its_round_was_known_is_lost() -> None:
    """A coordinator that learns late of a newer round counts the seats of the nodes that have ended since."""
    first = SmallJob(MAJORITY, max_nodes=3, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b", "c")
    proposal = Proposal(Round(5, 7, "x", "1/1/a", 3, 0), 1, first.state.round, ())
    state = make_state(first.members["b"], 0.0, is_first=False)
    first.decide(Said(replace(state, promise=first.state.promise, accepted=(proposal,))))
    first.close("b")
    started = proposal.round
    state = make_state(first.members["c"], 0.0, is_first=False)
    first.members["c"] = replace(first.members["c"], started=started, accepted=())
    first.exchange()
    assert first.state.round == started
    assert "b" not in first.state.nodes


def test_the_nodes_whose_seats_are_needed_are_chosen_first() -> None:
    """A node that has accepted the last round, and has never read its start, comes before a node that is new."""
    first = SmallJob(MAJORITY, max_nodes=2, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b")
    second = SmallJob(MAJORITY, term=2, max_nodes=2, has_successors=True)
    second.add("n")
    for name in "ab":
        second.move(name, replace(first.members[name], phase="idle", ended=RoundEnd("stopped")))
    assert second.state.round is not None
    assert (second.state.round.term, second.told("n")) == (2, [])


def test_a_proposal_without_one_of_its_members_is_abandoned() -> None:
    """A node that goes before it has accepted the proposal is not waited for; one that still runs is told to stop."""
    job = SmallJob()
    for name in "ab":
        job.members[name] = job.make_member(name, job.config)
        job.commands[name] = []
    said = [
        replace(make_state(member, 0.0, is_first=True), promise=job.state.promise) for member in job.members.values()
    ]
    state = coordinating.decide(job.state, map(Said, said), now=job.now)
    assert state.proposed is not None
    assert coordinating.decide(state, [Closed("b", BROKEN)], now=job.now).proposed is None
    busy = replace(said[1], phase="runs", started=Round(1, 1, "a", "r", 1))
    state = coordinating.decide(state, [Said(busy)], now=job.now)
    assert (state.proposed, coordinating.make_order(state, "b").phase) == (None, "halt")


def test_a_seat_has_one_holder() -> None:
    """A second node that claims the seat of another one is no member."""
    job = SmallJob(max_nodes=2)
    job.add("a", "b")
    thief = replace(job.members["b"], node="thief")
    job.move("thief", thief)
    assert not job.state.nodes["thief"].is_member
    assert _halts(job, "thief")[-1][0] == "replaced"


def test_the_nodes_that_are_gone_are_bounded() -> None:
    """Of thousands of nodes that came and went some hundred are remembered."""
    job = SmallJob(min_nodes=400, max_nodes=500)
    job.add(*(f"n{number}" for number in range(260)))
    for number in range(260):
        job.close(f"n{number}")
    assert len(job.state.gone) <= 256


def test_documents_survive_the_network() -> None:
    """Each document is read as it was written, and a wrong word in it is refused."""
    job = SmallJob(LEASE)
    job.add("a", "b")
    state, order = make_state(job.members["b"], job.now, is_first=True), coordinating.make_order(job.state, "b")
    assert from_document(NodeState, to_message(state)) == state
    assert from_document(Order, to_message(order)) == order
    for kind, document, field in (
        (NodeState, state, "phase"),
        (Order, order, "phase"),
        (RoundEnd, RoundEnd("done"), "outcome"),
    ):
        with pytest.raises(MessageError, match=field):
            from_document(kind, {**to_message(document), field: "nonsense"})


def test_a_spare_that_takes_a_lease_over_knows_the_round_that_began_without_it() -> None:
    """It forms no round beside the members of that one, and waits two leases for them."""
    first = SmallJob(LEASE, min_nodes=1, max_nodes=2, has_successors=True)
    first.decide(MayFound())
    first.add("a", "b", "spare")
    assert first.state.round is not None
    spare = first.members["spare"]
    state = Job(Promise(2, "spare"), LEASE, 0.0, dead="a")
    said = replace(make_state(spare, 0.0, is_first=True), promise=state.promise)
    state = coordinating.decide(state, [Said(said), MayFound()], now=0.0)
    assert (state.round, state.proposed) == (first.state.round, None)
    lease = first.config.lease
    assert coordinating.decide(state, [], now=2 * lease - 0.1).proposed is None
    assert coordinating.decide(state, [], now=2 * lease).proposed is not None


def test_a_memory_is_bounded() -> None:
    """Of many long causes the newest are kept."""
    attempts = tuple({"summary": "x" * 900, "number": number} for number in range(60))
    memory = write_memory(
        Job(Promise(), LEASE, 0.0, attempts=attempts), Round(1, 1, "a", "r", 1), edition=0, settled_round="", now=0.0
    )
    assert len(encode(to_message(memory))) <= LARGEST_MEMORY
    assert memory.attempts[-1]["number"] == 59


# --- a node alone ----------------------------------------------------------------------------------------------------
def _alone() -> tuple[SmallJob, Promise]:
    job = SmallJob(min_nodes=1, max_nodes=1)
    job.add("a")
    return job, job.state.promise


def test_a_node_obeys_no_lower_coordinator() -> None:
    """An order of a lower term changes nothing."""
    job, _ = _alone()
    job.feed("a", OrderRead(Order(Promise(0, "z"), "halt")))
    assert job.told("a") == ["Formed"]


def test_a_node_that_leaves_starts_nothing() -> None:
    """A node that goes obeys no order for a round."""
    job, promise = _alone()
    job.feed("a", Leaving("signal"))
    before = job.members["a"]
    job.feed("a", OrderRead(Order(promise, "halt")))
    assert job.members["a"] == before
    job._feed("a", OrderRead(Order(promise, "search", to="b:1")))
    assert job.commands["a"][-1] == Search("b:1")


@pytest.mark.parametrize("case", ["running", "no proposal", "old", "other store", "again"])
def test_a_node_accepts_only_what_it_can_start(case: str) -> None:
    """A proposal is not accepted while workers run, for an older round, for a store that is closed, or twice."""
    job, promise = _alone()
    started = job.members["a"].started
    place = next(one.assignment for one in job.commands["a"] if isinstance(one, Formed))
    assert started is not None
    member = job.members["a"] if case == "running" else replace(job.members["a"], phase="idle")
    newer = replace(started, number=started.number if case == "old" else 9)
    proposal = None if case == "no proposal" else Proposal(newer, 0, None)
    if case == "other store":
        member = replace(member, store_address=StoreAddress("a", 99))
    if case == "again":
        member = replace(member, accepted=(Proposal(newer, 0, None),))
    job.members["a"] = member
    job._feed("a", OrderRead(Order(promise, "propose", assignment=place, proposal=proposal)))
    assert job.members["a"].accepted == member.accepted


def test_a_round_that_is_halted_before_its_start_has_come_ends_here() -> None:
    """It was started all the same, and the coordinator waits for the word that it has ended on each member."""
    job, promise = _alone()
    member = job.members["a"]
    assert member.started is not None
    assert member.place is not None
    newer = replace(member.started, number=9)
    place = replace(member.place, round_id=newer.round_id)
    job.members["a"] = replace(member, phase="idle", accepted=(Proposal(newer, 0, None),), places=(place,))
    job._feed("a", OrderRead(Order(promise, "halt", newer)))
    assert (job.members["a"].started, job.members["a"].ended) == (newer, RoundEnd("stopped"))
    assert job.told("a") == ["Formed"]


def test_a_node_that_is_cut_off_stops_its_workers() -> None:
    """Its user reads for how long it had no answer."""
    job, _ = _alone()
    job._feed("a", CutOff(9.0))
    assert _halts(job, "a") == [("fenced", "no answer for 9 s")]


def test_a_start_that_was_never_accepted_is_ignored() -> None:
    """A node starts no round that it does not know."""
    job, promise = _alone()
    job._feed("a", OrderRead(Order(promise, "start", Round(1, 5, "a", "r", 1))))
    assert job.told("a") == ["Formed"]


def test_nothing_happens_to_a_round_that_is_over() -> None:
    """Reports of an older round, of an idle node and to a node that is over change nothing."""
    job, promise = _alone()
    job.feed("a", WorkersFailing(99))
    assert not job.members["a"].is_failing
    job.end("a", "done")
    before = job.members["a"]
    job._feed("a", OrderRead(Order(promise, "gather")))
    assert job.members["a"] == before


def test_a_node_promises_to_follow_the_coordinator_to_which_it_comes() -> None:
    """Its first state counts at once; where it has promised to follow a higher one it keeps that promise."""
    member = SmallJob.make_member("a", SmallJob().config)
    for promise, kept in ((Promise(2, "x"), Promise(2, "x")), (Promise(1, "y"), Promise(2, "x"))):
        member, commands = membership.decide(member, membership.Connected(promise), 0.0)
        assert (member.promise, commands) == (kept, ())
