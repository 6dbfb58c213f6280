"""Which nodes a job excludes: by an exit code, or by its own history, and the rules against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elastic_run.core.config import Window
from elastic_run.core.job.coordination import take_memory, write_memory
from elastic_run.core.job.documents import Promise, Round
from elastic_run.core.job.exclusion import exclude, judge, note_incident
from elastic_run.core.job.founding import ONLY_ONE
from elastic_run.core.job.membership import Leaving, Refused, WorkersFailing
from elastic_run.core.job.restart_policy import Failure
from elastic_run.core.job.state import Job, Root
from elastic_run.records import replace
from tests.support.small_job import SmallJob

if TYPE_CHECKING:
    from elastic_run.core.config import JobConfig

HOUR = 3600.0


class Play:
    """A job of several nodes that fail one after another.

    Args:
        names: Its nodes.
        machines: The scheduler's names of their machines.
        settings: Of its configuration.
    """

    def __init__(self, names: list[str], machines: dict[str, str] | None = None, **settings: Any) -> None:
        defaults = {"min_nodes": 1, "max_nodes": len(names), "max_restarts": 10_000, "max_backoff": 0.0}
        self.small_job = SmallJob(**{**defaults, "last_call_timeout": 9e9, **settings})
        self.small_job.now = 0.0
        self.machines = machines or {}
        for name in names:
            self.join(name)

    @property
    def job(self) -> Job:
        """The job, as its policy sees it."""
        return self.small_job.state

    @property
    def config(self) -> JobConfig:
        """Its configuration."""
        return self.small_job.config

    @property
    def now(self) -> float:
        """The time."""
        return self.small_job.now

    @now.setter
    def now(self, now: float) -> None:
        self.small_job.now = now

    @property
    def refused(self) -> dict[str, Refused]:
        """The nodes that were told that the job goes on without them."""
        told = ((name, command) for name, commands in self.small_job.commands.items() for command in commands)
        return {name: command for name, command in told if isinstance(command, Refused)}

    def join(self, name: str, **info: Any) -> None:
        """Let a node join."""
        self.small_job.add(name, machine=self.machines.get(name, ""), **info)

    def leave(self, name: str) -> None:
        """Let the agent of an excluded node end."""
        self.small_job.close(name)

    def fail(self, name: str, signature: str = "same", code: int = 1, severity: int = 0, **said: Any) -> None:
        """Let a worker of a node fail, and the round end; its report says more on request."""
        self.now += 60.0
        report = {"exit_code": code, "severity": severity, "signature": signature, "uptime": 99.0}
        self.small_job.feed(name, WorkersFailing(self.job.number))
        for member in self.members:
            if member == name:
                self.small_job.end_quietly(member, "failed", **{**report, "summary": f"{name} fails", **said})
            else:
                self.small_job.end_quietly(member, "stopped")
        self.small_job.exchange()

    @property
    def members(self) -> set[str]:
        """The nodes of the round that runs."""
        return {node.node for node in self.job.members}


def test_a_node_leaves_after_as_many_failures_as_the_user_allows() -> None:
    """With --exclude-after=2/1h the second failure excludes its node, with the evidence; the others go on."""
    play = Play(["a", "b", "c"], min_nodes=2, exclude_after=Window(2, HOUR))
    play.fail("b", "one")
    assert (play.members, play.refused) == ({"a", "b", "c"}, {})
    play.fail("b", "another")
    refuse = play.refused["b"]
    assert (refuse.verdict, refuse.detail) == ("excluded", "the cause of 2 failures within 3600 s: b fails")
    assert play.members == {"a", "c"}
    assert "b is excluded, the cause of 2 failures within 3600 s: b fails" in play.job.news
    play.leave("b")
    assert set(play.job.nodes) == {"a", "c"}
    assert play.job.restart_count == 2


@pytest.mark.parametrize("settings", [{}, {"exclude_after": Window(3, HOUR)}, {"exclude_exit_codes": (7,)}])
def test_nobody_is_excluded_before(settings: dict[str, object]) -> None:
    """Without the flags, or below the number, or with another exit code, the node stays."""
    play = Play(["a", "b", "c"], None, **settings)
    play.fail("b")
    play.fail("b")
    assert play.members == {"a", "b", "c"}


def test_an_incident_expires() -> None:
    """A failure that is older than the period counts no more."""
    play = Play(["a", "b", "c"], exclude_after=Window(2, HOUR))
    play.fail("b")
    play.now += HOUR
    play.fail("b")
    assert play.members == {"a", "b", "c"}
    play.fail("b")
    assert play.members == {"a", "c"}


def test_a_window_may_be_the_whole_job() -> None:
    """Without a period nothing expires."""
    play = Play(["a", "b", "c"], exclude_after=Window(2))
    play.fail("b")
    play.now += 1000 * HOUR
    play.fail("b")
    assert play.refused["b"].detail == "the cause of 2 failures: b fails"


def test_a_failure_without_a_known_cause_is_nobodys() -> None:
    """A node that has only seen consequences is not suspected."""
    play = Play(["a", "b", "c"], exclude_after=Window(1, HOUR), exclude_exit_codes=(1,))
    play.fail("b", severity=50)
    assert play.members == {"a", "b", "c"}
    assert play.job.incidents == ()


def test_all_nodes_fail_alike_it_is_the_code() -> None:
    """Failures that look alike on many nodes are the program's; a failure of another kind still counts."""
    play = Play([f"n{number}" for number in range(10)], exclude_after=Window(2, HOUR))
    for name in ("n0", "n1", "n2", "n3", "n0", "n1", "n4", "n0"):
        play.fail(name)
    assert play.refused == {}
    play.fail("n5", "a GPU fell off the bus")
    play.fail("n5", "a GPU fell off the bus")
    assert set(play.refused) == {"n5"}


@pytest.mark.parametrize(("apart", "excluded"), [(1790.0, {"b"}), (1810.0, set())])
def test_two_failures_count_if_chance_hardly_brings_them_so_close_together(apart: float, excluded: set[str]) -> None:
    """They are no longer apart than the period divided by the number of machines that failed in it."""
    play = Play(["a", "b", "c"], exclude_after=Window(2, HOUR))
    play.fail("a", "one")
    play.fail("b", "another")
    play.now += apart - 60
    play.fail("b", "a third")
    assert set(play.refused) == excluded


def test_two_nodes_that_both_fail_alike_stay() -> None:
    """In a job of two nodes a program that fails on both is not a machine's fault."""
    play = Play(["a", "b"], exclude_after=Window(2, HOUR))
    play.fail("a")
    play.fail("b")
    play.fail("a")
    assert play.refused == {}


def test_the_minimum_is_kept() -> None:
    """The node stays where fewer than the minimum would be left, and the other nodes read why."""
    play = Play(["a", "b"], min_nodes=2, exclude_after=Window(2, HOUR), exclude_exit_codes=(7,))
    play.fail("a")
    play.fail("a")
    assert play.members == {"a", "b"}
    told = "a stays in the job although it was the cause of 2 failures within 3600 s: fewer than 2 nodes would be left"
    assert told in play.job.news
    play.fail("b", code=7)
    assert play.members == {"a", "b"}
    assert "b stays in the job although it was" not in play.job.news or "exit code 7" in play.job.news


def test_the_only_store_is_kept() -> None:
    """The node that serves the job's only store stays; with successors it goes."""
    for has_successors, excluded in ((False, set()), (True, {"s"})):
        play = Play([], max_nodes=3, exclude_after=Window(1, HOUR), has_successors=has_successors)
        for name in ("s", "a", "b"):
            play.join(name, serves_store=name == "s")
        play.fail("s")
        assert set(play.refused) == excluded


def test_only_some_are_excluded_by_history() -> None:
    """At most one node in twenty is excluded within the period; after it another may be."""
    play = Play(["a", "b", "c", "d"], exclude_after=Window(2, HOUR))
    for name in ("a", "a", "b", "b"):
        play.fail(name, signature=name)
    assert set(play.refused) == {"a"}
    assert "1 of 3 nodes are excluded already" in play.job.news
    play.now += HOUR
    play.fail("b", "b")
    play.fail("b", "b")
    assert set(play.refused) == {"a", "b"}


def test_an_exit_code_excludes_at_once_and_takes_no_restart() -> None:
    """A worker's exit code of --exclude-exit-codes names its node; so do many of them, one after another."""
    play = Play(["a", "b", "c"], max_restarts=0, exclude_exit_codes=(77,))
    play.fail("b", code=77)
    assert play.refused["b"].detail == "exit code 77 is listed in --exclude-exit-codes: b fails"
    assert play.members == {"a", "c"}
    assert play.job.restart_count == 0
    play.fail("c", code=77)
    assert play.members == {"a"}


def test_a_rule_of_the_user_excludes_at_once_and_takes_no_restart() -> None:
    """A failure whose report says that a rule decides so excludes its node; a node that the job needs stays."""
    play = Play(["a", "b", "c"], max_restarts=0, min_nodes=2)
    play.fail("b", decision="exclude", rule="ECC")
    assert play.refused["b"].detail == "the rule 'ECC' of --failure-rules decides exclude: b fails"
    assert (play.members, play.job.restart_count) == ({"a", "c"}, 0)
    play.fail("c", decision="exclude", rule="ECC")
    assert play.job.phase == "ended"


@pytest.mark.parametrize(("decision", "rule"), [(7, 8), ("explode", None), ([], {})])
def test_a_decision_that_is_garbage_decides_nothing(decision: object, rule: object) -> None:
    """What another node says is taken for nothing if it is not known."""
    play = Play(["a", "b"], max_restarts=1)
    play.fail("b", decision=decision, rule=rule)
    assert play.members == {"a", "b"}
    assert play.job.restart_count == 1


def test_excluding_has_the_bound_of_changes() -> None:
    """A program that always ends with a listed code ends the job at --membership-window."""
    play = Play(["a", "b", "c"], exclude_exit_codes=(77,), membership_window=Window(1, HOUR))
    play.fail("b", code=77)
    play.fail("c", code=77)
    assert play.job.phase == "ended"


def test_a_machine_does_not_come_back_before_the_period_is_over() -> None:
    """Another agent of an excluded machine is told so; after the period it is taken in."""
    play = Play(["a", "b", "c"], machines={"b": "node7", "b2": "node7"}, exclude_after=Window(1, HOUR))
    play.fail("b")
    play.leave("b")
    play.join("b2")
    assert play.refused["b2"].verdict == "excluded"
    assert play.members == {"a", "c"}
    play.leave("b2")
    play.now += HOUR
    play.join("b2x")
    play.machines["b3"] = "node7"
    play.join("b3")
    assert "b3" not in play.refused


def test_the_next_coordinator_knows_the_history() -> None:
    """Incidents and exclusions go with the memory of the job to the next coordinator, whatever its clock shows."""
    play = Play(["a", "b", "c"], exclude_after=Window(2, HOUR))
    play.fail("b")
    play.fail("b")
    play.fail("c", "another")
    memory = write_memory(play.job, Round(1, 1, "a", "r", 1), edition=0, settled_round="", now=play.now)
    again = take_memory(Job(Promise(), ONLY_ONE, 0.0), replace(memory, age=10.0), play.now + 5010.0)
    assert again.incidents == tuple(replace(one, at=one.at + 5000.0) for one in play.job.incidents)
    assert again.exclusions == tuple(replace(one, at=one.at + 5000.0) for one in play.job.exclusions)
    assert len(again.incidents) == len(again.exclusions) == 1


def test_a_cause_without_a_report_is_an_incident_too() -> None:
    """A failure of which only the exit code is known counts, and looks like those with the same code."""
    play = Play(["a", "b", "c"], exclude_after=Window(1, HOUR))
    root = Root("b", severity=0, order=0, failure=Failure(9))
    job = note_incident(play.job, play.config, root, 5.0)
    assert [(one.machine, one.likeness, one.summary) for one in job.incidents] == [("b", "exit code 9", "")]
    judgement = judge(job, play.config, root)
    assert exclude(job, root, judgement, 5.0).exclusions[0].reason == "the cause of 1 failure within 3600 s"


def test_a_node_that_left_before_is_not_excluded() -> None:
    """A node whose worker failed, and that is gone when the round ends, has left already."""
    play = Play(["a", "b", "c"], exclude_after=Window(1, HOUR))
    play.small_job.end("b", "failed", exit_code=1, severity=0, signature="x", uptime=9.0)
    play.small_job.feed("b", Leaving("signal"))
    for name in ("a", "c"):
        play.small_job.end(name, "stopped")
    assert play.refused == {}
    assert play.members == {"a", "c"}


def test_two_failures_count_only_where_chance_does_not_explain_them() -> None:
    """Where many other nodes fail as well a node stays, and the users read why; its third failure excludes it."""
    names = [f"n{number}" for number in range(20)]
    play = Play(names, exclude_after=Window(2, HOUR))
    play.fail("n0", "a")
    for name in names[1:7]:
        play.now += 5 * 60
        play.fail(name, name)
    play.fail("n0", "b")
    assert play.refused == {}
    told = (
        "n0 stays in the job although it was the cause of 2 failures within 3600 s: 6 other nodes failed as well, so "
        "the failures may be a coincidence"
    )
    assert told in play.job.news
    play.fail("n0", "c")
    assert set(play.refused) == {"n0"}


def test_without_a_period_the_time_since_the_first_failure_gives_the_rate() -> None:
    """Two failures far apart, with others between them, are chance in a long job, too."""
    names = [f"n{number}" for number in range(20)]
    play = Play(names, exclude_after=Window(2))
    for name in names[:7]:
        play.now += HOUR
        play.fail(name, name)
    play.fail("n0", "again")
    assert play.refused == {}
    play.fail("n6", "again")
    assert set(play.refused) == {"n6"}
