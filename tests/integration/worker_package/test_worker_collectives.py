"""Collectives of `elastic_run.worker` on real gloo groups, beside what one process computes.

The workers are forked from a template: their start is not what is tested, and an import of torch takes each a second.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launch import Launch


HEAD = """
import json, os, sys
import torch, torch.distributed as dist
import elastic_run.worker as worker
def say(**words): os.write(1, (json.dumps(words) + "\\n").encode())
context = worker.init_distributed()
rank, ranks = context.rank, context.world_size
"""


@pytest.fixture
def run(launch: Launch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run a script on some workers, and return what they said, by rank."""

    def run(body: str, *, workers: int) -> list[dict[str, Any]]:
        path = tmp_path / "collective.py"
        path.write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
        flags = ("--standalone", "--preload=torch", f"--nproc-per-node={workers}")
        job = launch(*flags, path, env={"OMP_NUM_THREADS": "1"})
        assert job.wait_exit() == 0, job.stderr
        return sorted(map(json.loads, job.stdout.splitlines()), key=lambda word: int(word["rank"]))

    return run


@pytest.mark.long
def test_reduce_mean(run: Callable[..., list[dict[str, Any]]]) -> None:
    """The mean is the same on all ranks: of floats, of tensors of any type, which stay as they were."""
    words = run(
        """
        given = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
        mean = worker.reduce_mean(given)
        half = worker.reduce_mean(torch.full((2,), 60000.0, dtype=torch.float16))
        whole = worker.reduce_mean(torch.tensor([rank, 7], dtype=torch.int16))
        tiny = worker.reduce_mean(torch.tensor([2.0 * rank]).to(torch.float8_e4m3fn))
        pair = worker.reduce_mean(torch.tensor([rank + 1j]))
        is_kept = given.tolist() == [1.0 + rank, 2.0]
        say(rank=rank, number=worker.reduce_mean(0.1 * rank), mean=mean.tolist(), is_kept=is_kept,
            half=[str(half.dtype), *half.tolist()], whole=[str(whole.dtype), *whole.tolist()],
            tiny=[str(tiny.dtype), tiny.item()], pair=[str(pair.dtype), str(pair.item())],
            has_gradient=mean.requires_grad, truth=worker.reduce_mean(rank == 0))
        """,
        workers=3,
    )
    expected = {
        "mean": [2.0, 2.0],
        "is_kept": True,
        "half": ["torch.float16", 60000.0, 60000.0],
        "tiny": ["torch.float8_e4m3fn", 2.0],
        "pair": ["torch.complex64", "(1+1j)"],
        "has_gradient": False,
    }
    for rank, word in enumerate(words):
        assert word["number"] == pytest.approx(0.1)
        assert word["truth"] == pytest.approx(1 / 3)
        rest = {name: word[name] for name in expected}
        assert (word["rank"], rest, word["whole"]) == (rank, expected, ["torch.float32", 1.0, 7.0])


@pytest.mark.long
def test_all_to_all_and_its_gradients_equal_one_process(run: Callable[..., list[dict[str, Any]]]) -> None:
    """Uneven splits, empty ones among them, deliver the right rows; gradients, first and second, come back right."""
    words = run(
        """
        torch.manual_seed(0)
        plan = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]  # rows from each rank to each
        width = 2
        # One process's view: all ranks' rows in one tensor, exchanged by indices.
        sizes = [sum(row) for row in plan]
        everything = torch.randn(sum(sizes), width, dtype=torch.float64, requires_grad=True)
        begins = [[sum(sizes[:r]) + sum(plan[r][:c]) for c in range(ranks)] for r in range(ranks)]
        def rows_for(c): return [begins[r][c] + i for r in range(ranks) for i in range(plan[r][c])]
        index = [rows_for(c) for c in range(ranks)]
        weights = [torch.randn(len(i), width, dtype=torch.float64) for i in index]
        def loss_of(rows, weight): return (rows ** 3 * weight).sum()
        reference = sum(loss_of(everything[i], w) for i, w in zip(index, weights))
        (first,) = torch.autograd.grad(reference, everything, create_graph=True)
        (second,) = torch.autograd.grad((first ** 2).sum(), everything)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

        rows = everything.detach()[mine].clone().requires_grad_()
        came = worker.all_to_all(rows, plan[rank])
        again = worker.all_to_all(rows, plan[rank], [row[rank] for row in plan])
        (own,) = torch.autograd.grad(loss_of(came, weights[rank]), rows, create_graph=True)
        (own_second,) = torch.autograd.grad((own ** 2).sum(), rows)
        say(rank=rank, rows=torch.equal(came, everything[index[rank]]), is_same=torch.equal(came, again),
            first=torch.allclose(own, first[mine]), second=torch.allclose(own_second, second[mine]), count=len(came))
        """,
        workers=3,
    )
    right = {"rows": True, "is_same": True, "first": True, "second": True}
    assert words == [{"rank": rank, **right, "count": count} for rank, count in enumerate((3, 4, 3))]


@pytest.mark.long
def test_all_to_all_sends_every_type(run: Callable[..., list[dict[str, Any]]]) -> None:
    """Types that gloo itself refuses arrive as well; so do shapes of any kind, views and conjugates."""
    words = run(
        """
        types = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn"
        wrong = []
        for name in types.split():
            kind = getattr(torch, name)
            for shape in ((4,), (4, 3), (4, 2, 3), (4, 0), (0, 3)):
                make = lambda sender: (torch.arange(24).reshape(4, 6) + sender).flatten()[: torch.Size(shape).numel()]
                given = [make(sender).reshape(shape).to(kind) for sender in range(2)]
                came = worker.all_to_all(given[rank])
                half = shape[0] // 2
                part = slice(rank * half, rank * half + half)
                if not torch.equal(came.to(torch.complex128), torch.cat([g[part] for g in given]).to(torch.complex128)):
                    wrong.append((name, shape))
        turned = torch.arange(8.0).reshape(2, 4).t()
        same = torch.equal(worker.all_to_all(turned), torch.cat([turned[2 * rank : 2 * rank + 2]] * 2))
        mirrored = torch.tensor([1 + 2j, 3 - 1j]).conj()
        same = same and torch.equal(worker.all_to_all(mirrored), mirrored[rank].repeat(2))
        say(rank=rank, wrong=wrong, same=same)
        """,
        workers=2,
    )
    assert words == [{"rank": rank, "wrong": [], "same": True} for rank in range(2)]


@pytest.mark.long
def test_all_to_all_refuses_what_does_not_fit(run: Callable[..., list[dict[str, Any]]]) -> None:
    """Splits that don't fit the tensor or the group are refused on the rank itself, with the numbers."""
    words = run(
        """
        def error_of(*arguments):
            try: worker.all_to_all(*arguments)
            except ValueError as error: return str(error)
        rows = torch.zeros(3)
        say(rank=rank, errors=[error_of(rows), error_of(rows, [1, 1]), error_of(rows, [3]), error_of(rows, [4, -1]),
            error_of(rows, [1, 2], [1, 2, 3]), error_of(torch.tensor(1.0))])
        """,
        workers=2,
    )
    assert words[0]["errors"] == [
        "3 rows can't be shared out equally among 2 ranks: give input_splits",
        "input_splits=[1, 1] are 2 rows, but the tensor has 3",
        "input_splits=[3]: it must be 2 numbers from 0, one for each rank of the group",
        "input_splits=[4, -1]: it must be 2 numbers from 0, one for each rank of the group",
        "output_splits=[1, 2, 3]: it must be 2 numbers from 0, one for each rank of the group",
        "all_to_all sends rows: the tensor needs at least one dimension",
    ]


@pytest.mark.long
def test_parallel_groups(run: Callable[..., list[dict[str, Any]]]) -> None:
    """Model-parallel ranks are neighbours, then data, then pipeline; collectives stay inside a group."""
    words = run(
        """
        groups = worker.parallel_groups(data=2, model=2)
        def members(part):
            return sorted(int(r) for r in dist.get_process_group_ranks(part.group))
        errors = []
        for sizes in ({"data": 3}, {"model": 3}):
            try: worker.parallel_groups(**sizes)
            except ValueError as error: errors.append(str(error))
        say(rank=rank, model=members(groups.model), data=members(groups.data), pipeline=members(groups.pipeline),
            mean=worker.reduce_mean(rank, group=groups.data.group), places=[groups.data.rank, groups.model.rank],
            sizes=[groups.pipeline.size, groups.data.size, groups.model.size], names=list(groups.mesh.mesh_dim_names),
            sent=worker.all_to_all(torch.tensor([rank, rank]), group=groups.model.group).tolist(), errors=errors)
        """,
        workers=4,
    )
    for rank, word in enumerate(words):
        pair, column = rank // 2 * 2, rank % 2
        assert word["model"] == word["sent"] == [pair, pair + 1]
        assert word["data"] == [column, column + 2]
        assert word["pipeline"] == [rank]
        assert (word["mean"], word["places"], word["sizes"]) == (column + 1.0, [rank // 2, rank % 2], [1, 2, 2])
        assert word["names"] == ["pipeline", "data", "model"]
        assert word["errors"] == [
            "data=3 x pipeline=1 x model=1 = 3, but the world size is 4",
            "data=1 x pipeline=1 x model=3 = 3, but the world size is 4",
        ]


@pytest.mark.long
def test_who_is_not_in_a_group_is_told(run: Callable[..., list[dict[str, Any]]]) -> None:
    """A rank outside of a group is refused, and doesn't take its own value for the group's."""
    words = run(
        """
        group = dist.new_group([0])
        def error_of(call, given):
            try: return float(call(given, group=group))
            except worker.WorkerError as error: return str(error)
        one = torch.ones(1)
        say(rank=rank, said=[error_of(worker.reduce_mean, 1.0), error_of(worker.reduce_mean, one),
            error_of(worker.all_to_all, one)])
        """,
        workers=2,
    )
    outside = "rank 1 is not in this group, and can't ask its ranks"
    assert [word["said"] for word in words] == [[1.0] * 3, [outside] * 3]


@pytest.mark.long
def test_without_a_group_nobody_is_forgotten(launch: Launch, tmp_path: Path) -> None:
    """A worker that hasn't joined the others is told so, and doesn't take its own value for everybody's."""
    path = tmp_path / "early.py"
    path.write_text("import elastic_run.worker as worker\nworker.reduce_mean(1.0)", encoding="utf-8")
    job = launch("--standalone", "--preload=torch", "--nproc-per-node=2", path)
    assert job.wait_exit() == 1
    assert "this is one of 2 workers, but there is no process group: call init_distributed() first" in job.stderr
