"""Who is silent, as a table of observations."""

from __future__ import annotations

from elastic_run.core.protocol.liveness import Leases, expect_first, interrupted, observe, watch


def test_a_node_that_does_not_heartbeat_for_a_lease_is_silent() -> None:
    """A counter that stands still for the lease makes its node silent, not before."""
    leases = watch(Leases(6.0), ["a", "b"], 100.0)
    leases, silent = observe(leases, {"a": 1, "b": 1}, 101.0)
    assert silent == ()
    leases, silent = observe(leases, {"a": 2, "b": 1}, 106.9)
    assert silent == ()
    leases, silent = observe(leases, {"a": 2, "b": 1}, 107.0)
    assert silent == ("b",)
    assert leases.age("b", 107.0) == 6.0
    assert leases.age("stranger", 107.0) == 0.0


def test_a_counter_that_goes_back_is_a_heartbeat() -> None:
    """Any change counts: another store may begin anew."""
    leases, _ = observe(watch(Leases(6.0), ["a"], 0.0), {"a": 9}, 1.0)
    leases, silent = observe(leases, {"a": 1}, 6.5)
    assert silent == ()
    assert leases.age("a", 7.0) == 0.5


def test_a_node_that_never_heartbeat_has_a_whole_lease() -> None:
    """Who was never seen is silent when a lease has passed since it was first looked for."""
    leases, silent = observe(watch(Leases(6.0), ["a"], 0.0), {"a": None}, 5.9)
    assert silent == ()
    assert observe(leases, {"a": None}, 6.0)[1] == ("a",)


def test_the_first_heartbeat_may_have_more_leases() -> None:
    """A node that was never seen has all of them, and a node that was seen has one."""
    leases = expect_first(Leases(6.0), 2, 0.0)
    assert expect_first(leases, 2, 1.0) is leases
    leases, silent = observe(watch(leases, ["a", "b"], 0.0), {"a": None, "b": 1}, 0.5)
    assert observe(leases, {"a": None, "b": 1}, 6.5)[1] == ("b",)
    assert observe(leases, {"a": None, "b": 2}, 11.9)[1] == ()
    assert observe(leases, {"a": None, "b": 2}, 12.0)[1] == ("a",)
    assert silent == ()


def test_fewer_leases_for_the_first_heartbeat_begin_anew() -> None:
    """A node that had more time until now is not silent at once; what is known of the others stays."""
    leases, _ = observe(watch(expect_first(Leases(6.0), 2, 0.0), ["a", "b"], 0.0), {"a": None, "b": 1}, 8.0)
    leases = expect_first(leases, 1, 10.0)
    assert leases.age("b", 10.0) == 2.0
    assert observe(leases, {"a": None, "b": 2}, 15.9)[1] == ()
    assert observe(leases, {"a": None, "b": 2}, 16.0)[1] == ("a",)


def test_a_store_that_says_that_a_node_is_gone_is_believed() -> None:
    """None after a heartbeat makes a node silent at once; a node that was not asked for only ages."""
    leases, _ = observe(watch(Leases(6.0), ["a", "b"], 0.0), {"a": 1, "b": 1}, 1.0)
    assert observe(leases, {"a": None}, 1.5)[1] == ("a",)


def test_time_without_reading_does_not_count() -> None:
    """After an outage of the observer's own all leases start anew."""
    leases, _ = observe(watch(Leases(6.0), ["a"], 0.0), {"a": 1}, 1.0)
    leases, silent = observe(interrupted(leases, 50.0), {"a": 1}, 55.9)
    assert silent == ()
    assert observe(leases, {"a": 1}, 56.0)[1] == ("a",)


def test_heartbeats_that_expired_while_nobody_reached_the_store_are_no_deaths() -> None:
    """After such an outage a node that the store says is gone has a lease to show itself; after that it is believed."""
    leases, _ = observe(watch(Leases(6.0), ["a", "b"], 0.0), {"a": 1, "b": 1}, 1.0)
    leases, silent = observe(interrupted(leases, 50.0), {"a": None, "b": None}, 50.5)
    assert silent == ()
    leases, silent = observe(leases, {"a": 2, "b": None}, 52.0)
    assert silent == ()
    assert observe(leases, {"a": None, "b": None}, 52.5)[1] == ("a",)
    assert observe(leases, {"a": 3, "b": None}, 56.0)[1] == ("b",)


def test_who_is_no_longer_watched_is_forgotten() -> None:
    """Watching others forgets whom nobody asks for, and keeps what is known of the rest."""
    leases, _ = observe(watch(Leases(6.0), ["a", "b"], 0.0), {"a": 1, "b": 1}, 1.0)
    leases = watch(leases, ["b", "c"], 5.0)
    assert set(leases.heartbeats) == {"b", "c"}
    assert leases.age("b", 5.0) == 4.0
    assert watch(leases, ["b", "c"], 9.0) is leases
