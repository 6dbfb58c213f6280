"""The elastic sampler: each sample once per epoch, through any sequence of world sizes."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from elastic_run.worker import ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Numbers(Dataset[int]):
    """The samples are their own indices.

    Args:
        size: How many there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def run_life(size: int, ranks: int, state: dict[str, Any] | None, *, batch: int, steps: int, **options: Any) -> Any:
    """Let all ranks of one life take some steps, and return what they took and the state that any of them saves."""
    samplers = [ElasticSampler(size, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        batches: Iterator[Any] = sampler.track(DataLoader(Numbers(size), batch_size=batch, sampler=sampler))
        for _, samples in zip(range(steps), batches, strict=False):
            taken[sampler._rank] += samples.tolist()
    states = [sampler.state_dict() for sampler in samplers]
    return taken, states


def run_epoch(size: int, lives: Sequence[tuple[int, int, int]], **options: Any) -> tuple[list[int], list[int]]:
    """Go through an epoch in several lives, and return all samples and how many each rank of the last one took."""
    state, everything = None, []
    for ranks, batch, steps in lives:
        taken, states = run_life(size, ranks, state, batch=batch, steps=steps, **options)
        everything += [sample for samples in taken for sample in samples]
        state = states[0]
    ranks, batch, _ = lives[-1]
    taken, _ = run_life(size, ranks, state, batch=batch, steps=size + 1, **options)
    return [*everything, *(sample for samples in taken for sample in samples)], [len(samples) for samples in taken]


LIVES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=150)
@given(size=st.integers(0, 80), lives=LIVES, shuffle=st.booleans(), seed=st.integers(0, 3))
def test_each_sample_exactly_once(size: int, lives: list[tuple[int, int, int]], *, shuffle: bool, seed: int) -> None:
    """Whatever the sizes of the lives, with an uneven tail every sample is taken once, none twice, none never."""
    taken, _ = run_epoch(size, lives, shuffle=shuffle, seed=seed, tail="uneven")
    assert sorted(taken) == list(range(size))


@settings(deadline=None, max_examples=100)
@given(size=st.integers(1, 80), lives=LIVES)
def test_padding_repeats_less_than_one_round(size: int, lives: list[tuple[int, int, int]]) -> None:
    """With tail="pad" every sample is taken, fewer are repeated than there are ranks, and all take equally many."""
    taken, last = run_epoch(size, lives, tail="pad")
    counts = Counter(taken)
    assert set(counts) == set(range(size))
    assert len(taken) - size < max(ranks for ranks, _, _ in lives)
    assert len(set(last)) == 1


@settings(deadline=None, max_examples=100)
@given(size=st.integers(0, 80), lives=LIVES)
def test_dropping_leaves_out_less_than_one_round(size: int, lives: list[tuple[int, int, int]]) -> None:
    """With tail="drop" no sample is taken twice, and fewer are left out than there are ranks."""
    taken, last = run_epoch(size, lives, tail="drop")
    assert len(set(taken)) == len(taken)
    assert size - len(taken) < max(ranks for ranks, _, _ in lives)
    assert len(set(last)) == 1


@settings(deadline=None, max_examples=150)
@given(size=st.integers(0, 80), ranks=st.integers(1, 6), batch=st.integers(1, 4))
def test_by_default_each_sample_once_and_equal_steps(size: int, ranks: int, batch: int) -> None:
    """By default all ranks take equally many steps, and a sample twice only where the last step has too few for all."""
    taken, each = run_epoch(size, [(ranks, batch, 0)])
    assert set(taken) == set(range(size))
    assert len({-(-samples // batch) for samples in each}) == 1
    in_last_step = size % (ranks * batch)
    assert len(taken) - size == (ranks - in_last_step if 0 < in_last_step < ranks else 0)


@settings(deadline=None, max_examples=150)
@given(size=st.integers(0, 80), lives=LIVES)
def test_by_default_no_life_costs_a_sample(size: int, lives: list[tuple[int, int, int]]) -> None:
    """By default, too, every sample is taken whatever the lives; only the one that ends the epoch repeats any."""
    taken, last = run_epoch(size, lives)
    _, batch, _ = lives[-1]
    assert set(taken) == set(range(size))
    assert len(taken) - size < max(ranks for ranks, _, _ in lives)
    assert len({-(-samples // batch) for samples in last}) == 1


@settings(deadline=None, max_examples=100)
@given(size=st.integers(0, 60), ranks=st.integers(1, 6), batch=st.integers(1, 4), tail=st.sampled_from(["once", "pad"]))
def test_full_batches_only_are_equally_many(size: int, ranks: int, batch: int, tail: Any) -> None:
    """With the loader's drop_last all ranks take equally many full batches, and no sample twice but to fill one."""
    taken = []
    for rank in range(ranks):
        sampler = ElasticSampler(size, rank=rank, world_size=ranks, tail=tail)
        loader: DataLoader[Any] = DataLoader(Numbers(size), batch_size=batch, sampler=sampler, drop_last=True)
        assert len(loader) == -(-size // ranks) // batch
        taken.append([samples.tolist() for samples in sampler.track(loader)])
    assert {len(batches) for batches in taken} == {-(-size // ranks) // batch}
    assert {len(samples) for batches in taken for samples in batches} <= {batch}
    flat = [sample for batches in taken for samples in batches for sample in samples]
    assert len(flat) - len(set(flat)) < ranks


def test_who_counts_by_hand_takes_equally_many() -> None:
    """Without `track` nothing is known of batches: all ranks take equally many, and a loader is as long on each."""
    samplers = [ElasticSampler(10, rank=rank, world_size=4) for rank in range(4)]
    assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers] == [3] * 4
    assert {len(DataLoader(Numbers(10), batch_size=2, sampler=sampler)) for sampler in samplers} == {2}


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 60), ranks=st.integers(1, 5), batch=st.integers(1, 4), steps=st.integers(0, 6))
def test_every_rank_saves_the_same(size: int, ranks: int, batch: int, steps: int) -> None:
    """Between two steps the state is the same on every rank, so one may save it for all."""
    _, states = run_life(size, ranks, None, batch=batch, steps=steps)
    assert all(state == states[0] for state in states)


def test_prefetched_samples_do_not_count() -> None:
    """Loader workers that are far ahead of the loop change nothing: what the loop took is what is saved."""
    sampler = ElasticSampler(100, rank=0, world_size=1)
    loader = DataLoader(Numbers(100), batch_size=5, sampler=sampler, num_workers=2, prefetch_factor=4)
    batches: Iterator[Any] = sampler.track(loader)
    taken = [*next(batches).tolist(), *next(batches).tolist()]
    assert sampler.consumed == 10
    del batches
    again = ElasticSampler(100, rank=0, world_size=1)
    again.load_state_dict(sampler.state_dict())
    assert sorted([*taken, *again]) == list(range(100))


def test_an_epoch_has_its_own_order() -> None:
    """The order follows from seed and epoch alone: the same everywhere, another one in the next epoch."""
    orders = []
    for seed, epoch in ((7, 0), (7, 0), (7, 1), (8, 0)):
        sampler = ElasticSampler(50, seed=seed, rank=0, world_size=1)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[1]
    assert orders[2] != orders[0]
    assert orders[3] != orders[0]


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    """With shuffle=False ranks take turns through the data set."""
    ranks = [list(ElasticSampler(6, shuffle=False, rank=rank, world_size=2)) for rank in range(2)]
    assert ranks == [[0, 2, 4], [1, 3, 5]]


def test_the_next_epoch_begins_anew() -> None:
    """set_epoch starts an epoch from its beginning, but leaves the one that a state goes on with where it was."""
    sampler = ElasticSampler(10, rank=0, world_size=1)
    sampler.set_epoch(3)
    sampler.advance(4)
    resumed = ElasticSampler(10, rank=0, world_size=1, seed=99)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(3)
    assert (resumed.consumed, len(resumed), resumed.epoch) == (4, 6, 3)
    assert list(resumed) == list(sampler)
    resumed.set_epoch(4)
    assert (resumed.consumed, len(resumed)) == (0, 10)


def test_an_epoch_at_its_end_gives_nothing() -> None:
    """A state saved with the last batch goes on with the next epoch."""
    sampler = ElasticSampler(7, rank=0, world_size=2, tail="drop")
    loader = DataLoader(Numbers(7), batch_size=2, sampler=sampler, drop_last=True)
    assert len(list(sampler.track(loader))) == 1
    assert (sampler.consumed, len(sampler), list(sampler)) == (7, 0, [])


def test_an_epoch_that_is_used_up_is_said() -> None:
    """Who forgets set_epoch gets no samples, and is told why; who goes on from the end of an epoch is not."""
    sampler = ElasticSampler(4, rank=0, world_size=1)
    loader = DataLoader(Numbers(4), sampler=sampler)
    assert len(list(sampler.track(loader))) == 4
    with pytest.warns(UserWarning, match=r"epoch 0 is used up, nothing is left of it: call set_epoch\(1\) first"):
        assert list(sampler.track(loader)) == []
    sampler.set_epoch(1)
    assert len(list(sampler.track(loader))) == 4
    resumed = ElasticSampler(4, rank=0, world_size=1)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed.track(DataLoader(Numbers(4), sampler=resumed))) == []


def test_a_state_that_does_not_fit_is_refused() -> None:
    """A state of other data is named with both sizes, before a sample is lost."""
    sampler = ElasticSampler(10, rank=0, world_size=1)
    state = sampler.state_dict()
    for change, message in (
        ({"size": 9}, "of 9 samples, this one has 10"),
        ({"shuffle": False}, "shuffle=False, this sampler has True"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict({**state, **change})
    bad: Any
    for bad in (None, [1], {**state, "epoch": "first"}, {**state, "size": None}, {}):
        with pytest.raises(ValueError, match=r"the state was not written by ElasticSampler\.state_dict: "):
            sampler.load_state_dict(bad)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": iter([1])}, TypeError, "type list_iterator has no length"),
        ({"data": 3, "tail": "stretch"}, ValueError, "tail='stretch' is none of 'once', 'pad', 'drop', 'uneven'"),
        ({"data": True}, TypeError, "type bool has no length"),
        ({"data": 3, "rank": 2, "world_size": 2}, ValueError, "rank=2 is not below world_size=2"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """What can't be a sampler is refused with what was given."""
    with pytest.raises(error, match=message):
        ElasticSampler(**arguments)


def test_a_loader_of_another_sampler_is_refused() -> None:
    """`track` counts for its own loader only."""
    sampler = ElasticSampler(4, rank=0, world_size=1)
    with pytest.raises(ValueError, match="does not use this sampler"):
        next(sampler.track(DataLoader(Numbers(4))))


def test_a_loader_without_batches_counts_samples() -> None:
    """With batch_size=None each item is one sample."""
    sampler = ElasticSampler(4, rank=0, world_size=1)
    batches = sampler.track(DataLoader(Numbers(4), sampler=sampler, batch_size=None))
    next(batches)
    assert sampler.consumed == 1


def test_what_nobody_counts_is_said_before_it_is_saved() -> None:
    """A loop that goes through the loader without `track` is warned when it saves where it is."""
    sampler = ElasticSampler(4, rank=0, world_size=1)
    loader = DataLoader(Numbers(4), sampler=sampler)
    next(iter(loader))
    with pytest.warns(UserWarning, match=r"loop over track\(loader\)"):
        sampler.state_dict()
    next(sampler.track(loader))
    assert sampler.state_dict()["consumed"] == 1
