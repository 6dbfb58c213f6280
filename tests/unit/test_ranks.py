"""Ranks of nodes and of workers, beside an oracle that is as dumb as can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_run.core.job.documents import NodeInfo, StoreAddress
from elastic_run.core.job.ranks import WorkerRanks, assign_group_ranks, assign_worker_ranks
from elastic_run.core.job.short_lists import list_ranks
from elastic_run.core.job.state import Node

_STORE = StoreAddress("h", 1)


def _node(name: str, rank: int | None = None, preferred: int | None = None, location: str = "") -> Node:
    info = NodeInfo(name, 1, 1, preferred_rank=preferred, location=location)
    return Node(name, info, _STORE, arrived=1, arrived_at=0.0, rank=rank)


_RANKS = st.none() | st.integers(-1, 7)


@given(st.lists(st.tuples(_RANKS, _RANKS), min_size=1, max_size=6))
def test_group_ranks_are_dense_and_unique_and_wishes_are_heard(wishes: list[tuple[int | None, int | None]]) -> None:
    """Ranks run from 0 to the number of nodes; who comes first gets what it had, then what it prefers."""
    candidates = [_node(f"n{index}", rank, preferred) for index, (rank, preferred) in enumerate(wishes)]
    ranks = assign_group_ranks(candidates)
    assert list(ranks.values()) == list(range(len(wishes)))
    had = {rank for rank, _ in wishes if rank in range(len(wishes))}
    for rank in had:
        assert ranks[next(c.node for c in candidates if c.rank == rank)] == rank
    new = {preferred for rank, preferred in wishes if rank is None and preferred in range(len(wishes))}
    for preferred in new - had:
        holder = next(candidate for candidate in candidates if ranks[candidate.node] == preferred)
        assert holder.node_info.preferred_rank == preferred


def test_the_rest_is_given_out_in_order_of_joining() -> None:
    """Nodes without a wish take the lowest free ranks, the first the lowest."""
    ranks = assign_group_ranks([_node("a"), _node("b", rank=1), _node("c", preferred=0), _node("d")])
    assert ranks == {"c": 0, "b": 1, "a": 2, "d": 3}


def test_nodes_of_one_switch_are_neighbours() -> None:
    """Where locations are known, they order the nodes that have neither a rank nor a wish."""
    order = [("a", "s2/0"), ("b", "s1/1"), ("c", ""), ("d", "s2/2"), ("e", "s1/0")]
    candidates = [_node(node, location=location) for node, location in order]
    assert list(assign_group_ranks([*candidates, _node("f", rank=0)])) == ["f", "c", "e", "b", "a", "d"]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 4)), max_size=6))
def test_worker_ranks_are_those_of_counting_one_by_one(sizes: list[tuple[str, int]]) -> None:
    """Numbering the workers one after the other, in all and per role, gives the same ranks."""
    workers = [(node, role) for node, (role, size) in enumerate(sizes) for _ in range(size)]
    for node, ranks in enumerate(assign_worker_ranks(sizes)):
        role = sizes[node][0]
        alike = [number for number, other in workers if other == role]
        assert ranks == WorkerRanks(
            base_rank=[number for number, _ in workers].index(node),
            role_rank=alike.index(node),
            role_world_size=len(alike),
        )


def test_ranks_are_listed_as_ranges() -> None:
    """Consecutive ranks are one range; of many ranges the first ones are shown, with the number of all ranks."""
    assert list_ranks([0, 1, 2, 4]) == "0-2, 4"
    assert list_ranks(range(0, 40, 2)) == "0, 2, 4, 6, 8, ... (20 in all)"
